"""Test that an operand that a Triton kernel would misread is refused by name, before a launch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

pytest.importorskip("triton", reason="needs Triton: the `cross` extra")

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from autosel.ops import OPS
from autosel.values import Scalar
from tests.compile.triton_kernels import KERNELS
from tests.operands import passed, traits_of

Arguments = dict[str, Any]


def call(source: str, dims: dict[str, int], **traits: Scalar) -> tuple[Callable[..., Any], Arguments]:
    """Return a kernel's function, and valid operands and outputs by the names of its parameters."""
    function = getattr(import_module(f"autosel.triton_kernels.{source}"), source)
    kernel = next(k for k in KERNELS.values() if k.source == source)
    op = OPS[kernel.op]
    w = op.workload("bf16", dims, **traits, **traits_of(kernel))
    values = [*passed(op, op.inputs(w, 0), kernel.operands), *op.allocate(w)]
    return function, dict(zip(inspect.signature(function).parameters, values, strict=False))


HEADS = {"B": 2, "Hq": 4, "Hkv": 2, "S": 1, "D": 64, "L": 640}
NEW = {"B": 2, "Hkv": 2, "S": 1, "D": 64}
FEW, MANY = {"M": 2}, {"M": 12}
LINEAR, QKV, GATE_UP, HEAD = {"N": 48, "K": 128}, {"d": 128, "N": 48}, {"d": 128, "I": 48}, {"V": 48, "d": 128}
CALLS: dict[str, tuple[Callable[..., Any], Arguments]] = {
    "attn_decode": call("attn_decode", HEADS, ragged=True),
    "attn_decode_fp8": call("attn_decode_fp8", HEADS, ragged=True),
    "paged_attn_decode": call("paged_attn_decode", {**HEADS, "page": 16}),
    "attn_prefill": call("attn_prefill", {"B": 2, "Hq": 4, "Hkv": 2, "S": 32, "D": 64}),
    "kv_append": call("kv_append", NEW),
    "kv_append to pages": call("kv_append", NEW, page=16),
    "rope": call("rope", {"M": 2, "Hq": 4, "Hkv": 2, "D": 64, "R": 64}),
    "gemv": call("gemv", {**FEW, **LINEAR}, bias=True, residual=True),
    "gemv_fp8": call("gemv_fp8", {**FEW, **LINEAR}, bias=True, residual=True),
    "gemm": call("gemm", {**MANY, **LINEAR}, bias=True, residual=True),
    "norm_qkv, few rows": call("norm_qkv", {**FEW, **QKV}),
    "norm_qkv, many rows": call("norm_qkv", {**MANY, **QKV}),
    "gate_up, few rows": call("gate_up", {**FEW, **GATE_UP}),
    "gate_up, many rows": call("gate_up", {**MANY, **GATE_UP}),
    "lm_head, few rows": call("lm_head", {**FEW, **HEAD}),
    "lm_head, many rows": call("lm_head", {**MANY, **HEAD}),
    "lm_head, tokens of few rows": call("lm_head", {**FEW, **HEAD}, greedy=1),
    "lm_head, tokens of many rows": call("lm_head", {**MANY, **HEAD}, greedy=1),
    "sample": call("sample", {"B": 2, "V": 512, "L": 15}),
    "rmsnorm": call("rmsnorm", {"M": 2, "d": 128}),
    "add_rmsnorm": call("add_rmsnorm", {"M": 2, "d": 128}),
    "swiglu": call("swiglu", {"M": 2, "I": 128}),
    "geglu": call("geglu", {"M": 2, "I": 128}, tanh=1),
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
    function, arguments = CALLS["attn_decode"]
    with pytest.raises(
        ValueError, match=r"^lengths is torch\.int64 of shape \(2,\), not torch\.int32 of shape \(2,\)$"
    ):
        function(**{**arguments, "lengths": arguments["lengths"].long()})


@pytest.mark.parametrize("call", ["attn_decode", "rope"])
def test_one_row_has_no_stride(call: str, launched: list[JITFunction[Any]]) -> None:
    """Accept any stride of a single row, such as that of every n-th element of a tensor, because it is not used."""
    function, arguments = CALLS[call]
    name = "lengths" if call == "attn_decode" else "positions"
    one = {n: v[:1] if isinstance(v, Tensor) and n != "inv_freq" else v for n, v in arguments.items()}
    function(**{**one, name: torch.zeros(2, 7, dtype=one[name].dtype)[:1, 3]})
    assert launched
