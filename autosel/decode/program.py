"""A decode step as a program for a device that runs it whole: ops with named operands, in the order of the step.

    program = lower(step)              # of a list that was written with the fused chain
    for op in program.ops: ...         # Embed, Project, Rotate, Attend, Norm

This is the only lowering of the list of calls; a thread team (team.py) and a launch (launch.py) encode its result. An
operand that is a tensor is a buffer of the list. An operand that is a string names a weight, which the encoder looks up
in its own form: plain or packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autosel.decode.run import FUSED
from autosel.decode.step import Call, Step
from autosel.decode.weights import Weights

PRODUCTS = ("norm_qkv", "linear", "gate_up", "lm_head")
# Op of the list -> the single-op kernel with the task's arithmetic and knobs.
SINGLE = {
    "norm_qkv": "norm_qkv",
    "linear": "gemv",
    "gate_up": "gate_up",
    "lm_head": "lm_head",
    "attn": "attn_decode",
    "rmsnorm": "rmsnorm",
    "add_rmsnorm": "add_rmsnorm",
    "rope": "rope",
    "kv_append": "kv_append",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embed:
    """out = table[tokens] * scale. `calls` are the list's calls that an op replaces, the slowest first."""

    calls: tuple[Call, ...]
    table: str
    tokens: Tensor  # int64 [B]
    scale: float
    out: Tensor  # [B, d]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Project:
    """y = x @ w^T, plus `residual`; of rmsnorm(x) if a norm is named; with `up`: act(that) * (rmsnorm(x) @ up^T)."""

    calls: tuple[Call, ...]
    x: Tensor
    norm: str | None
    w: str
    up: str | None
    activation: int
    residual: Tensor | None
    y: Tensor

    @property
    def call(self) -> Call:
        return self.calls[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotate:
    """Rotation of q and k from qkv [B, (Hq + 2 Hkv) D], each normed first if a weight is named.

    q is written to `q`; k and the unchanged v are written to their slots in the caches.
    """

    calls: tuple[Call, ...]
    qkv: Tensor
    q_norm: str | None
    k_norm: str | None
    positions: Tensor  # int64 [B], for the angles
    inv_freq: Tensor
    style: int
    q: Tensor  # [B, Hq, D]
    starts: Tensor  # int32 [B], the slots of the caches
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Attend:
    """out = attention of q over the caches. `window` is the layer's, even if the context is shorter; 0 means none."""

    calls: tuple[Call, ...]
    q: Tensor  # [B, Hq, 1, D]
    k: Tensor
    v: Tensor
    lengths: Tensor  # int32 [B]
    scale: float
    window: int
    softcap: float
    out: Tensor  # [B, Hq, 1, D]

    @property
    def call(self) -> Call:
        return self.calls[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm:
    """out = rmsnorm(x), plus `residual`."""

    calls: tuple[Call, ...]
    x: Tensor
    weight: str
    residual: Tensor | None
    out: Tensor


ProgramOp = Embed | Project | Rotate | Attend | Norm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """The program. `rest` of the list follows the ops: the choice of the tokens. All norms share one eps and one
    offset.
    """

    ops: tuple[ProgramOp, ...]
    rest: tuple[Call, ...]
    eps: float
    offset: float
    weights: Weights

    def weight(self, name: str | None) -> Any:
        return None if name is None else self.weights[name]


def lower(step: Step) -> Program:
    """Return the program of a list. It does not depend on the context's length."""
    assert step.chain == FUSED and not step.cache.paged, "a whole step is fused, over a contiguous cache"
    ops: list[ProgramOp] = []
    rest: list[Call] = []
    before: list[Call] = []  # operations on q and k before they are appended
    for call in step.calls:
        if call.op == "sample" or call.site == "argmax":
            rest.append(call)
        elif call.op == "rope" or call.site in HEADS:
            before.append(call)
        elif call.op == "kv_append":
            ops.append(_rotate(ops[-1], before, call))
            before = []
        elif call.op == "glue" and "scale" in call.names:  # an embedding's scale is one of its operands
            ops[-1] = replace(ops[-1], calls=(*ops[-1].calls, call))
        else:
            ops.append(LOWERED[call.site if call.op == "glue" else call.op](step, call))
    assert not before, "kv_append follows every rotation"
    eps, offset = map(float, step.decoder.norm)
    return Program(ops=tuple(ops), rest=tuple(rest), eps=eps, offset=offset, weights=step.decoder.weights)


HEADS = ("packed q", "q norm", "packed k", "k norm")


def _embed(step: Step, call: Call) -> Embed:
    rounded = float(torch.tensor(step.decoder.shape.embedding_scale, dtype=step.decoder.weights.torch_dtype))
    return Embed(
        calls=(call,), table=call.weights["table"], tokens=call["tokens"], scale=rounded, out=call["out"]
    )  # fmt: skip


def _norm_qkv(step: Step, call: Call) -> Project:
    return _project(call, norm=call.weights["norm_weight"], w=call.weights["w"])


def _gate_up(step: Step, call: Call) -> Project:
    named = call.weights
    return _project(
        call, norm=named["norm_weight"], w=named["w_gate"], up=named["w_up"], activation=int(call["activation"])
    )


def _linear(step: Step, call: Call) -> Project:
    assert call["bias"] is None, "no projection of these models has a bias"
    return _project(call, w=call.weights["w"], residual=call["residual"])


def _lm_head(step: Step, call: Call) -> Project:
    return _project(call, w=call.weights["w"], y="logits")


def _project(
    call: Call,
    *,
    w: str,
    norm: str | None = None,
    up: str | None = None,
    activation: int = 0,
    residual: Tensor | None = None,
    y: str = "y",
) -> Project:
    return Project(
        calls=(call,), x=call["x"], norm=norm, w=w, up=up, activation=activation, residual=residual, y=call[y]
    )  # fmt: skip


def _rotate(projection: ProgramOp, before: Sequence[Call], append: Call) -> Rotate:
    assert isinstance(projection, Project), "a projection precedes a rotation"
    by_site = {call.site: call for call in before}
    rope = by_site["rope"]
    q_norm, k_norm = (by_site[s].weights["weight"] if s in by_site else None for s in ("q norm", "k norm"))
    return Rotate(
        calls=(append, *before),
        qkv=projection.y,
        q_norm=q_norm,
        k_norm=k_norm,
        positions=rope["positions"],
        inv_freq=rope["inv_freq"],
        style=int(rope["style"]),
        q=rope["q_out"],
        starts=append["positions"],
        k_cache=append["k_cache"],
        v_cache=append["v_cache"],
    )


def _attend(step: Step, call: Call) -> Attend:
    shape = step.decoder.shape
    return Attend(
        calls=(call,),
        q=call["q"],
        k=call["k"],
        v=call["v"],
        lengths=step.place.lengths,  # the list omits them for a single sequence
        scale=float(call["scale"]),
        window=shape.window if shape.layer_types[call.layer] == "sliding" else 0,
        softcap=float(call["softcap"]),
        out=call["o"],
    )


def _norm(step: Step, call: Call) -> Norm:
    return Norm(calls=(call,), x=call["x"], weight=call.weights["weight"], residual=None, out=call["y"])


def _sandwich(step: Step, call: Call) -> Norm:
    assert call["sandwich"], "in the fused chain a projection adds the residual"
    return Norm(
        calls=(call,),
        x=call["x"],
        weight=call.weights["weight"],
        residual=call["residual"],
        out=call["new_residual"],
    )


LOWERED: dict[str, Callable[[Step, Call], ProgramOp]] = {
    "embed": _embed,
    "norm_qkv": _norm_qkv,
    "gate_up": _gate_up,
    "linear": _linear,
    "lm_head": _lm_head,
    "attn": _attend,
    "rmsnorm": _norm,
    "add_rmsnorm": _sandwich,
}
