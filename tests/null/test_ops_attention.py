"""The bound of attention where scores are so large that fp32 cannot tell keys apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autosel.ops import OPS
from autosel.ops.contract import Match

D, KEYS = 64, 8


def operands(gap: float, size: float = 2.0**42) -> dict[str, Any]:
    """Return one query; keys 2 and 5 have scores near `size` that differ by `gap`, all others small ones."""
    q, k = torch.zeros(1, 1, 1, D), torch.zeros(1, 1, KEYS, D)
    q[..., 0], q[..., 1] = size, 1.0
    k[:, :, [2, 5], 0] = 1.0
    k[:, :, 2, 1] = gap
    v = torch.randn(1, 1, KEYS, D, generator=torch.Generator().manual_seed(1))
    inputs = {"q": q, "k": k, "v": v, "lengths": None, "max_len": KEYS, "scale": 1.0, "window": 0, "softcap": 0.0}
    return {n: x.bfloat16() if isinstance(x, Tensor) else x for n, x in inputs.items()}


def passes(inputs: dict[str, Any], shares: dict[int, float]) -> bool:
    made = sum(share * inputs["v"][:, :, key].double() for key, share in shares.items())
    assert isinstance(made, Tensor)
    return isinstance(OPS["attn"].verify(inputs, [made[:, :, None].bfloat16()]), Match)


@pytest.mark.parametrize("gap", [0.0, 40.0, 2000.0])  # 2000: the exact share of the second key is zero
def test_keys_that_fp32_cannot_tell_apart_may_have_any_share(gap: float) -> None:
    inputs = operands(gap)
    assert all(passes(inputs, shares) for shares in ({2: 1.0}, {5: 1.0}, {2: 0.5, 5: 0.5}))


def test_a_key_that_fp32_tells_apart_has_no_share() -> None:
    inputs = operands(40.0)
    assert not passes(inputs, {3: 1.0})
    assert not passes(inputs, {2: 0.5, 3: 0.5})


def test_a_gap_that_fp32_resolves_decides() -> None:
    inputs = operands(40.0, size=64.0)
    assert passes(inputs, {2: 1.0})
    assert not passes(inputs, {5: 1.0})
    assert not passes(inputs, {2: 0.5, 5: 0.5})
