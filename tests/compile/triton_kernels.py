"""List the targets and cases of the Triton kernels, shared by the short tests here and their long form in soak.

A kernel is its candidate: its knobs come from the closed forms, for the devices of fingerprints/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autosel.candidates.load import load
from autosel.candidates.registry import own_candidates
from autosel.candidates.triton.base import TritonKernel
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.ops import OPS
from autosel.ops.array import Array
from autosel.ops.contract import Case, Mismatch, Op
from autosel.parity.check import Terms, cases_of, cheap_case, check_all
from autosel.parity.session import Proof
from autosel.parity.truth import run_baseline
from autosel.values import (
    Accepted,
    DTypeName,
    Fingerprint,
    Knobs,
    Parity,
    PythonRecipe,
    Recipe,
    Scalar,
    Workload,
)
from tests.operands import traits_of

HERE = Path(__file__).parent
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
ROWS = 26  # the seed of the arrays
KERNELS = {f"{c.op} {c.name}": c for c in own_candidates() if isinstance(c, TritonKernel)}
# Every compute capability that a known device has, with one such device; and all of them.
DEVICES = known.names()
TARGETS = {facts(known.load(name)).cc: name for name in DEVICES}

Shape = tuple[dict[str, int], dict[str, Scalar]]

_HEADS = {"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 128}
_GEMMA = {"B": 1, "Hq": 4, "Hkv": 1, "S": 1, "D": 256}

# op -> shapes of common models, and some that reach each branch of the kernels. CI compiles the first.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "linear": (
        ({"M": 1, "N": 4096, "K": 4096}, {}),
        ({"M": 1, "N": 1024, "K": 4096}, {}),
        ({"M": 2, "N": 4096, "K": 14336}, {"residual": True}),
        ({"M": 4, "N": 6144, "K": 4096}, {"bias": True}),
        ({"M": 8, "N": 28672, "K": 4096}, {}),
        ({"M": 16, "N": 4096, "K": 4096}, {}),
        ({"M": 64, "N": 1024, "K": 4096}, {"bias": True, "residual": True}),
        ({"M": 512, "N": 4096, "K": 4096}, {}),
    ),
    "linear fp8_e4m3-row": (
        ({"M": 1, "N": 4096, "K": 4096}, {}),
        ({"M": 2, "N": 4096, "K": 14336}, {"residual": True}),
        ({"M": 4, "N": 1024, "K": 4096}, {"bias": True}),
        ({"M": 6, "N": 1024, "K": 4096}, {"bias": True}),
        ({"M": 8, "N": 28672, "K": 4096}, {}),
    ),
    "attn": (
        ({**_HEADS, "L": 8192}, {}),
        ({**_HEADS, "B": 8, "L": 2048}, {"ragged": True}),
        ({**_HEADS, "S": 5, "L": 4096}, {"softcap": 30.0}),
        ({**_HEADS, "S": 256, "L": 4096}, {}),
        ({**_GEMMA, "L": 8192}, {"window": 512}),
        ({**_HEADS, "Hq": 16, "Hkv": 16, "D": 64, "L": 8192}, {}),
        ({**_HEADS, "Hq": 32, "Hkv": 32, "D": 96, "L": 8192}, {}),
        ({**_HEADS, "Hq": 32, "Hkv": 2, "D": 80, "L": 8192}, {}),
        ({**_HEADS, "Hq": 8, "Hkv": 1, "D": 512, "L": 8192}, {}),
    ),
    "attn fp8_e4m3-head": (
        ({**_HEADS, "L": 8192}, {}),
        ({**_HEADS, "B": 8, "L": 2048}, {"ragged": True}),
        ({**_HEADS, "S": 5, "L": 4096}, {"softcap": 30.0}),
        ({**_GEMMA, "L": 8192}, {"window": 512}),
        ({**_HEADS, "Hq": 32, "Hkv": 2, "D": 80, "L": 8192}, {}),
        ({**_HEADS, "Hq": 8, "Hkv": 1, "D": 512, "L": 8192}, {}),
    ),
    "paged_attn": (
        ({**_HEADS, "L": 8192, "page": 16}, {}),
        ({**_GEMMA, "B": 4, "L": 8192, "page": 64}, {"window": 512, "softcap": 50.0}),
        ({**_HEADS, "D": 80, "L": 8192, "page": 1}, {}),
    ),
    "prefill_attn": (
        ({"B": 1, "Hq": 32, "Hkv": 8, "S": 2048, "D": 128}, {}),
        ({"B": 2, "Hq": 4, "Hkv": 1, "S": 512, "D": 256}, {"window": 128}),
        ({"B": 1, "Hq": 8, "Hkv": 8, "S": 512, "D": 80}, {"softcap": 50.0}),
        ({"B": 1, "Hq": 8, "Hkv": 2, "S": 512, "D": 512}, {}),
    ),
    "kv_append": (({"B": 1, "Hkv": 8, "S": 1, "D": 128}, {}), ({"B": 8, "Hkv": 8, "S": 4, "D": 80}, {"page": 16})),
    "rmsnorm": (
        ({"M": 1, "d": 4096}, {}),
        ({"M": 32, "d": 128}, {"offset": 1.0}),
        ({"M": 64, "d": 16384}, {}),
    ),
    "add_rmsnorm": (
        ({"M": 1, "d": 4096}, {}),
        ({"M": 8, "d": 2560}, {"offset": 1.0, "sandwich": 1}),
        ({"M": 64, "d": 16384}, {}),
    ),
    "rope": (
        ({"M": 1, "Hq": 32, "Hkv": 8, "D": 128, "R": 128}, {}),
        ({"M": 64, "Hq": 16, "Hkv": 16, "D": 80, "R": 32}, {"style": 1}),
        ({"M": 1, "Hq": 4, "Hkv": 1, "D": 256, "R": 256}, {}),
    ),
    "swiglu": (({"M": 1, "I": 14336}, {}), ({"M": 512, "I": 11008}, {})),
    "geglu": (({"M": 1, "I": 6912}, {"tanh": 1}), ({"M": 8, "I": 6912}, {})),
    "norm_qkv": (
        ({"M": 1, "d": 4096, "N": 6144}, {}),
        ({"M": 8, "d": 2560, "N": 4096}, {"offset": 1.0}),
        ({"M": 16, "d": 4096, "N": 6144}, {}),
        ({"M": 64, "d": 4096, "N": 6144}, {}),
    ),
    "gate_up": (
        ({"M": 1, "d": 4096, "I": 14336}, {}),
        ({"M": 5, "d": 2560, "I": 10240}, {"offset": 1.0, "activation": 2}),
        ({"M": 16, "d": 4096, "I": 14336}, {"activation": 1}),
        ({"M": 64, "d": 4096, "I": 14336}, {}),
    ),
    "lm_head": (
        ({"M": 1, "V": 128256, "d": 4096}, {"greedy": 1}),
        ({"M": 1, "V": 128256, "d": 4096}, {}),
        ({"M": 8, "V": 262144, "d": 2560}, {"greedy": 1}),
        ({"M": 32, "V": 128256, "d": 4096}, {"greedy": 1}),
        ({"M": 256, "V": 128256, "d": 4096}, {}),
    ),
    "sample": (({"B": 1, "V": 128256, "L": 8192}, {}), ({"B": 64, "V": 262144, "L": 1024}, {})),
}


def workload(op: str, number: int, dtype: DTypeName) -> Workload:
    dims, traits = SHAPES[op][number]
    return OPS[op].workload(dtype, dims, **traits)


# --- parity in the interpreter ----------------------------------------------------------------------------------------


class Interpreted(TritonKernel):
    """The same kernel, limits and knobs, run by Triton's interpreter on CPU tensors."""

    def __init__(self, kernel: TritonKernel) -> None:
        vars(self).update(vars(kernel))

    def knobs(self, w: Workload, fp: Fingerprint) -> Knobs:
        """Return the knobs without programmatic dependent launch, which the interpreter does not support."""
        knobs = super().knobs(w, fp)
        return replaced(knobs, {"pdl": False} if "pdl" in knobs.values else {})

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"interpreted:{self.source}", path=str(HERE), operands=self.operands)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One proof: a kernel at a workload, with the knobs of a device, or with some replaced to reach a branch."""

    kernel: str
    dims: dict[str, int]
    traits: dict[str, Scalar]
    knobs: dict[str, Scalar]
    device: str = "h200"

    @property
    def label(self) -> str:
        words = [f"{n}={v}" for n, v in (*self.traits.items(), *self.knobs.items())]
        return " ".join([self.kernel, *(f"{n}{v}" for n, v in self.dims.items()), *words])

    def prove(self, dtype: DTypeName, pairs: range = range(0)) -> Parity:
        """Run the whole proof in a worker, as for every candidate. `pairs`: rows of the op's array, some of which have
        sizes at which the interpreter takes minutes; `failures` has them at a small one."""
        proof, fp = self.proof(dtype), known.load(self.device)
        # The interpreter takes some 20 us per operation, so a call of microseconds on a GPU takes a second.
        (found,) = check_all([proof], fp=fp, terms=Terms(call_deadline_s=120.0, proof_deadline_s=1800.0, pairs=pairs))
        return found

    def proof(self, dtype: DTypeName) -> Proof:
        return self.proof_of(Interpreted(KERNELS[self.kernel]), dtype)

    def proof_of(self, candidate: TritonKernel, dtype: DTypeName) -> Proof:
        fp = known.load(self.device)
        w = OPS[candidate.op].workload(dtype, self.dims, **self.traits, **traits_of(candidate))
        assert isinstance(candidate.supports(w, fp), Accepted), f"{self.kernel} does not take {w.key}"
        knobs = replaced(candidate.knobs(w, fp), self.knobs)
        return Proof(candidate=candidate, recipe=candidate.recipe(w, fp, knobs), digest="", knobs=knobs, workload=w)

    def failures(self, dtype: DTypeName, share: int, turn: int) -> Iterator[str]:
        """Return faults in every `share`-th hostile case and row of the array from the `turn`-th, here, where
        `interpreted` was imported."""
        return failures_of(self.label, self.proof(dtype), known.load(self.device), share, turn, rows=True)


def failures_of(
    label: str,
    proof: Proof,
    fp: Fingerprint,
    share: int,
    turn: int,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    *,
    rows: bool = False,
) -> Iterator[str]:
    """Return the faults in every `share`-th hostile case from the `turn`-th; `around` wraps each call. `rows`: also in
    every `share`-th row of the array."""
    op = OPS[proof.candidate.op]
    function, hostile = load(op, proof.recipe, "", proof.knobs.values), cases_of(op, proof, fp)
    for case in (*hostile[turn % share :: share], *(rows_of(op, hostile)[turn % share :: share] if rows else ())):
        inputs = case.make(11)
        before = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
        outputs = op.allocate(case.workload, fill=float("nan"))
        where = f"{label} {proof.workload.dtype}: {case.workload.key} {case.name} ({case.covers})"
        try:
            with around():
                function(*op.arguments(inputs), *outputs)
        except RuntimeError as error:
            yield f"{where}: {error}"
            continue
        written = {a.name: inputs[a.name] for a in op.args if a.role == "inout"}
        got = [written[n] if n in written else outputs[i] for i, n in enumerate(op.output_names)]
        found = op.verify(before, got, run_baseline(op, before) if case.averages else None)
        if isinstance(found, Mismatch):
            yield f"{where}: {found.check}: {found.reason}"


def rows_of(op: Op, hostile: Sequence[Case]) -> list[Case]:
    """The rows of an op's array at a size of some hundred elements: at others an interpreter takes minutes. The seed is
    fixed, so that the shares of all days make up the whole."""
    if not hostile:
        return []
    return Array(op, cheap_case(hostile).workload, ROWS, sizes=False).cases(lambda _: True)


def replaced(knobs: Knobs, values: dict[str, Scalar]) -> Knobs:
    unknown = set(values) - set(knobs.values)
    assert not unknown, f"no knobs {unknown}"
    return Knobs(settings=tuple(replace(k, value=values.get(k.name, k.value)) for k in knobs.settings))


def plan(kernel: str, dims: dict[str, int], traits: dict[str, Any] | None = None, **knobs: Scalar) -> Plan:
    return Plan(kernel=kernel, dims=dims, traits=traits or {}, knobs=knobs)


_DECODE = {"B": 1, "Hq": 8, "Hkv": 2, "S": 1, "D": 128, "L": 700}

PLANS = (
    plan("rmsnorm triton:rmsnorm", {"M": 2, "d": 512}, {"offset": 1.0}),
    plan("add_rmsnorm triton:add_rmsnorm", {"M": 2, "d": 512}),
    plan("add_rmsnorm triton:add_rmsnorm", {"M": 2, "d": 512}, {"sandwich": 1, "offset": 1.0}),
    plan("rope triton:rope", {"M": 2, "Hq": 4, "Hkv": 2, "D": 64, "R": 64}),
    plan("rope triton:rope", {"M": 2, "Hq": 4, "Hkv": 2, "D": 80, "R": 32}, {"style": 1}),
    plan("swiglu triton:swiglu", {"M": 2, "I": 512}),
    plan("geglu triton:geglu", {"M": 2, "I": 512}),
    plan("geglu triton:geglu", {"M": 2, "I": 512}, {"tanh": 1}),
    plan("kv_append triton:kv_append", {"B": 2, "Hkv": 2, "S": 1, "D": 64}),
    plan("kv_append triton:kv_append", {"B": 2, "Hkv": 2, "S": 3, "D": 64}, {"page": 16}),
    plan("linear triton:gemv", {"M": 1, "N": 48, "K": 512}, {"residual": True}),
    plan("linear triton:gemv", {"M": 5, "N": 48, "K": 512}, {"bias": True}, split_k=3, grid=2, rows_per_warp=2),
    plan("linear triton:gemv_fp8", {"M": 1, "N": 48, "K": 512}, {"residual": True}),
    plan("linear triton:gemv_fp8", {"M": 5, "N": 48, "K": 512}, {"bias": True}, split_k=3, grid=2, rows_per_warp=2),
    plan("linear triton:gemm", {"M": 12, "N": 140, "K": 512}, {"bias": True}, split_k=2),
    plan("linear triton:gemm", {"M": 300, "N": 140, "K": 128}, {"residual": True}),
    plan("norm_qkv triton:norm_qkv", {"M": 3, "d": 512, "N": 48}, {"offset": 1.0}, grid=2),
    plan("norm_qkv triton:norm_qkv", {"M": 12, "d": 512, "N": 140}),
    plan("gate_up triton:gate_up", {"M": 1, "d": 512, "I": 48}, {"activation": 1}),
    plan("gate_up triton:gate_up", {"M": 12, "d": 512, "I": 140}, {"activation": 2, "offset": 1.0}),
    plan("lm_head triton:lm_head", {"M": 2, "V": 300, "d": 256}, {"greedy": 1}, programs=3),
    plan("lm_head triton:lm_head", {"M": 12, "V": 300, "d": 256}, {"greedy": 1}),
    plan("lm_head triton:lm_head", {"M": 1, "V": 300, "d": 256}),
    plan("sample triton:sample", {"B": 2, "V": 5000, "L": 20}),
    plan("attn triton:attn_decode", _DECODE),
    plan("attn triton:attn_decode", {**_DECODE, "S": 3}, {"ragged": True, "window": 100, "softcap": 30.0}, chunk=96),
    plan("attn triton:attn_decode", {**_DECODE, "S": 20}, {"ragged": True}, chunk=96),
    plan("attn triton:attn_decode@merge", {**_DECODE, "Hq": 10}, {"ragged": True}, chunk=64),
    plan("attn triton:attn_decode", {**_DECODE, "S": 2, "D": 512, "L": 300}, {"ragged": True}, chunk=96),
    plan("attn triton:attn_decode_fp8", {**_DECODE, "S": 3}, {"ragged": True, "window": 100}, chunk=96),
    plan("attn triton:attn_decode_fp8@merge", {**_DECODE, "Hq": 10}, {"softcap": 30.0}, chunk=64),
    plan("attn triton:attn_decode_fp8", {**_DECODE, "D": 512, "L": 300}, {"ragged": True}, chunk=96),
    plan("paged_attn triton:paged_attn_decode", {**_DECODE, "page": 16}, chunk=128),
    plan("paged_attn triton:paged_attn_decode@merge", {**_DECODE, "page": 24, "S": 2}, {"window": 70}, chunk=64),
    plan("paged_attn triton:paged_attn_decode", {**_DECODE, "page": 16, "S": 2}, {"softcap": 30.0}, chunk=96),
    plan("paged_attn triton:paged_attn_decode", {**_DECODE, "page": 24, "D": 512, "L": 300}, chunk=96),
    plan("prefill_attn triton:attn_prefill", {"B": 1, "Hq": 4, "Hkv": 2, "S": 200, "D": 64}),
    plan("prefill_attn triton:attn_prefill", {"B": 1, "Hq": 2, "Hkv": 1, "S": 200, "D": 80}, {"window": 33}, tile_q=64),
    plan("prefill_attn triton:attn_prefill", {"B": 1, "Hq": 4, "Hkv": 2, "S": 200, "D": 64}, {"softcap": 30.0}),
    plan("prefill_attn triton:attn_prefill", {"B": 1, "Hq": 2, "Hkv": 1, "S": 100, "D": 512}),
)
