"""Test chains of dependent launches on emulated threads, where each launch starts before the previous ones have worked.

Three calls of each kernel follow each other: each reads the previous one's result, the third writes where the first one
read, and all use the kernel's workspace. The bits must equal those of sequential calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.emulate import emulated, one_dtype, overlapped
from tests.compile.test_emulated_linear import BUILDS
from tests.drawn import share, todays

Tensors = dict[str, Tensor]
Calls = Iterator[tuple[str, tuple[Any, ...]]]  # entry, arguments without the last: whether the launch is dependent

NAN = float("nan")


def ring(t: Tensors, names: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Run three calls, each from one of three buffers to the next."""
    for i in range(3):
        yield t[names[i]], t[names[(i + 1) % 3]]


# --- rows -------------------------------------------------------------------------------------------------------------


def rmsnorm(t: Tensors) -> Calls:
    for x, y in ring(t, "abc"):
        yield "rmsnorm", (x, t["gain"], 1e-6, 1.0, y, 64, 2)


def add_rmsnorm(t: Tensors) -> Calls:
    for (x, y), (residual, joined) in zip(ring(t, "abc"), ring(t, "def"), strict=True):
        yield "add_rmsnorm", (x, residual, t["gain"], 1e-6, 0.0, 0, y, joined, 64, 2)


def swiglu(t: Tensors) -> Calls:
    for gate, y in ring(t, "abc"):
        yield "swiglu", (gate, t["d"], y, 2)


def geglu(t: Tensors) -> Calls:
    for gate, y in ring(t, "abc"):
        yield "geglu", (gate, t["d"], 1, y, 2)


def rope(t: Tensors) -> Calls:
    positions, inverse = torch.tensor([3, 70_000, 5]), torch.logspace(0, -3, 32)
    for (q, to_q), (k, to_k) in zip(ring(t, "abc"), ring(t, "def"), strict=True):
        heads = [x.view(3, -1, 64) for x in (q, k, to_q, to_k)]
        yield "rope", (*heads[:2], positions, inverse, 0, *heads[2:], 64, 3)


def kv_append(t: Tensors) -> Calls:
    """Append to the caches from other places of the same caches."""
    k, v = (t[n].view(1, 2, 12, 64) for n in "kv")
    for at in (2, 4, 0):
        news = [x[:, :, (at - 2) % 6 : (at - 2) % 6 + 2] for x in (k, v)]
        yield "kv_append", (*news, torch.tensor([at], dtype=torch.int32), None, k, v, 2)


def sample(t: Tensors) -> Calls:
    """Sample three times, with each token in the next call's history."""
    one = torch.ones(2)
    for i, (old, new) in enumerate(ring(t, "xyz")):
        top_k = torch.tensor([5, 0], dtype=torch.int32)
        yield "sample", (t["logits"], old.view(2, 1), one, top_k, 0.9 * one, 1.5 * one, 0.3 * (i + 1) * one, new, 3)


# --- products ---------------------------------------------------------------------------------------------------------


def gemv(t: Tensors) -> Calls:
    for x, y in ring(t, "abc"):
        yield "gemv", (x, t["w"], None, t["d"], y, 3, 2)


def gemv_fp8(t: Tensors) -> Calls:
    for x, y in ring(t, "abc"):
        yield "gemv_fp8", (x, t["w8"], torch.full((256,), 0.1), None, None, y, 3, 2)


def norm_qkv(t: Tensors) -> Calls:
    for x, y in ring(t, "abc"):
        yield "norm_qkv", (x, t["gain"], t["w"], 1e-6, 0.0, y, 3, 2)


def gate_up(t: Tensors) -> Calls:
    for x, y in ring(t, "abc"):
        yield "gate_up", (x, t["gain"], t["w"], t["up"], 1e-6, 0.0, 0, y, 3, 2)


def lm_head(t: Tensors) -> Calls:
    """Compute logits of logits, and the chosen tokens, with one workspace."""
    for (x, y), token in zip(ring(t, "abc"), "xyz", strict=True):
        yield "lm_head", (x, t["w"], 0, y, 3, 2)
        yield "lm_head", (y, t["w"], 1, t[token], 3, 1)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(kernel: str) -> Callable[[Tensors], Calls]:
    """Attend three times, with each result as the next query; keys are split."""

    def calls(t: Tensors) -> Calls:
        lengths = torch.tensor([12], dtype=torch.int32)
        for q, o in ring(t, "abc"):
            heads = [x[:1].view(1, 4, 1, 64) for x in (q, o)]
            k, v = (t[n].view(1, 2, 12, 64) for n in "kv")
            more: list[Tensor] = []
            if kernel.startswith("paged"):
                k, v = (t[n].view(3, 4, 2, 64) for n in "kv")
                more = [torch.tensor([[2, 0, 1]], dtype=torch.int32)]
            if kernel.endswith("fp8"):
                k, v = ((x * 10).to(torch.float8_e4m3fn) for x in (k, v))
                more = [torch.full((2,), 0.1), torch.full((2,), 0.2)]
            yield kernel, (heads[0], k, v, *more, lengths, 12, 0.0, 0, 0.0, heads[1], 16, 2, 5)

    return calls


ROWS = (rmsnorm, add_rmsnorm, swiglu, geglu, rope, kv_append, sample)
PRODUCTS = (gemv, gemv_fp8, norm_qkv, gate_up, lm_head)
ATTENTION = ("attn_decode", "attn_decode_fp8", "attn_decode_mma", "paged_attn_decode", "paged_attn_decode_mma")


def operands() -> Tensors:
    draw = torch.Generator().manual_seed(5)
    shapes = {"a": (3, 256), "d": (3, 256), "gain": (256,), "w": (256, 256), "up": (256, 256)}
    shapes |= {"k": (1536,), "v": (1536,), "logits": (2, 300)}
    made = {name: torch.randn(shape, generator=draw).to(torch.bfloat16) for name, shape in shapes.items()}
    made["w"], made["up"] = made["w"] / 16, made["up"] / 16
    made["w8"] = (made["w"] * 10).to(torch.float8_e4m3fn)
    made |= {name: torch.full((3, 256), NAN, dtype=torch.bfloat16) for name in "bcef"}
    made |= {name: torch.full((3,), -1) for name in "xyz"}
    return made


def check(calls: Callable[[Tensors], Calls], source: str, *macros: str) -> None:
    alone, chained = operands(), operands()
    if source == "sample":  # one token for each of two rows
        for t in (alone, chained):
            t |= {name: torch.full((2,), -1) for name in "xyz"}
    for entry, arguments in calls(alone):
        emulated(source, entry, *macros)(*arguments, 0)
    kept = list(calls(chained))
    with overlapped(source, *macros):
        for entry, arguments in kept:
            emulated(source, entry, *macros)(*arguments, 1)
    for name in alone:
        same = torch.equal(alone[name].view(torch.uint8), chained[name].view(torch.uint8))
        assert same, f"{source}: {name} differs"


@pytest.mark.parametrize("calls", share(ROWS, days=2), ids=lambda f: f.__name__)
def test_row_kernels_in_a_chain(calls: Callable[[Tensors], Calls]) -> None:
    check(calls, calls.__name__)


@pytest.mark.parametrize("calls", share(PRODUCTS, days=3), ids=lambda f: f.__name__)
def test_projections_in_a_chain(calls: Callable[[Tensors], Calls]) -> None:
    rows, loads = todays(BUILDS)
    macros = (f"AUTOSEL_ROWS={rows}", f"AUTOSEL_UNROLL={loads}") if calls is not gemv_fp8 else ()
    check(calls, calls.__name__, *macros, one_dtype("bf16"))


@pytest.mark.parametrize("kernel", share(ATTENTION, days=3))
def test_attention_in_a_chain(kernel: str) -> None:
    check(attention(kernel), kernel, one_dtype("bf16"))
