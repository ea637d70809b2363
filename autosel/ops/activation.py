"""SiLU and the two GELUs: definition, derivative, fp32 error. Used by swiglu, geglu and gate_up."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from autosel.ops.contract import TINY_NORMAL, U32

Activation = Literal["silu", "gelu_erf", "gelu_tanh"]
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_erf", "gelu_tanh")  # gate_up's `activation` is an index

# sup |f''| is 1/2 for SiLU (at 0) and 2 phi(0) = 0.798 for GELU (at 0).
CURVATURE = 0.8
STEEPEST = 1.13  # sup |f'| is 1.0998 for SiLU (at 2.4) and 1.1290 for GELU (at sqrt 2)
TANH_SCALE, TANH_CUBE = math.sqrt(2 / math.pi), 0.044715


def value(kind: Activation, g: Tensor) -> Tensor:
    """Return the activation of a float64 tensor. silu(-inf) is NaN by x * sigmoid(x), and also here."""
    if kind == "silu":
        return g * torch.sigmoid(g)
    if kind == "gelu_erf":
        return 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))
    return 0.5 * g * (1 + torch.tanh(TANH_SCALE * (g + TANH_CUBE * g**3)))


def slope(kind: Activation, g: Tensor) -> Tensor:
    """Return |f'(g)|."""
    if kind == "silu":
        s = torch.sigmoid(g)
        return (s * (1 + g * (1 - s))).abs()
    if kind == "gelu_erf":
        return (0.5 * (1 + torch.erf(g / math.sqrt(2))) + g * (-g.square() / 2).exp() / math.sqrt(2 * math.pi)).abs()
    t = torch.tanh(TANH_SCALE * (g + TANH_CUBE * g**3))
    inner = TANH_SCALE * (1 + 3 * TANH_CUBE * g.square())
    return (0.5 * (1 + t) + 0.5 * g * (1 - t.square()) * inner).nan_to_num(1.0).abs()


def evaluation_error(kind: Activation, g: Tensor, a: Tensor) -> Tensor:
    """Return the error of computing f(g) in fp32, float64.

    silu: exp(-g) has a relative error of |g| u32 from its argument, of which the sigmoid keeps the factor 1 - s; a
    value below fp32's range counts as zero. gelu: 1 + erf and 1 + tanh cancel for negative g, so the error is absolute,
    a few u32 of |g|.
    """
    if kind == "silu":
        return (8 + 2 * g.abs() * torch.sigmoid(-g)) * U32 * a.abs() + 4 * g.abs() * TINY_NORMAL["fp32"]
    return 8 * U32 * g.abs()


def propagate(kind: Activation, g: Tensor, error: Tensor) -> Tensor:
    """Return a bound on the error of f(g'), |g' - g| <= error, evaluated in fp32."""
    near = slope(kind, g) * error + CURVATURE / 2 * error.square()
    return torch.minimum(near, STEEPEST * error) + evaluation_error(kind, g, value(kind, g))
