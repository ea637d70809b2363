"""Claims about kernels of rows, for every kernel that computes them, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from autosel.ops import OPS
from autosel.ops.contract import Match, Mismatch

SAMPLING = [
    ("a nucleus of thousands", {"top_k": 0, "top_p": 0.9, "temperature": 1.0}),
    ("a nucleus of nearly all", {"top_k": 0, "top_p": 0.999, "temperature": 5.0}),
    ("a small nucleus", {"top_k": 0, "top_p": 0.3, "temperature": 0.3}),
    ("k beyond the blocks", {"top_k": 5000, "top_p": 1.0}),
    ("k beyond the blocks, then p", {"top_k": 5000, "top_p": 0.5, "temperature": 3.0}),
    ("k of all but one", {"top_k": 128_255, "top_p": 1.0}),
    ("everything", {"top_k": 0, "top_p": 1.0}),
]


def judged(settings: dict[str, float], kernel: Callable[..., Any], *knobs: int) -> Match | Mismatch:
    """Sample two rows of 128,256 logits by a native kernel with these settings, and judge the tokens."""
    op = OPS["sample"]
    inputs = op.inputs(op.workload("bf16", {"B": 2, "V": 128_256, "L": 16}), 21)
    for name, value in settings.items():
        inputs[name].fill_(value)
    token = torch.full((2,), -1)
    kernel(*op.arguments(inputs), token, *knobs)
    return op.verify(inputs, [token])


def sample_equal_logits(kernel: Callable[..., Any], *knobs: int) -> None:
    """Sample 128256 equally likely tokens with p = 1/4: the nucleus is the first quarter; `uniform` selects in it."""
    op, v = OPS["sample"], 128_256
    inputs = op.inputs(op.workload("bf16", {"B": 4, "V": v, "L": 1}), 0)
    inputs["logits"].fill_(1.5)
    inputs["history"].fill_(-1)
    for name, value in (("top_k", 0), ("top_p", 0.25), ("repetition_penalty", 1.0)):
        inputs[name].fill_(value)
    inputs["uniform"].copy_(torch.tensor([0.0, 0.25, 0.5, 0.9999999]))
    token = torch.full((4,), -1)
    kernel(*op.arguments(inputs), token, *knobs)
    assert token.tolist() == [pytest.approx(v / 4 * u, abs=2) for u in (0.0, 0.25, 0.5, 1.0)]


def keep_far_angle(rope: Callable[..., Any], position: int, *knobs: int) -> None:
    """Compare fp32 results with float64: an angle of 2^31 radians in fp32 would be off by a hundred turns."""
    inv_freq = torch.tensor([1.0, 0.7654321, 0.0123])
    q = torch.zeros(1, 1, 6)
    q[..., :3] = 1.0
    out, unused = torch.empty_like(q), torch.empty_like(q)
    rope(q, q, torch.tensor([position]), inv_freq, 0, out, unused, *knobs)
    angle = position * inv_freq.double()
    want = torch.cat([angle.cos(), angle.sin()])
    assert (out[0, 0].double() - want).abs().max() < 1e-6


def rotate_slices_in_place(rope: Callable[..., Any], style: int, *knobs: int) -> None:
    """Rotate two slices of one projection in place; the third stays."""
    op = OPS["rope"]
    w = op.workload("bf16", {"M": 5, "Hq": 4, "Hkv": 2, "D": 80, "R": 48}, style=style)
    inputs = op.inputs(w, 5)
    fused = torch.cat([inputs["q"], inputs["k"], inputs["k"]], dim=1)
    q, k = fused[:, :4], fused[:, 4:6]
    rope(q, k, inputs["positions"], inputs["inv_freq"], style, q, k, *knobs)
    assert not isinstance(op.verify(inputs, [q.contiguous(), k.contiguous()]), Mismatch)
    assert torch.equal(fused[:, 6:], inputs["k"])


def update_residual_in_place(add_rmsnorm: Callable[..., Any], sandwich: int, *knobs: int) -> None:
    """Pass residual as new_residual, as a decoder does, and x as y."""
    op = OPS["add_rmsnorm"]
    w = op.workload("bf16", {"M": 3, "d": 1021}, sandwich=sandwich)
    inputs = op.inputs(w, 5)
    kept = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    add_rmsnorm(*op.arguments(inputs), inputs["x"], inputs["residual"], *knobs)
    assert not isinstance(op.verify(kept, [inputs["x"], inputs["residual"]]), Mismatch)


def sample_without_distribution(kernel: Callable[..., Any], poison: float, *knobs: int) -> None:
    """Sample logits with NaN or infinity: a token in the range of the vocabulary is still returned."""
    op, v = OPS["sample"], 4099
    for settings in ({"top_k": 0, "top_p": 0.9}, {"top_k": 7, "top_p": 0.9}, {"top_k": 4000, "top_p": 1.0}):
        inputs = op.inputs(op.workload("fp32", {"B": 3, "V": v, "L": 9}), 3)
        inputs["logits"][0, ::2], inputs["logits"][1], inputs["logits"][2, -1] = poison, poison, poison
        for name, value in settings.items():
            inputs[name].fill_(value)
        token = torch.full((3,), -1)
        kernel(*op.arguments(inputs), token, *knobs)
        assert ((token >= 0) & (token < v)).all()
