"""Test the calls of installed libraries: each candidate's whole proof, with a stand-in for the library in a worker.

The stand-ins of tests/libraries/ have the libraries' signatures (compared with the published sources if those were
fetched) and compute with PyTorch. The tests prove the mapping: layouts, scales, writes in place, lengths that change
between calls. They do not test the libraries' kernels.
"""

from __future__ import annotations

import ast
import copy
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from autosel.candidates.libraries import flash_attn, flashinfer, flashinfer_mm, flashinfer_paged, quack, sgl
from autosel.candidates.libraries.base import Library, LibraryKernel
from autosel.fingerprint import known
from autosel.ops import OPS
from autosel.ops.contract import Mismatch
from autosel.parity.check import Prover, Terms
from autosel.parity.session import Proof
from autosel.values import DTypeName, Passed, Scalar
from tests import drawn, engines

pytestmark = pytest.mark.usefixtures("preforked")

STAND_INS = Path(__file__).parents[1] / "libraries"
HERE = Library(distribution="torch", module="json", least_version=(1, 0))  # installed, and soon imported
ROWS = {"M": 3, "d": 512}
GATED = {"M": 3, "I": 512}
ROPE = {"M": 3, "Hq": 8, "Hkv": 2, "D": 128, "R": 128}
HEADS = {"B": 3, "Hq": 8, "Hkv": 2, "S": 1, "D": 64, "L": 160}
LINEAR = {"M": 3, "N": 256, "K": 512}

Plan = tuple[Any, str, DTypeName, dict[str, int], dict[str, Scalar]]
PLANS: list[Plan] = [
    (flashinfer, "flashinfer:rmsnorm", "bf16", ROWS, {}),
    (flashinfer, "flashinfer:rmsnorm", "fp16", ROWS, {"offset": 1.0}),
    (flashinfer, "flashinfer:add_rmsnorm", "bf16", ROWS, {}),
    (flashinfer, "flashinfer:add_rmsnorm", "fp16", ROWS, {"offset": 1.0}),
    (flashinfer, "flashinfer:rope", "bf16", ROPE, {}),
    (flashinfer, "flashinfer:rope", "fp16", {**ROPE, "R": 64}, {"style": 1}),
    (flashinfer, "flashinfer:swiglu", "bf16", GATED, {}),
    (flashinfer, "flashinfer:geglu", "bf16", GATED, {}),
    (flashinfer, "flashinfer:geglu", "bf16", GATED, {"tanh": 1}),
    (flashinfer, "flashinfer:attn", "bf16", {**HEADS, "B": 1}, {}),
    (flashinfer_mm, "flashinfer_mm:cudnn", "bf16", LINEAR, {"residual": True}),
    (flashinfer_mm, "flashinfer_mm:cublaslt", "bf16", LINEAR, {"bias": True, "residual": True}),
    (flashinfer_paged, "flashinfer_paged:planned", "bf16", {**HEADS, "page": 16}, {}),
    (flashinfer_paged, "flashinfer_paged:planned", "fp16", {**HEADS, "page": 24}, {"window": 40, "softcap": 30.0}),
    (flashinfer_paged, "flashinfer_paged:xqa", "bf16", {**HEADS, "page": 64}, {"window": 40}),
    (sgl, "sgl:rmsnorm", "bf16", ROWS, {}),
    (sgl, "sgl:add_rmsnorm", "bf16", ROWS, {}),
    (sgl, "sgl:add_rmsnorm", "fp16", ROWS, {"offset": 1.0}),
    (sgl, "sgl:rope", "bf16", ROPE, {"style": 1}),
    (sgl, "sgl:swiglu", "bf16", GATED, {}),
    (sgl, "sgl:geglu", "bf16", GATED, {"tanh": 1}),
    (quack, "quack:rmsnorm", "fp16", ROWS, {}),
    (quack, "quack:add_rmsnorm", "bf16", ROWS, {}),
    (quack, "quack:linear", "bf16", LINEAR, {"residual": True}),
    (quack, "quack:linear", "fp16", LINEAR, {"bias": True}),
    (flash_attn, "flash_attn:attn", "bf16", HEADS, {"ragged": True, "softcap": 30.0}),
    (flash_attn, "flash_attn:attn_3", "bf16", HEADS, {}),
    (flash_attn, "flash_attn:attn_4", "bf16", HEADS, {"ragged": True, "window": 40}),
    (flash_attn, "flash_attn:paged_attn_3", "bf16", {**HEADS, "page": 64}, {"window": 40}),
    (flash_attn, "flash_attn:paged_attn_4", "bf16", {**HEADS, "page": 64}, {}),
]


def named(plan: Plan) -> str:
    return " ".join([plan[1], plan[2], *map(str, plan[4])])


@pytest.fixture(autouse=True)
def _no_stand_in_stays() -> Iterator[None]:
    """Remove the stand-ins afterwards, so that later checks do not find them installed."""
    yield
    for name in [n for n, m in sys.modules.items() if STAND_INS in Path(getattr(m, "__file__", None) or "").parents]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def prover() -> Iterator[Prover]:
    """Return one worker for all tests, in which the stand-ins have the libraries' names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", engines.ROOT.as_posix() + ":" + STAND_INS.as_posix())
        with Prover(known.load("h200"), Terms()) as made:
            yield made


def stood_in(module: Any, name: str) -> LibraryKernel:
    """Return the candidate, as if its library were installed."""
    made: LibraryKernel = copy.copy(next(k for k in module.KERNELS if k.name == name))
    made.library = HERE
    if made.op == "linear":  # a stand-in has no steps: the whole battery
        made.limits = lambda w, cc: ""
    return made


@pytest.mark.parametrize("plan", drawn.share(PLANS, days=20), ids=named)
def test_a_library_called_as_its_signature_says_meets_the_contract(plan: Plan, prover: Prover) -> None:
    module, name, dtype, dims, traits = plan
    candidate, fp = stood_in(module, name), known.load("h200")
    w = OPS[candidate.op].workload(dtype, dims, **traits)
    knobs = candidate.knobs(w, fp)
    recipe = candidate.recipe(w, fp, knobs)
    found = prover.prove(Proof(candidate=candidate, recipe=recipe, digest=name, knobs=knobs, workload=w))
    assert isinstance(found, Passed), found


def put_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let imports of a library find its stand-in."""
    monkeypatch.syspath_prepend(STAND_INS)
    for name in [n for n in sys.modules if n.partition(".")[0] in ("arithmetic", *STOOD)]:
        monkeypatch.delitem(sys.modules, name)


def test_planned_attention_plans_when_a_length_has_changed_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reuse the plan for other pages, and for an empty sequence."""
    put_first(monkeypatch)
    monkeypatch.setattr(flashinfer_paged, "_PLANS", OrderedDict())
    wrapper, plans = import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper, []
    plan = wrapper.plan
    monkeypatch.setattr(wrapper, "plan", lambda *a, **kw: (plans.append(a[1].tolist()), plan(*a, **kw)))
    op = OPS["paged_attn"]
    inputs = op.inputs(op.workload("bf16", {**HEADS, "page": 16}), 5)
    lengths, table = inputs["lengths"], inputs["block_table"]
    wrong = []
    for change in (
        lambda: None,
        lambda: table.copy_(table.flip(1)),
        lambda: lengths.sub_(1),
        lengths[0].zero_,
    ):
        change()
        got = flashinfer_paged.planned(*op.arguments(inputs))
        wrong += [found] if isinstance(found := op.verify(inputs, (got,)), Mismatch) else []
    assert wrong == [] and len(plans) == 3


# --- the stand-ins ----------------------------------------------------------------------------------------------------

NORMS = ("rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm")
GATES = ("silu_and_mul", "gelu_tanh_and_mul", "gelu_and_mul")
SOURCES = {
    "flashinfer": {
        "flashinfer/norm/__init__.py": NORMS,
        "flashinfer/rope.py": ("apply_rope_with_cos_sin_cache_inplace",),
        "flashinfer/activation.py": GATES,
        "flashinfer/gemm/gemm_base.py": ("mm_bf16",),
        "flashinfer/decode.py": (
            "single_decode_with_kv_cache",
            "BatchDecodeWithPagedKVCacheWrapper.__init__",
            "BatchDecodeWithPagedKVCacheWrapper._plan_impl",
            "BatchDecodeWithPagedKVCacheWrapper.run",
        ),
        "flashinfer/xqa.py": ("xqa",),
    },
    "sglang-kernel": {"sgl_kernel/elementwise.py": (*NORMS, *GATES)},
    "quack-kernels": {
        "quack/rmsnorm.py": ("rmsnorm",),
        "quack/gemm_interface.py": ("gemm", "gemm_add"),
    },
    "flash-attn-4": {"flash_attn/cute/interface.py": ("flash_attn_varlen_func",)},
}
HOMES = {"quack/gemm_interface.py": "quack.gemm_interface", "flash_attn/cute/interface.py": "flash_attn.cute"}
WHAT = [(e, file, f) for e, files in SOURCES.items() for file, functions in files.items() for f in functions]
STOOD = ("flashinfer", "sgl_kernel", "quack", "flash_attn")
PARTS = (
    "BatchDecodeWithPagedKVCacheWrapper._plan_impl",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "gemm",
    "gemm_add",
    "flash_attn_varlen_func",
)


@pytest.mark.parametrize(("engine", "file", "function"), WHAT, ids=lambda v: v.rpartition("/")[2])
def test_a_stand_in_has_the_published_signature(
    engine: str, file: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare names, order, kind and defaults; for the longest methods only the parameters that are passed."""
    if engines.missing(engine):
        pytest.skip(engines.missing(engine))
    theirs = published(engines.ENGINES / engine / file, function)
    ours = stood(file, function, monkeypatch)
    if function in PARTS:  # arguments passed by name, in any position
        theirs = {n.removeprefix("*"): d for n, d in theirs.items()}
        ours = {n.removeprefix("*"): d for n, d in ours.items() if n != "unused"}
        theirs = {name: theirs[name] for name in ours if name in theirs}
    assert ours == theirs


def published(file: Path, function: str) -> dict[str, str]:
    """Return each parameter with its default, as text, and mark keyword-only ones; for overloads, the last."""
    where: list[ast.stmt] = ast.parse(file.read_text()).body
    *outer, name = function.split(".")
    for cls in outer:
        where = next(n for n in where if isinstance(n, ast.ClassDef) and n.name == cls).body
    node = [n for n in where if isinstance(n, ast.FunctionDef) and n.name == name][-1]
    positional = [*node.args.posonlyargs, *node.args.args]
    missing = [None] * (len(positional) - len(node.args.defaults))
    found = dict(zip([a.arg for a in positional], [*missing, *node.args.defaults], strict=True))
    found |= {f"*{a.arg}": d for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)}
    return {n: "" if d is None else plain(ast.unparse(d)) for n, d in found.items() if n != "self"}


def stood(file: str, function: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    put_first(monkeypatch)
    found: Any = import_module(HOMES.get(file, file.partition("/")[0]))
    for part in function.replace("_plan_impl", "plan").split("."):
        found = getattr(found, part)
    told = {}
    for p in inspect.signature(found).parameters.values():
        default = "" if p.default is p.empty else plain(repr(p.default))
        told["*" + p.name if p.kind == p.KEYWORD_ONLY else p.name] = default
    return {n: d for n, d in told.items() if n != "self"}


def plain(default: str) -> str:
    """Return a default with a dtype given by name as torch's dtype."""
    return {"'float16'": "torch.float16"}.get(default, default)
