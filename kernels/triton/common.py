"""What the Triton kernels share: workspace, the arrival counter of split sums, functions the language lacks.

No kernel here. Everything a kernel needs beside its operands (partial sums, counters) belongs to a device and a stream,
is allocated at the first call that needs it and never freed, so that a captured graph may go on pointing at it.
What is captured has its own: graphs of one stream may be replayed at once on two, and what a capture is given was
zeroed by nobody until that graph has run. Its memory is the graph's, which holds it as long as it lives.

Sizes that change from step to step (a batch's rows, the context's length) are named in do_not_specialize: Triton would
compile a kernel again, in the middle of serving, when one becomes a multiple of 16. So it would for a row's settings,
taken out of a larger tensor, that begin at another address: they are named in do_not_specialize_on_alignment.
"""

import ctypes

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.92596298909e-8)  # log2(e) less its fp32
NOWHERE = tl.constexpr(1 << 24)  # above every index of a vocabulary, and exact in fp32

_KEPT = {}  # (device, stream, dtype) -> every tensor made for it, the largest last
_CAPTURED = {}  # (device, stream) -> the last capture seen there, and its counters, the largest last


def partials(like, count):
    """fp32 room for `count` values on the current stream of `like`'s device; what it holds is undefined."""
    stream, capture = _place(like.device)
    if capture:
        return empty(count, like, torch.float32)
    return _room(_KEPT.setdefault((like.device, stream, torch.float32), []), like.device, count, torch.float32)


def counters(like, count):
    """int32 zeros; whoever counts with them leaves zeros behind."""
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
    """(current stream, the capture it is in or 0)"""
    if device.type != "cuda":
        return 0, 0
    stream = torch.cuda.current_stream(device).cuda_stream
    return stream, _capture(stream) if torch.cuda.is_current_stream_capturing() else 0


def _capture(stream):
    """CUDA's number of the capture that the stream is in: no other of this process has it. PyTorch does not tell it."""
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
    """All on one device, the current one, and each with its last dimension contiguous; None is skipped."""
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
    """A tensor read as this and nothing else: lengths, positions, tables, a row's settings, what is added."""
    if tensor.dtype != dtype or tensor.shape != shape:
        refuse(f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, not {dtype} of shape {shape}")


def warps(threads):
    """num_warps for at most `threads` threads: a power of two, 1 to 32."""
    return max(1, min(32, 1 << (max(1, threads // 32).bit_length() - 1)))


# --- on the device ----------------------------------------------------------------------------------------------------
# Whatever a stride is multiplied by is 64 bits wide: rows, heads or tokens of a slice may lie so far apart that the
# product passes 2^31.


@triton.jit
def row(base, m, stride):
    """base of row m, a number: where an index tensor says `.to(tl.int64)`."""
    return base + tl.full((), m, tl.int64) * stride


@triton.jit
def arrives_last(counter, parts):
    """True in the last of `parts` programs to come here; sees all that the others stored before; counter is 0 again."""
    tl.debug_barrier()  # every thread's stores come before the one thread's release
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def tanh(x, EXACT: tl.constexpr = False):
    """To a few units in the last place of fp32; a series near 0, where 1 - e cancels. EXACT: divided as IEEE does."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = tl.div_rn(1 - e, 1 + e) if EXACT else (1 - e) / (1 + e)
    s = x * x
    near = 1 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835))))
    return tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0, -far, far))


@triton.jit
def exp(x):
    """As good as the device's exp2: tl.exp rounds x log2(e), which costs |x| roundings. Beyond fp32, 0 or inf."""
    x = tl.minimum(tl.maximum(x, -104.0), 89.0)
    whole = tl.floor(x * LOG2E + 0.5)
    return tl.exp2(whole) * tl.exp2(tl.fma(x, LOG2E, -whole) + x * LOG2E_REST)


@triton.jit
def silu(g):
    """Divided as exactly as the baseline does: `/` may be two units in the last place away."""
    return tl.div_rn(g, 1 + exp(-g))


@triton.jit
def gelu_erf(g):
    return 0.5 * g * (1 + tl.erf(g * 0.7071067811865476))


@triton.jit
def gelu_tanh(g):
    return 0.5 * g * (1 + tanh(0.7978845608028654 * (g + 0.044715 * g * g * g), True))


@triton.jit
def activate(g, KIND: tl.constexpr):
    """0: silu, 1: gelu (erf), 2: gelu (tanh)."""
    if KIND == 0:
        return silu(g)
    elif KIND == 1:
        return gelu_erf(g)
    else:
        return gelu_tanh(g)


@triton.jit
def better(value, index, best, where):
    """(best, where) elementwise, for indices that only grow: the earlier of two equals stays, NaN beats everything."""
    wins = (value > best) | ((value != value) & (best == best))
    return tl.where(wins, value, best), tl.where(wins, index, where)


@triton.jit
def top(value, index):
    """Down axis 0 of [R, C]: the largest value and the lowest index that has it; the first NaN, if there is one."""
    spoilt = value != value
    none = tl.max(spoilt.to(tl.int32), 0) == 0
    most = tl.max(tl.where(spoilt, float("inf"), value), 0)
    chosen = tl.where(none[None, :], value == most[None, :], spoilt)
    return tl.where(none, most, float("nan")), tl.min(tl.where(chosen, index, NOWHERE), 0)
