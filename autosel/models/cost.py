"""Compute the bytes and FLOPs of a decode step, and the size of its cache, from a model's shape, without torch.

bytes   each weight once, the visible keys and values of each sequence, the embedding's rows
FLOPs   the projections, the output head and both products of attention; a multiply-add counts two
"""

from __future__ import annotations

import math

from autosel.models.shape import ModelShape
from autosel.values import DTYPE_BYTES, DTypeName

ALIGN_TOKENS = 16  # granularity of a contiguous cache: a whole number of 32-byte groups even for the smallest heads


def bytes_per_step(shape: ModelShape, dtype: DTypeName, batch: int, context: int) -> int:
    """Return the bytes that must cross the memory bus, including writes of the new keys and values."""
    rows = shape.embedded_bytes(batch, dtype)
    return shape.weight_bytes_per_step(dtype) + batch * shape.kv_bytes_read(context, dtype) + rows


def flops_per_step(shape: ModelShape, batch: int, context: int) -> int:
    keys = shape.full_layers * context + shape.sliding_layers * min(context, shape.window)
    return 2 * batch * products_per_token(shape) + 4 * batch * shape.Hq * shape.D * keys


def products_per_token(shape: ModelShape) -> int:
    """Return the multiply-adds of one token with weights: each matrix counts once, independent of how ops are fused."""
    projections = shape.d * shape.qkv_rows + shape.Hq * shape.D * shape.d + 3 * shape.d * shape.I
    return shape.layers * projections + shape.V * shape.d


def cache_size(shape: ModelShape, rows: int, room: int, page: int) -> tuple[int, ...]:
    """Return the dimensions of one layer's keys or values: `room` tokens per row; `page` 0 means contiguous."""
    if page:
        return rows * -(-room // page), page, shape.Hkv, shape.D
    return rows, shape.Hkv, -(-room // ALIGN_TOKENS) * ALIGN_TOKENS, shape.D


def cache_bytes(shape: ModelShape, dtype: DTypeName, *, rows: int, room: int, page: int) -> int:
    return 2 * shape.layers * math.prod(cache_size(shape, rows, room, page)) * DTYPE_BYTES[dtype]
