"""Helpers shared by the Triton kernels: workspace, the arrival counter of split sums, functions that Triton lacks.

Defines no kernel. Memory that a kernel needs besides its operands (partial sums, counters) belongs to a device and a
stream. It is allocated at the first call that needs it and never freed, so a captured graph can keep pointing to it. A
graph capture has separate memory: graphs captured on one stream may be replayed at the same time on two streams, and
memory allocated during a capture is zeroed only when that graph runs. The graph owns it and keeps it as long as it
lives.

Sizes that change from step to step (the rows of a batch, the context length) are named in do_not_specialize: otherwise
Triton would compile a kernel again, while serving, when a size becomes a multiple of 16. The same holds for per-row
settings that are slices of a larger tensor and begin at another address: they are named in
do_not_specialize_on_alignment.
"""

import ctypes

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.92596298909e-8)  # log2(e) minus its fp32 value
NOWHERE = tl.constexpr(1 << 24)  # above every index of a vocabulary, and exact in fp32

_KEPT = {}  # (device, stream, dtype) -> every tensor made for it, the largest last
_CAPTURED = {}  # (device, stream) -> the last capture seen there, and its counters, the largest last


def partials(like, count):
    """Return uninitialised fp32 memory for `count` values on the current stream of `like`'s device."""
    stream, capture = _place(like.device)
    if capture:
        return empty(count, like, torch.float32)
    return _room(_KEPT.setdefault((like.device, stream, torch.float32), []), like.device, count, torch.float32)


def counters(like, count):
    """Return int32 zeros; a kernel that counts with them must leave zeros behind."""
    stream, capture = _place(like.device)
    if not capture:
        return _room(_KEPT.setdefault((like.device, stream, torch.int32), []), like.device, count, torch.int32)
    its, made = _CAPTURED.get((like.device, stream), (0, []))
    if its != capture:
        made = []
        _CAPTURED[like.device, stream] = capture, made
    return _room(made, like.device, count, torch.int32)


def _room(made, device, count, dtype):
    if not made or made[-1].numel() < count:
        made.append(torch.zeros(triton.next_power_of_2(max(count, 1 << 12)), dtype=dtype, device=device))
    return made[-1]


def _place(device):
    """Return (current stream, number of the capture it is in, or 0)."""
    if device.type != "cuda":
        return 0, 0
    stream = torch.cuda.current_stream(device).cuda_stream
    return stream, _capture(stream) if torch.cuda.is_current_stream_capturing() else 0


def _capture(stream):
    """Return CUDA's number of the stream's capture, unique in this process. PyTorch does not expose it."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    failed = ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    if failed:
        raise RuntimeError(f"CUDA does not say which graph is being captured: error {failed}")
    return number.value


def empty(shape, like, dtype=None):
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def refuse(problem):
    raise ValueError(problem)


def together(*tensors):
    """Check that all are on one device, the current one, with a contiguous last dimension; None is skipped."""
    device = None
    for t in tensors:
        if t is None:
            continue
        if device is None:
            device = t.device
        elif t.device != device:
            refuse(f"operands on {device} and {t.device}")
        strides = t.stride()
        if strides and strides[-1] != 1 and t.shape[-1] > 1:
            refuse(f"a tensor of shape {tuple(t.shape)} is not contiguous in its last dimension")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        refuse(f"operands on {device}, the current device is cuda:{torch.cuda.current_device()}")


def exactly(name, tensor, shape, dtype):
    """Check a tensor that must have exactly this form: lengths, positions, tables, per-row settings, addends."""
    if tensor.dtype != dtype or tensor.shape != shape:
        refuse(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of shape {shape}")


def warps(threads):
    """Return num_warps for at most `threads` threads: a power of two, 1 to 32."""
    return max(1, min(32, 1 << (max(1, threads // 32).bit_length() - 1)))


# --- on the device ----------------------------------------------------------------------------------------------------
# Factors of a stride are 64 bits wide: rows, heads or tokens of a slice may be so far apart that the product exceeds
# 2^31.


@triton.jit
def row(base, m, stride):
    """Return the base of row m, a number; for an index tensor use `.to(tl.int64)`."""
    return base + tl.full((), m, tl.int64) * stride


@triton.jit
def arrives_last(counter, parts):
    """Return True in the last of `parts` programs to arrive; it sees all stores of the others, and the counter is 0
    again.
    """
    tl.debug_barrier()  # the stores of all threads come before the release by one thread
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def tanh(x, EXACT: tl.constexpr = False):
    """Return tanh to a few ulp of fp32; near 0 a series, because 1 - e cancels. EXACT: IEEE division."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = tl.div_rn(1 - e, 1 + e) if EXACT else (1 - e) / (1 + e)
    s = x * x
    near = 1 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835))))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0, -far, far))


@triton.jit
def exp(x):
    """Return exp as precise as the device's exp2: tl.exp rounds x log2(e), which costs |x| roundings. Overflow gives 0
    or inf.
    """
    x = tl.minimum(tl.maximum(x, -104.0), 89.0)
    whole = tl.floor(x * LOG2E + 0.5)
    return tl.exp2(whole) * tl.exp2(tl.fma(x, LOG2E, -whole) + x * LOG2E_REST)


@triton.jit
def silu(g):
    """Divide as exactly as the baseline does: `/` may be two ulp off."""
    return tl.div_rn(g, 1 + exp(-g))


@triton.jit
def gelu_erf(g):
    return 0.5 * g * (1 + tl.erf(g * 0.7071067811865476))


@triton.jit
def gelu_tanh(g):
    return 0.5 * g * (1 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g), True))


@triton.jit
def activate(g, KIND: tl.constexpr):
    """Apply 0: silu, 1: gelu (erf), 2: gelu (tanh)."""
    if KIND == 0:
        return silu(g)
    elif KIND == 1:
        return gelu_erf(g)
    else:
        return gelu_tanh(g)


@triton.jit
def better(value, index, best, where):
    """Update (best, where) elementwise, for increasing indices: a later equal value loses, NaN beats any number."""
    wins = (value > best) | ((value != value) & (best == best))
    return tl.where(wins, value, best), tl.where(wins, index, where)


@triton.jit
def top(value, index):
    """Return, along axis 0 of [R, C], the largest value and the lowest index that has it; the first NaN, if there is
    one.
    """
    spoilt = value != value
    none = tl.max(spoilt.to(tl.int32), 0) == 0
    most = tl.max(tl.where(spoilt, float("inf"), value), 0)
    chosen = tl.where(none[None, :], value == most[None, :], spoilt)
    return tl.where(none, most, float("nan")), tl.min(tl.where(chosen, index, NOWHERE), 0)
