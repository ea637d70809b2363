"""Test that an operand that a Triton kernel would misread is refused by name, before a launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from autosel.triton_kernels.add_rmsnorm import add_rmsnorm
from autosel.triton_kernels.attn_decode import attn_decode
from autosel.triton_kernels.attn_decode_fp8 import attn_decode_fp8
from autosel.triton_kernels.attn_prefill import attn_prefill
from autosel.triton_kernels.gate_up import gate_up
from autosel.triton_kernels.geglu import geglu
from autosel.triton_kernels.gemm import gemm
from autosel.triton_kernels.gemv import gemv
from autosel.triton_kernels.gemv_fp8 import gemv_fp8
from autosel.triton_kernels.kv_append import kv_append
from autosel.triton_kernels.lm_head import lm_head
from autosel.triton_kernels.norm_qkv import norm_qkv
from autosel.triton_kernels.paged_attn_decode import paged_attn_decode
from autosel.triton_kernels.rmsnorm import rmsnorm
from autosel.triton_kernels.rope import rope
from autosel.triton_kernels.sample import sample
from autosel.triton_kernels.swiglu import swiglu

Arguments = dict[str, Any]


def bf16(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def fp32(*shape: int) -> Tensor:
    return torch.zeros(shape)


def int32(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _attn() -> Arguments:
    cache = {"q": bf16(2, 4, 1, 64), "k": bf16(2, 2, 640, 64), "v": bf16(2, 2, 640, 64), "lengths": int32(2)}
    return {**cache, "max_len": 640, "scale": 0.0, "window": 0, "softcap": 0.0, "o": bf16(2, 4, 1, 64)}


def _attn_fp8() -> Arguments:
    caches = {name: bf16(2, 2, 640, 64).to(torch.float8_e4m3fn) for name in ("k", "v")}
    scales = {"k_scale": fp32(2), "v_scale": fp32(2)}
    old = _attn()
    return {"q": old["q"], **caches, **scales, **{n: old[n] for n in old if n not in ("q", "k", "v")}}


def _paged_attn() -> Arguments:
    pages = {"k": bf16(80, 16, 2, 64), "v": bf16(80, 16, 2, 64), "block_table": int32(2, 40), "lengths": int32(2)}
    rest = {"max_len": 640, "scale": 0.0, "window": 0, "softcap": 0.0, "o": bf16(2, 4, 1, 64)}
    return {"q": bf16(2, 4, 1, 64), **pages, **rest}


def _prefill_attn() -> Arguments:
    rows = {"q": bf16(2, 4, 32, 64), "k": bf16(2, 2, 32, 64), "v": bf16(2, 2, 32, 64)}
    return {**rows, "scale": 0.0, "window": 0, "softcap": 0.0, "o": bf16(2, 4, 32, 64)}


def _gemv_fp8() -> Arguments:
    weights = {"w": bf16(64, 128).to(torch.float8_e4m3fn), "scale": fp32(64)}
    return {"x": bf16(2, 128), **weights, "bias": bf16(64), "residual": bf16(2, 64), "y": bf16(2, 64)}


def _kv_append() -> Arguments:
    new = {"k": bf16(2, 2, 1, 64), "v": bf16(2, 2, 1, 64), "positions": int32(2)}
    return {**new, "block_table": None, "k_cache": bf16(2, 2, 40, 64), "v_cache": bf16(2, 2, 40, 64)}


def _kv_append_to_pages() -> Arguments:
    pages = {"block_table": int32(2, 3), "k_cache": bf16(6, 16, 2, 64), "v_cache": bf16(6, 16, 2, 64)}
    return {**_kv_append(), **pages}


def _rope() -> Arguments:
    rows = {"q": bf16(2, 4, 64), "k": bf16(2, 2, 64), "positions": int64(2), "inv_freq": fp32(32)}
    return {**rows, "style": 0, "q_out": bf16(2, 4, 64), "k_out": bf16(2, 2, 64)}


def _linear(m: int) -> Arguments:
    return {"x": bf16(m, 128), "w": bf16(48, 128), "bias": bf16(48), "residual": bf16(m, 48), "y": bf16(m, 48)}


def _norm_qkv(m: int) -> Arguments:
    operands = {"x": bf16(m, 128), "norm_weight": bf16(128), "w": bf16(48, 128)}
    return {**operands, "eps": 1e-5, "offset": 0.0, "y": bf16(m, 48)}


def _gate_up(m: int) -> Arguments:
    operands = {"x": bf16(m, 128), "norm_weight": bf16(128), "w_gate": bf16(48, 128), "w_up": bf16(48, 128)}
    return {**operands, "eps": 1e-5, "offset": 0.0, "activation": 0, "y": bf16(m, 48)}


def _lm_head(m: int, greedy: bool) -> Arguments:
    return {"x": bf16(m, 128), "w": bf16(48, 128), "greedy": greedy, "out": int64(m) if greedy else bf16(m, 48)}


def _sample() -> Arguments:
    drawn = {"logits": bf16(2, 512), "history": int64(2, 15), "temperature": fp32(2), "top_k": int32(2)}
    return {**drawn, "top_p": fp32(2), "repetition_penalty": fp32(2), "uniform": fp32(2), "token": int64(2)}


def _rmsnorm() -> Arguments:
    return {"x": bf16(2, 128), "weight": bf16(128), "eps": 1e-5, "offset": 0.0, "y": bf16(2, 128)}


def _add_rmsnorm() -> Arguments:
    operands = {"x": bf16(2, 128), "residual": bf16(2, 128), "weight": bf16(128)}
    return {**operands, "eps": 1e-5, "offset": 0.0, "sandwich": 0, "y": bf16(2, 128), "new_residual": bf16(2, 128)}


def _gated() -> Arguments:
    return {"gate": bf16(2, 128), "up": bf16(2, 128)}


CALLS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "attn_decode": (attn_decode, _attn()),
    "attn_decode_fp8": (attn_decode_fp8, _attn_fp8()),
    "paged_attn_decode": (paged_attn_decode, _paged_attn()),
    "attn_prefill": (attn_prefill, _prefill_attn()),
    "kv_append": (kv_append, _kv_append()),
    "kv_append to pages": (kv_append, _kv_append_to_pages()),
    "rope": (rope, _rope()),
    "gemv": (gemv, _linear(2)),
    "gemv_fp8": (gemv_fp8, _gemv_fp8()),
    "gemm": (gemm, _linear(12)),
    "norm_qkv, few rows": (norm_qkv, _norm_qkv(2)),
    "norm_qkv, many rows": (norm_qkv, _norm_qkv(12)),
    "gate_up, few rows": (gate_up, _gate_up(2)),
    "gate_up, many rows": (gate_up, _gate_up(12)),
    "lm_head, few rows": (lm_head, _lm_head(2, False)),
    "lm_head, many rows": (lm_head, _lm_head(12, False)),
    "lm_head, tokens of few rows": (lm_head, _lm_head(2, True)),
    "lm_head, tokens of many rows": (lm_head, _lm_head(12, True)),
    "sample": (sample, _sample()),
    "rmsnorm": (rmsnorm, _rmsnorm()),
    "add_rmsnorm": (add_rmsnorm, _add_rmsnorm()),
    "swiglu": (swiglu, {**_gated(), "y": bf16(2, 128)}),
    "geglu": (geglu, {**_gated(), "tanh": 1, "y": bf16(2, 128)}),
}
OTHER = {
    torch.bfloat16: torch.float16,
    torch.float32: torch.float64,
    torch.float8_e4m3fn: torch.float8_e5m2,
    torch.int32: torch.int64,
    torch.int64: torch.int32,
}
SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "on another device": lambda t: t.to("meta"),
    "of another dtype": lambda t: t.to(OTHER[t.dtype]),
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a dimension less": lambda t: t[0],
}
# Operands that define the number of rows, heads and columns; with a dimension less, Python raises.
LEADING = {"q", "k", "v", "k_cache", "v_cache", "x", "w", "w_gate", "logits", "gate"}
# Logits of any dtype are read correctly, and any number of words is a vocabulary.
LEGAL = {("sample", "logits", "of another dtype")} | {
    (f"lm_head, tokens of {rows} rows", "w", "a row more") for rows in ("few", "many")
}


def spoilt() -> list[tuple[str, str, str]]:
    return [
        (name, operand, how)
        for name, (_, arguments) in CALLS.items()
        for operand, value in arguments.items()
        for how in SPOILT
        if isinstance(value, Tensor) and not (how == "a dimension less" and operand in LEADING)
        if (name, operand, how) not in LEGAL
    ]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[JITFunction[Any]]:
    """Return the list of kernels that would have been launched."""
    kernels: list[JITFunction[Any]] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: kernels.append(self))
    return kernels


@pytest.mark.parametrize("name", CALLS)
def test_valid_operands_are_accepted(name: str, launched: list[JITFunction[Any]]) -> None:
    function, arguments = CALLS[name]
    function(**arguments)
    assert launched


@pytest.mark.parametrize(("name", "operand", "how"), spoilt())
def test_an_operand_that_would_be_misread_is_refused(
    name: str, operand: str, how: str, launched: list[JITFunction[Any]]
) -> None:
    function, arguments = CALLS[name]
    with pytest.raises(ValueError) as found:
        function(**{**arguments, operand: SPOILT[how](arguments[operand])})
    assert found.traceback[-1].name == "refuse"
    assert launched == []


def test_a_refusal_names_the_operand_and_what_it_should_be() -> None:
    with pytest.raises(
        ValueError, match=r"^lengths is torch\.int64 of shape \(2,\), not torch\.int32 of shape \(2,\)$"
    ):
        attn_decode(**{**_attn(), "lengths": int64(2)})


@pytest.mark.parametrize("call", ["attn_decode", "rope"])
def test_one_row_has_no_stride(call: str, launched: list[JITFunction[Any]]) -> None:
    """Accept any stride of a single row, such as that of every n-th element of a tensor, because it is not used."""
    function, arguments = CALLS[call]
    name = "lengths" if call == "attn_decode" else "positions"
    one = {n: v[:1] if isinstance(v, Tensor) and n != "inv_freq" else v for n, v in arguments.items()}
    function(**{**one, name: torch.zeros(2, 7, dtype=one[name].dtype)[:1, 3]})
    assert launched
