"""Ops on weights or a cache in a format, as eager PyTorch: the baseline, as fast as eager can be (others: eager.py).

This is a separate module, so that changes here do not change the code of functions in eager.py, by which stored
decisions name them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autosel.formats import DTYPE_BYTES, WeightFormat
from autosel.ops.eager import ACTIVATION, _attend, _mask, rmsnorm
from autosel.ops.stored import changes_of
from autosel.ops.weight import Matrix, Weight, parts_of
from autosel.workers import pages

MOST_PACKED = 64  # rows of x
PACKED_ROWS = 128  # rows of a weight that are packed at a time, in whole blocks of PyTorch's layout

if TYPE_CHECKING:
    from autosel.ops.cached import Cached


def product(x: Tensor, w: Weight, out: Tensor | None = None) -> Tensor:
    """Return x @ w^T. A row's scale is applied to the codes' product, which is small.

    fp16 cannot hold that product: 448 times a thousand activations is above its range.
    """
    if not _FORMS.kept and not _packs(x, w):
        return by_parts(x, w, out)
    if w.format.group or w.zeros is not None:
        made = _by_groups(x, w)
        return made if out is None else out.copy_(made)
    if _packs(x, w):
        made = torch._weight_int8pack_mm(x, w.codes, w.scales.to(x.dtype))
        return made if out is None else out.copy_(made)
    wide = torch.float32 if x.dtype == torch.float16 else x.dtype
    made = F.linear(x.to(wide), _numbers(w, wide, x.shape[0]))
    scales = w.scales if w.scales.dim() == 1 else w.scales[:, 0]
    return (made * scales).to(x.dtype) if out is None else torch.mul(made, scales, out=out)


def _numbers(w: Weight, dtype: torch.dtype, rows: int) -> Tensor:
    """Return the numbers of codes whose rows have one scale, minus the zero points: integers, or e4m3."""
    if _direct(w.format):
        return w.codes.to(dtype)
    return _unscaled(w).dequantised(dtype) if rows > MOST_PACKED else _held(w, dtype)[0]


def _direct(format: WeightFormat) -> bool:
    """Return True if a row has one scale and no zero point, and each element of the codes is a number."""
    return not format.group and not format.offsets and format.parts[0].per == 1


def _unscaled(w: Weight) -> Weight:
    """Return the weight with the scale 1 in each row."""
    scales = w.scales.clone()
    scales.view(len(scales), -1)[:, 0] = 1.0
    return replace(w, scales=scales)


def _packs(x: Tensor, w: Weight) -> bool:
    """Return True if PyTorch has a product with int8 codes for these operands.

    On two cores of Zen 4 it takes a twentieth of the time of widening the weights at M = 1, and more time from M = 64
    on. It needs whole vectors at addresses that are multiples of their size: with K = 37, or x two bytes off, PyTorch
    2.13 ends the process.
    """
    return (
        w.codes.dtype == torch.int8
        and not w.format.offsets
        and x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and x.shape[0] <= MOST_PACKED
        and all(t.is_contiguous() and t.data_ptr() % 64 == 0 for t in (x, w.codes))
        and w.shape[0] % 32 == 0
        and w.shape[1] % 64 == 0
    )


def _by_groups(x: Tensor, w: Weight) -> Tensor:
    """Return x @ w^T with PyTorch's packed product for int4, else with the weights in the dtype of x.

    Both forms are made once per weight, because a conversion at each call would make the baseline slow.
    """
    if x.shape[0] > MOST_PACKED:
        return F.linear(x, w.dequantised(x.dtype))
    held = _held(w, x.dtype)
    if len(held) == 1:
        return F.linear(x, held[0])
    found: Tensor = torch._weight_int4pack_mm_for_cpu(x.contiguous(), held[0], w.format.group, held[1])
    return found


def by_parts(x: Tensor, w: Matrix, out: Tensor | None = None) -> Tensor:
    """Return x @ w^T in the dtype of x, to which some rows of the weight are converted at a time."""
    # Results kept between parts would fragment the heap.
    made, first = x.new_empty(*x.shape[:-1], w.shape[0]) if out is None else out, 0
    for part in parts_of(w):
        converted = part.to(x.dtype) if isinstance(part, Tensor) else part.dequantised(x.dtype)
        made[..., first : first + part.shape[0]] = F.linear(x, converted)
        first += part.shape[0]
    return made


@dataclass(slots=True)
class _Forms:
    kept: bool = True


_FORMS = _Forms()


@contextmanager
def keeping_forms(on: bool) -> Iterator[None]:
    """In this context, keep the forms of weights that PyTorch reads, or convert some rows at a time at each call."""
    before, _FORMS.kept = _FORMS.kept, on
    try:
        yield
    finally:
        _FORMS.kept = before


@dataclass(frozen=True, slots=True)
class _Held:
    """A weight as PyTorch reads it: in the dtype, or packed codes and scales. Valid for these versions of its parts."""

    memory: tuple[StorageWeakRef, ...]
    versions: tuple[int | None, ...]
    made: tuple[Tensor, ...]

    @staticmethod
    def of(w: Weight, made: tuple[Tensor, ...]) -> _Held:
        memory = tuple(StorageWeakRef(t.untyped_storage()) for t in w.parts().values())
        return _Held(memory, _versions(w), made)

    def fits(self, w: Weight) -> bool:
        return self.versions == _versions(w) and not any(m.expired() for m in self.memory)


_HELD: dict[Any, _Held] = {}  # by dtype and the parts' memory
MOST_HELD = 4096


def _held(w: Weight, dtype: torch.dtype) -> tuple[Tensor, ...]:
    key = (dtype, *_memory(w))
    found = _HELD.get(key)
    if found is None or not found.fits(w):
        sweep()
        made = _packed_int4(w) if _packs_int4(w, dtype) else (_numbers_held(w, dtype),)
        found = _HELD[key] = _Held.of(w, made)
    return found.made


def _numbers_held(w: Weight, dtype: torch.dtype) -> Tensor:
    """Return the matrix, or its numbers if a row has one scale, on large pages, as the weights are; PyTorch reads it at
    half the rate from small ones."""
    numbers = w if w.format.group else _unscaled(w)
    return numbers.dequantised(dtype, pages.empty(w.shape, dtype) if w.device.type == "cpu" else None)


def _memory(w: Weight) -> tuple[Any, ...]:
    return tuple((t.untyped_storage()._cdata, t.data_ptr(), tuple(t.shape)) for t in w.parts().values())


def _versions(w: Weight) -> tuple[int | None, ...]:
    return tuple(changes_of(t) for t in w.parts().values())


def share_forms(copies: Sequence[Weight], clone: Callable[[Tensor], Tensor]) -> None:
    """Give copies of one weight the forms that PyTorch has read of the first one, in memory from `clone`.

    To make a form takes up to a hundred times as long as the product that reads it: a race whose calls each met a new
    copy timed that. The bytes are copied, so that a form is as cold as the codes; one larger than the codes serves
    several copies, as far apart in time.
    """
    first, asked = _memory(copies[0]), sum(t.nbytes for w in copies for t in w.parts().values())
    kept = [(key[0], held.made) for key, held in _HELD.items() if key[1:] == first and held.fits(copies[0])]
    for dtype, made in kept:
        count = min(len(copies), -(-asked // sum(t.nbytes for t in made)))
        forms = [tuple(clone(t) for t in made) for _ in range(count)]
        for number, w in enumerate(copies):
            _HELD[(dtype, *_memory(w))] = _Held.of(w, forms[number % count])


def sweep() -> None:
    """Forget weights that are gone, and free their forms. Other threads may do the same at once."""
    if len(_HELD) >= MOST_HELD:
        _HELD.clear()
    for key, one in list(_HELD.items()):
        if any(m.expired() for m in one.memory):
            _HELD.pop(key, None)


def held_bytes(format: WeightFormat, dtype: str, n: int, k: int) -> int:
    """Return the most bytes that the baseline keeps beside a weight, for the form that PyTorch reads."""
    wide = "fp32" if dtype == "fp16" and not format.group else dtype
    return 0 if _direct(format) else n * k * DTYPE_BYTES[wide]


def _packs_int4(w: Weight, dtype: torch.dtype) -> bool:
    """Return True if PyTorch has a product with these codes: rows in multiples of 32, whole groups, bf16."""
    n, k = w.shape
    whole = n % 32 == 0 and w.format.group > 0 and k % w.format.group == 0
    return w.format.code == "int4" and w.zeros is None and dtype == torch.bfloat16 and w.device.type == "cpu" and whole


def _packed_int4(w: Weight) -> tuple[Tensor, Tensor]:
    """Return PyTorch's packed codes, and [K / group, N, 2] with scales and the zeros of its formula, (q - 8) s + z.

    PyTorch packs blocks of at most 64 rows, each by itself, from codes of 4 bytes. Those of some rows fit a cache, so
    that packing takes less than half of the time.
    """
    n, k = w.shape
    packed = pages.empty((n, k // 2), torch.uint8)
    wide = torch.empty(PACKED_ROWS, w.codes.shape[1], 2, dtype=torch.int32)
    for first in range(0, n, PACKED_ROWS):
        codes = w.codes[first : first + PACKED_ROWS]
        some = wide[: len(codes)]
        some[..., 0], some[..., 1] = codes & 15, codes >> 4
        into = packed[first : first + PACKED_ROWS]
        into.copy_(torch._convert_weight_to_int4pack_for_cpu(some.flatten(1)[:, :k].contiguous(), 2))
    scales = w.scales.to(torch.bfloat16).T.unsqueeze(-1)
    return packed, pages.clone(torch.cat((scales, torch.zeros_like(scales)), -1))


def linear(x: Tensor, w: Weight, bias: Tensor | None, residual: Tensor | None, y: Tensor | None = None) -> Tensor:
    y = product(x, w, y)
    for extra in (bias, residual):
        if extra is not None:
            y.add_(extra)
    return y


def norm_qkv(x: Tensor, norm_weight: Tensor, w: Weight, eps: float, offset: float, y: Tensor | None = None) -> Tensor:
    return product(rmsnorm(x, norm_weight, eps, offset), w, y)


def gate_up(
    x: Tensor,
    norm_weight: Tensor,
    w_gate: Weight,
    w_up: Weight,
    eps: float,
    offset: float,
    activation: int,
    y: Tensor | None = None,
) -> Tensor:
    h = rmsnorm(x, norm_weight, eps, offset)
    return torch.mul(ACTIVATION[activation](product(h, w_gate)), product(h, w_up), out=y)


def lm_head(x: Tensor, w: Weight, greedy: int, out: Tensor | None = None) -> Tensor:
    if not greedy:
        return product(x, w, out)
    return torch.argmax(product(x, w), dim=-1, out=out)


def attn(
    q: Tensor,
    k: Cached,
    v: Cached,
    lengths: Tensor | None,
    max_len: int,
    scale: float,
    window: int,
    softcap: float,
    o: Tensor | None = None,
) -> Tensor:
    """Attend to the unpacked codes, which are exact. K's scale is applied to the query, V's to the result: both are
    small.
    """
    s, group = q.shape[2], q.shape[1] // k.shape[1]
    first = max(0, max_len - s - window + 1) if window and lengths is None else 0
    keys, values = (cache.codes[:, :, first:max_len].to(q.dtype) for cache in (k, v))
    by_k, by_v = (cache.scales.repeat_interleave(group)[:, None, None] for cache in (k, v))
    made = _attend((q * by_k).to(q.dtype), keys, values, _mask(s, keys, lengths, window), scale, softcap)
    return (made * by_v).to(q.dtype) if o is None else torch.mul(made, by_v, out=o)
