"""The ops by name. `gemv` and `gemm` are `linear` at M = 1 and above; former ops are aliases too."""

from __future__ import annotations

from collections.abc import Mapping

from autosel.errors import IncompleteContract, UnknownName
from autosel.formats import FORMER_OPS
from autosel.ops.add_rmsnorm import AddRmsNorm
from autosel.ops.attn import Attn
from autosel.ops.contract import Op
from autosel.ops.domains import undeclared
from autosel.ops.gate_up import GateUp
from autosel.ops.geglu import GeGlu
from autosel.ops.kv_append import KvAppend
from autosel.ops.linear import Linear
from autosel.ops.lm_head import LmHead
from autosel.ops.norm_qkv import NormQkv
from autosel.ops.paged_attn import PagedAttn
from autosel.ops.prefill_attn import PrefillAttn
from autosel.ops.rmsnorm import RmsNorm
from autosel.ops.rope import Rope
from autosel.ops.sample import Sample
from autosel.ops.swiglu import SwiGlu


def registered(*ops: Op) -> dict[str, Op]:
    """Return the ops by name. Raises IncompleteContract if a dimension, trait or argument of an op has no domain."""
    for op in ops:
        missing = undeclared(op)
        if missing:
            raise IncompleteContract(op.name, missing)
    return {op.name: op for op in ops}


OPS: Mapping[str, Op] = registered(
    Linear(),
    Attn(),
    PagedAttn(),
    PrefillAttn(),
    KvAppend(),
    RmsNorm(),
    AddRmsNorm(),
    Rope(),
    SwiGlu(),
    GeGlu(),
    NormQkv(),
    GateUp(),
    LmHead(),
    Sample(),
)
ALIASES: Mapping[str, str] = {"gemv": "linear", "gemm": "linear", **{n: f.op for n, f in FORMER_OPS.items()}}


def find(name: str) -> Op:
    """Return the op with this name or alias. Raises UnknownName with the nearest names."""
    op = OPS.get(ALIASES.get(name, name))
    if op is None:
        raise UnknownName("op", name, (*OPS, *ALIASES))
    return op
