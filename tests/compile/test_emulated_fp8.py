"""Test the freedoms in the contract of linear with weights in e4m3, on emulated threads."""

from __future__ import annotations

import torch

from autosel.ops.codes import CODES
from autosel.ops.draw import Draw
from tests.compile.emulate import emulated


def test_bytes_may_be_at_any_address() -> None:
    """Use rows of odd stride at an odd address, with bias and residual, and uint8 as the type."""
    w = CODES["e4m3"].every_finite((9, 333), Draw(1, "bf16"))
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
