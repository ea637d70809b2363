"""Test liger-kernel's published kernels in Triton's interpreter: autosel's wrappers call them unchanged.

Two per day, because the interpreter needs half a minute for a whole proof.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

from autosel.candidates.libraries import base, liger
from autosel.fingerprint import known
from autosel.ops import OPS
from autosel.parity.check import Terms, check_all
from autosel.parity.session import Proof
from autosel.values import DTypeName, Fingerprint, Knobs, Passed, PythonRecipe, Recipe, Scalar, Support, Workload
from tests import engines

Plan = tuple[str, DTypeName, dict[str, int], dict[str, Scalar]]
PLANS: list[Plan] = [
    ("rmsnorm", "bf16", {"M": 2, "d": 512}, {}),
    ("rmsnorm", "fp32", {"M": 2, "d": 512}, {"offset": 1.0}),
    ("add_rmsnorm", "bf16", {"M": 2, "d": 512}, {}),
    ("add_rmsnorm", "fp16", {"M": 2, "d": 512}, {"offset": 1.0}),
    ("rope", "bf16", {"M": 2, "Hq": 8, "Hkv": 2, "D": 128, "R": 128}, {}),
    ("rope", "fp32", {"M": 2, "Hq": 4, "Hkv": 1, "D": 64, "R": 16}, {}),
    ("swiglu", "bf16", {"M": 2, "I": 512}, {}),
    ("geglu", "fp16", {"M": 2, "I": 512}, {"tanh": 1}),
]


class Interpreted(base.LibraryKernel):
    """The candidate with another module for its function."""

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"tests.compile.interpreted_liger:{self.function}")

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        return super().supports(w, known.load("h200"))


def interpreted(op: str) -> Interpreted:
    kernel = next(k for k in liger.KERNELS if k.op == op)
    made = Interpreted.__new__(Interpreted)
    made.__dict__.update(kernel.__dict__)
    return made


def named(plan: Plan) -> str:
    return " ".join([plan[0], plan[1], *(f"{n}{v}" for n, v in (*plan[2].items(), *plan[3].items()))])


@pytest.mark.in_turns(
    {"norms": lambda: [p for p in PLANS if "norm" in p[0]], "others": lambda: [p for p in PLANS if "norm" not in p[0]]},
    label=named,
    days=2,
)
def test_ligers_own_kernel_meets_the_contract_through_its_wrapper(
    choice: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, dtype, dims, traits = choice
    if engines.missing("liger-kernel"):
        pytest.skip(engines.missing("liger-kernel"))
    monkeypatch.setenv("PYTHONPATH", engines.paths("liger-kernel"))
    monkeypatch.syspath_prepend(engines.ENGINES / "liger-kernel")
    candidate, w, fp = interpreted(op), OPS[op].workload(dtype, dims, **traits), known.load("h200")
    knobs: Any = candidate.knobs(w, fp)
    proof = Proof(candidate=candidate, recipe=candidate.recipe(w, fp, knobs), digest="", knobs=knobs, workload=w)
    # Without the array: rows with sizes beyond 16 bits take the interpreter minutes each.
    terms = Terms(call_deadline_s=120.0, proof_deadline_s=1800.0, pairs=range(0))
    (found,) = check_all([proof], fp=fp, terms=terms)
    assert isinstance(found, Passed), found
