"""What the Triton kernels are compiled for and proven on: shared by the short tests here and their long form in soak.

A kernel is its candidate: its knobs come from the closed forms, for the devices of fingerprints/.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosel.candidates.registry import own_candidates
from autosel.candidates.triton.base import TritonKernel
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.ops import OPS
from autosel.parity.check import Terms, check_all
from autosel.parity.session import Proof
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

HERE = Path(__file__).parent
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
KERNELS = {f"{c.op} {c.name}": c for c in own_candidates() if isinstance(c, TritonKernel)}
# Every compute capability that a known device has, with one such device; and all of them.
DEVICES = known.names()
TARGETS = {facts(known.load(name)).cc: name for name in DEVICES}

Shape = tuple[dict[str, int], dict[str, Scalar]]

_HEADS = {"B": 1, "Hq": 32, "Hkv": 8, "S": 1, "D": 128}
_GEMMA = {"B": 1, "Hq": 4, "Hkv": 1, "S": 1, "D": 256}

# op -> shapes of models people serve, and some to reach each branch of the kernels. The first is compiled in CI.
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
    "rmsnorm": (
        ({"M": 1, "d": 4096}, {}),
        ({"M": 32, "d": 128}, {"offset": 1.0}),
        ({"M": 64, "d": 32768}, {}),
    ),
}


def workloads(op: str, dtype: DTypeName) -> Iterator[Workload]:
    for dims, traits in SHAPES[op]:
        yield OPS[op].workload(dtype, dims, **traits)


# --- parity in the interpreter ----------------------------------------------------------------------------------------


class Interpreted(TritonKernel):
    """The same kernel, limits and knobs, run by Triton's interpreter on CPU tensors."""

    def __init__(self, kernel: TritonKernel) -> None:
        self.op, self.name, self.source = kernel.op, kernel.name, kernel.source
        self.formula, self.limits, self.dtypes = kernel.formula, kernel.limits, kernel.dtypes

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"interpreted:{self.source}", path=str(HERE))


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

    def prove(self, dtype: DTypeName) -> Parity:
        candidate, fp = Interpreted(KERNELS[self.kernel]), known.load(self.device)
        w = OPS[candidate.op].workload(dtype, self.dims, **self.traits)
        assert isinstance(candidate.supports(w, fp), Accepted), f"{self.kernel} does not take {w.key}"
        knobs = replaced(candidate.knobs(w, fp), self.knobs)
        proof = Proof(candidate=candidate, recipe=candidate.recipe(w, fp, knobs), digest="", knobs=knobs, workload=w)
        # The interpreter takes some 20 us an operation: a call a GPU does in microseconds takes a second.
        (found,) = check_all([proof], fp=fp, terms=Terms(call_deadline_s=120.0, proof_deadline_s=1800.0))
        return found


def replaced(knobs: Knobs, values: dict[str, Scalar]) -> Knobs:
    unknown = set(values) - set(knobs.values)
    assert not unknown, f"no knobs {unknown}"
    return Knobs(settings=tuple(replace(k, value=values.get(k.name, k.value)) for k in knobs.settings))


def plan(kernel: str, dims: dict[str, int], traits: dict[str, Any] | None = None, **knobs: Scalar) -> Plan:
    return Plan(kernel=kernel, dims=dims, traits=traits or {}, knobs=knobs)


_DECODE = {"B": 1, "Hq": 8, "Hkv": 2, "S": 1, "D": 128, "L": 700}

PLANS = (
    plan("rmsnorm triton:rmsnorm", {"M": 2, "d": 512}),
    plan("linear triton:gemv", {"M": 1, "N": 48, "K": 512}, {"residual": True}),
    plan("linear triton:gemv", {"M": 5, "N": 48, "K": 512}, {"bias": True}, split_k=3, grid=2, rows_per_warp=2),
    plan("attn triton:attn_decode", _DECODE),
    plan("attn triton:attn_decode", {**_DECODE, "S": 3}, {"ragged": True, "window": 100, "softcap": 30.0}, chunk=96),
    plan("attn triton:attn_decode@merge", {**_DECODE, "Hq": 10}, {"ragged": True}, chunk=64),
)
