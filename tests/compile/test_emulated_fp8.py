"""What the contracts of fp8 operands leave open, and attention over an fp8 cache, on emulated threads.

Attention's bounds are those of attn on the dequantised operand, which is exact in float64.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from autosel.ops import OPS, attention, fp8
from autosel.ops.compare import compare
from autosel.ops.contract import DTYPE, Mismatch
from autosel.ops.draw import Draw
from autosel.values import DTypeName
from tests.compile.emulate import emulated

DTYPES: tuple[DTypeName, ...] = ("bf16", "fp16", "fp32")
FP8 = torch.float8_e4m3fn


def test_bytes_may_lie_anywhere() -> None:
    """Rows of odd stride from an odd address, bias and residual; the type may be called uint8."""
    w = fp8.every_byte((9, 333), Draw(1, "bf16"))
    room = torch.zeros(9, 340, dtype=torch.uint8)
    odd = room[:, 3:336]
    odd.copy_(w.view(torch.uint8))
    x, scale = torch.randn(2, 333).bfloat16(), torch.rand(9)
    bias, residual = torch.randn(9).bfloat16(), torch.randn(2, 9).bfloat16()
    results = []
    for weights in (w, odd):
        y = torch.empty(2, 9, dtype=torch.bfloat16)
        emulated("gemv_fp8", "gemv_fp8")(x, weights, scale, bias, residual, y, 2, 1, 0)
        results.append(y)
    want = x.double() @ (w.float().double() * scale.double()[:, None]).T + bias.double() + residual.double()
    assert all(torch.allclose(y.double(), want, rtol=2**-8, atol=2**-8) for y in results)


CACHES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"B": 2, "Hq": 8, "Hkv": 2, "S": 1, "D": 128, "L": 300}, {}),
    ({"B": 3, "Hq": 6, "Hkv": 1, "S": 2, "D": 64, "L": 97}, {"ragged": True}),
    ({"B": 1, "Hq": 4, "Hkv": 4, "S": 1, "D": 80, "L": 130}, {"window": 37, "softcap": 20.0}),
    ({"B": 1, "Hq": 2, "Hkv": 1, "S": 1, "D": 40, "L": 33}, {}),  # rows that are no whole vectors
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dims", "traits"), CACHES)
def test_attention_over_a_scaled_cache_is_right(dims: dict[str, int], traits: dict[str, Any], dtype: DTypeName) -> None:
    op = OPS["attn"]
    w = op.workload(dtype, dims, **traits)
    inputs, draw = op.inputs(w, 5), torch.Generator().manual_seed(5)
    k_scale, v_scale = (torch.rand(dims["Hkv"], generator=draw) * 0.5 + 0.5 for _ in range(2))
    k8, v8 = (inputs[n].float().to(FP8) for n in ("k", "v"))
    k, v = (x.float().double() * s.double()[:, None, None] for x, s in ((k8, k_scale), (v8, v_scale)))
    lengths = inputs["lengths"] if inputs["lengths"] is not None else torch.full((dims["B"],), dims["L"])
    window, softcap = inputs["window"], inputs["softcap"]
    exact = attention.exact(inputs["q"], k, v, lengths, 0.0, window, softcap)
    bound = attention.error_bound(exact, k, v.to(DTYPE[dtype]), 0.0)
    want = attention.unpack(exact.o, inputs["q"].shape)
    for cut in itertools.product((64,), (3,), (1 << 20, 32)):
        out = torch.full(inputs["q"].shape, float("nan"), dtype=DTYPE[dtype])
        scalars = (inputs["lengths"], inputs["max_len"], 0.0, window, softcap)
        emulated("attn_decode_fp8", "attn_decode_fp8")(inputs["q"], k8, v8, k_scale, v_scale, *scalars, out, *cut, 0)
        found = compare(op, [out], [want], [attention.unpack(bound, inputs["q"].shape)])
        assert not isinstance(found, Mismatch), (cut, found)
