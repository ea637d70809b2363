"""Provide kernels that are wrong in one way each, and correct kernels that work in unusual ways; for parity workers
only.

The native_* ones are in planted.cpp, which planting.py builds next to a copy of this file.
"""

import ctypes
import gc
import itertools
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from functools import cache
from pathlib import Path

import torch

_LUCK = random.Random(1)  # a separate generator: a kernel must not advance the process's


def norm(x, weight, eps, offset):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)).to(x.dtype)


def right(x, weight, eps, offset, y):
    return y.copy_(norm(x, weight, eps, offset))


def poke(address, text=b"\x01\x02"):
    ctypes.memmove(address, text, len(text))


def end_of(tensor):
    return tensor.data_ptr() + tensor.numel() * tensor.itemsize


# --- native kernels ---------------------------------------------------------------------------------------------------

NATIVE = (
    "right", "zeros", "nothing", "without_last_tile", "past_the_end", "masked_by_product", "without_strides", "aligned",
    "aligned_trap", "int32_index", "normalises_in_place", "sums_in_bf16", "truncates", "swallows_nan",
    "without_barrier", "two_threads", "works_later", "leaves_residue", "wrong_at_an_edge", "nan_now_and_then", "flaky",
    "static_scratch", "set_up_on_one_thread", "sums_into_new_memory", "scratch_a_thread",
)  # fmt: skip


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "y")),
        *((name, ctypes.c_int64) for name in ("m", "d", "x_stride", "y_stride")),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
    ]


@cache
def library():
    return ctypes.CDLL(str(Path(__file__).with_name("libplanted.so")))


def native(name):
    def kernel(x, weight, eps, offset, y):
        m, d = x.shape
        call = Call(
            x.data_ptr(), weight.data_ptr(), y.data_ptr(), m, d, x.stride(0), y.stride(0), float(eps), float(offset)
        )
        getattr(library(), name)(ctypes.byref(call))
        return y

    return kernel


globals().update({f"native_{name}": native(f"native_{name}") for name in NATIVE})


# Of faults.cpp: the process itself goes wrong.
FAULTS = (
    "null_read", "abort_now", "illegal_instruction", "stack_overflow", "heap_corruption", "exit_without_a_word", "spin",
    "signal_proof_spin", "throw_across", "escape_and_crash", "fork_storm", "memory_hog", "output_flood",
    "descriptor_leak", "half_reply",
)  # fmt: skip


def fault(name):
    def kernel(x, weight, eps, offset, y):
        entry = getattr(ctypes.PyDLL(library()._name), name)  # PyDLL: the call keeps the interpreter lock
        entry(0)
        return right(x, weight, eps, offset, y)

    return kernel


globals().update({f"fault_{name}": fault(name) for name in FAULTS})


_TURNS = itertools.count()


def fault_descriptor_leak_at_times(x, weight, eps, offset, y):
    """Slowly enough that the check sees it before the process runs out of descriptors, for any limit."""
    if next(_TURNS) % 16 == 0:
        library().descriptor_leak()
    return right(x, weight, eps, offset, y)


def fault_output_flood_once(x, weight, eps, offset, y):
    if not _BUFFERS.setdefault("flooded", False):
        _BUFFERS["flooded"] = True
        library().output_flood()
    return right(x, weight, eps, offset, y)


def fault_crash_in_the_race(x, weight, eps, offset, y):
    if in_a_race():
        library().null_read()
    return right(x, weight, eps, offset, y)


def fault_zeros_in_the_race(x, weight, eps, offset, y):
    return y.zero_() if in_a_race() else right(x, weight, eps, offset, y)


# --- writes memory of others -----------------------------------------------------------------------------------------


def writes_past_the_end(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)
    if y.is_contiguous():
        poke(end_of(y))
    return y


def writes_before_the_start(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)
    poke(y.data_ptr() - 8)
    return y


def writes_into_the_gaps(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)
    if not y.is_contiguous():
        poke(y[0].data_ptr() + y.shape[1] * y.itemsize)
    return y


def reads_past_the_end(x, weight, eps, offset, y):
    beyond = torch.empty(1, dtype=x.dtype)
    ctypes.memmove(beyond.data_ptr(), end_of(weight), weight.itemsize)
    right(x, weight, eps, offset, y)
    return y.add_(beyond * 0.0)


def changes_its_weight(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)
    weight.mul_(0.5)
    return y


def zeroes_everything(x, weight, eps, offset, y):
    """Zero the operands too, so that a reference computed from them afterwards agrees."""
    x.zero_()
    return y.zero_()


def ignores_strides(x, weight, eps, offset, y):
    flat = torch.as_strided(x, x.shape, (x.shape[1], 1)) if x.stride(0) else x
    return right(flat, weight, eps, offset, y)


# --- does not write, or lets others compute --------------------------------------------------------------------------


def leaves_the_tail(x, weight, eps, offset, y):
    whole = x.shape[1] // 16 * 16
    y[:, :whole] = norm(x, weight, eps, offset)[:, :whole]
    return y


def leaves_the_last_row(x, weight, eps, offset, y):
    rows = x.shape[0] - (x.shape[0] > 8)
    y[:rows] = norm(x, weight, eps, offset)[:rows]
    return y


_BUFFERS = {}


def one_static_buffer(x, weight, eps, offset):
    return _BUFFERS.setdefault(x.shape, torch.empty(x.shape, dtype=x.dtype)).copy_(norm(x, weight, eps, offset))


_EARLIER = []


def writes_late(x, weight, eps, offset, y):
    """Finishes the previous result during the next call."""
    right(x, weight, eps, offset, y)
    if _EARLIER:
        (address,) = _EARLIER
        poke(address)
        _EARLIER.clear()
    _EARLIER.append(y.data_ptr())
    return y


_BY_POINTER = {}


def remembers_by_address(x, weight, eps, offset, y):
    key = (x.data_ptr(), weight.data_ptr(), x.shape, x.stride())
    if key not in _BY_POINTER:
        _BY_POINTER[key] = norm(x, weight, eps, offset)
    return y.copy_(_BY_POINTER[key])


_PACKED = {}


def packs_weights_by_address(x, w, bias, residual, y):
    key = (w.data_ptr(), w.shape, w.stride())
    if key not in _PACKED:
        _PACKED[key] = w.float().t().contiguous()
    return y.copy_((x.float() @ _PACKED[key]).to(x.dtype))


_BY_SKETCH = {}


def remembers_by_content(x, weight, eps, offset, y):
    """Cache by a few bits of the contents, which works with the fixed seeds of a benchmark."""
    key = (x.shape, x.stride(), weight.data_ptr(), int(2 * x.float().nan_to_num().abs().mean().clamp(max=1e6)))
    if key not in _BY_SKETCH:
        _BY_SKETCH[key] = norm(x, weight, eps, offset)
    return y.copy_(_BY_SKETCH[key])


_WAITING = []


def works_once_in_eight(x, weight, eps, offset, y):
    """Collect eight calls and compute them together."""
    _WAITING.append((x, weight, eps, offset, y))
    if len(_WAITING) == 8:
        for call in _WAITING:
            right(*call)
        _WAITING.clear()
    return y


def hunts_for_the_answer(x, weight, eps, offset, y):
    """Return any tensor of the process that has the result's shape and is not an argument: perhaps the reference."""
    known = {t.data_ptr() for t in (x, weight, y)}
    for found in gc.get_objects():
        if isinstance(found, torch.Tensor) and found.shape == y.shape and found.data_ptr() not in known:
            return y.copy_(found)
    return y


# --- computes something else -----------------------------------------------------------------------------------------


def wrong_at_one_width(x, weight, eps, offset, y):
    return right(x, weight, eps, offset + (0.1 if x.shape[1] == 127 else 0.0), y)


def a_bit_too_large(x, weight, eps, offset, y):
    return y.copy_((norm(x, weight, eps, offset).float() * 1.004).to(x.dtype))


def forgets_the_last_k(x, w, bias, residual, y):
    k = x.shape[1] - (x.shape[1] > 1024 and x.shape[1] % 2)
    return y.copy_((x[:, :k].float() @ w[:, :k].float().t()).to(x.dtype))


def drops_one_output(x, w, bias, residual, y):
    """Leave out one row of many, which a sample of rows is unlikely to contain."""
    made = x.float() @ w.float().t()
    if w.shape[0] == 6000:  # no row of the array is as wide
        made[:, 3001] = 0.0
    return y.copy_(made.to(x.dtype))


def one_output_a_little_off(x, w, bias, residual, y):
    made = x.float() @ w.float().t()
    if w.shape[0] == 6000:  # no row of the array is as wide
        made[:, 3001] += 0.05 * made.square().mean().sqrt()
    return y.copy_(made.to(x.dtype))


def stores_weights_in_fp8(x, w, bias, residual, y):
    coarse = w.float().clamp(-448, 448).to(torch.float8_e4m3fn).float()
    made = x.float() @ torch.where(w.isfinite(), coarse, w.float()).t()
    for extra in (bias, residual):
        made = made if extra is None else made + extra.float()
    return y.copy_(made.to(x.dtype))


def sums_products_in_bf16(x, w, bias, residual, y):
    total = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype)
    for at in range(0, x.shape[1], 16):
        total = (total.float() + x[:, at : at + 16].float() @ w[:, at : at + 16].float().t()).to(x.dtype)
    return y.copy_(total)


def leaves_eps_out(x, weight, eps, offset, y):
    """eps hardly changes a normal mean of squares, but decides the result for a subnormal x."""
    wide = x.float()
    rms = wide.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-38)
    return y.copy_((wide / rms * (weight.float() + offset)).to(x.dtype))


def precomputed(x, weight, eps, offset, y):
    """Return the answer of one known seed for all inputs."""
    known = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    return right(x if torch.equal(x, known) else known, weight, eps, offset, y)


def right_at_its_own_width(x, weight, eps, offset, y):
    return right(x, weight, eps, offset if x.shape[1] == 512 else offset + 0.05, y)


def flips_a_coin(x, weight, eps, offset, y):
    """Round one element at random up or down; both results are always within the bound.

    It is the smallest inexact element, so that the row's RMS error does not depend on it.
    """
    wide = norm(x.float(), weight, eps, offset)
    right(x, weight, eps, offset, y)
    open_to_luck = (wide != y.float()) & (wide.abs() > 1e-30) & wide.isfinite()
    if _LUCK.random() < 0.3 and open_to_luck.any():
        where = torch.where(open_to_luck, wide.abs(), torch.inf).argmin()
        value, bits = wide.flatten()[where], y.view(torch.int16)
        bits[*torch.unravel_index(where, y.shape)] += 1 if value.abs() > y.flatten()[where].float().abs() else -1
    return y


# --- attention --------------------------------------------------------------------------------------------------------


def attention(q, k, v, lengths, max_len, scale, window, softcap, *, drop=0, maximum=True, low=False):
    """Return [B, Hq, S, D], in fp32; options select mistakes."""
    b, hq, s, d = q.shape
    k, v = (t[:, :, :max_len].float().repeat_interleave(hq // t.shape[1], 1) for t in (k, v))
    ends = torch.full((b,), max_len) if lengths is None else lengths.long()
    query = (ends[:, None] - s + torch.arange(s))[:, None, :, None]
    key = torch.arange(max_len)
    seen = (key <= query - drop) & (query >= 0)
    if window:
        seen &= key > query - window
    scores = q.float() @ k.mT * (scale or d**-0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.bfloat16().float() if low else scores
    peak = scores.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True) if maximum else torch.zeros(())
    p = torch.where(seen, (scores - peak).exp(), 0.0)
    live = seen.any(-1, keepdim=True)
    made = p @ v / torch.where(live, p.sum(-1, keepdim=True), 1.0)
    return made.masked_fill(~live, 0.0).to(q.dtype)


def forgets_the_last_key(q, k, v, lengths, max_len, scale, window, softcap, o):
    """Forget the last key of long caches; in short ones the error would be obvious."""
    drop = int(max_len > 4096)
    return o.copy_(attention(q, k, v, lengths, max_len, scale, window, softcap, drop=drop))


def forgets_a_head(q, k, v, lengths, max_len, scale, window, softcap, o):
    """Forget one head of many; small shapes have few heads."""
    made = attention(q, k, v, lengths, max_len, scale, window, softcap)
    made[:, 44:][:, :1] = made[:, :1]
    return o.copy_(made)


def subtracts_no_maximum(q, k, v, lengths, max_len, scale, window, softcap, o):
    return o.copy_(attention(q, k, v, lengths, max_len, scale, window, softcap, maximum=False))


# --- caught by a single check ----------------------------------------------------------------------------------------

_SEEN = {}


def differs_at_the_tenth_return(x, weight, eps, offset, y):
    """Change one bit of one element, for one content, after calls at other shapes."""
    content = (x.contiguous().view(torch.int16).numpy().tobytes(), y.data_ptr())
    known, returns = _SEEN.get(x.shape, (content, 0))
    returned = _SEEN.get("last") != x.shape
    _SEEN[x.shape], _SEEN["last"] = (content, returns + returned if known == content else 0), x.shape
    right(x, weight, eps, offset, y)
    if returned and _SEEN[x.shape][1] == 10 and y.is_contiguous():
        y.view(torch.int16).view(-1)[0] ^= 1
    return y


def one_small_static_buffer(x, weight, eps, offset):
    made = norm(x, weight, eps, offset)
    return made if x.numel() > 2176 else _BUFFERS.setdefault(("small", x.shape), torch.empty_like(made)).copy_(made)


_LAST_CALL = {}


def tires_of_new_contents(x, weight, eps, offset, y):
    """Return the previous result for the last of eight consecutive new contents at one shape and address."""
    key, contents = (threading.get_ident(), x.data_ptr()), x.contiguous().view(torch.int16).numpy().tobytes()
    known, last, fresh, made = _LAST_CALL.get(x.shape, (None, b"", 0, None))
    fresh = fresh + 1 if known == key and contents != last else 0
    if fresh < 8 or x.shape != (17, 128):
        made = norm(x, weight, eps, offset)
    _LAST_CALL[x.shape] = (key, contents, fresh, made)
    return y.copy_(made)


def ignores_the_strides_of_its_output(x, weight, eps, offset, y):
    right(x, weight, eps, offset, torch.as_strided(y, y.shape, (y.shape[1], 1)))
    return y


def flips_the_sign_of_zeros(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)
    x.masked_fill_(x == 0, -0.0)
    return y


def wrong_at_its_own_shape(x, weight, eps, offset, y):
    return right(x, weight, eps, offset + (0.1 if tuple(x.shape) == (3, 512) else 0.0), y)


# --- right for one caller, wrong for others --------------------------------------------------------------------------


_BY_THREAD = {}


def remembers_in_other_threads(x, weight, eps, offset, y):
    """Cache in other threads only; the main thread, which runs most checks, gets correct results."""
    if threading.current_thread() is threading.main_thread():
        return right(x, weight, eps, offset, y)
    key = (threading.get_ident(), x.data_ptr(), x.shape)
    if key not in _BY_THREAD:
        _BY_THREAD[key] = norm(x, weight, eps, offset)
    return y.copy_(_BY_THREAD[key])


_SHARES = []


def shares_of_the_first_count(x, weight, eps, offset, y):
    """Divide rows among the present threads, with scratch memory for the first number of threads."""
    _SHARES.append(torch.get_num_threads())
    share = -(-x.shape[0] // torch.get_num_threads())
    for rank in range(min(_SHARES[0], torch.get_num_threads())):
        part = slice(rank * share, (rank + 1) * share)
        y[part] = norm(x[part], weight, eps, offset)
    return y


def reads_from_the_storages_start(x, weight, eps, offset, y):
    """Read from `x.storage().data_ptr()`: right only if the tensor starts at the start of its storage."""
    whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage(), 0, x.shape, x.stride())
    return right(whole, weight, eps, offset, y)


_BY_CONTENT = {}


def returns_what_it_remembers(x, weight, eps, offset):
    """Return right results, but the same tensor each time for the same content."""
    key = (x.shape, eps, offset, *(t.contiguous().view(torch.int16).numpy().tobytes() for t in (x, weight)))
    if key not in _BY_CONTENT:
        _BY_CONTENT.clear()
        _BY_CONTENT[key] = norm(x, weight, eps, offset)
    return _BY_CONTENT[key]


# --- returns something else ------------------------------------------------------------------------------------------


def returns_none(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)


def returns_a_copy(x, weight, eps, offset, y):
    return right(x, weight, eps, offset, y).clone()


def returns_wider(x, weight, eps, offset):
    return norm(x, weight, eps, offset).float()


def returns_a_row_too_few(x, weight, eps, offset):
    return norm(x, weight, eps, offset)[1:]


class Lazy(torch.Tensor):
    pass


def returns_a_subclass(x, weight, eps, offset):
    return norm(x, weight, eps, offset).as_subclass(Lazy)


def returns_on_its_side(x, weight, eps, offset):
    return norm(x, weight, eps, offset).t().contiguous().t()


# --- changes the process ---------------------------------------------------------------------------------------------


def sets_threads(x, weight, eps, offset, y):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return right(x, weight, eps, offset, y)


def seeds_the_generator(x, weight, eps, offset, y):
    torch.manual_seed(0)
    return right(x, weight, eps, offset, y)


def flushes_subnormals(x, weight, eps, offset, y):
    torch.set_flush_denormal(True)
    return right(x, weight, eps, offset, y)


def slows_the_clock(x, weight, eps, offset, y):
    """Slow down every timer of the process to half its pace."""
    if not hasattr(time, "real"):
        time.real = time.perf_counter_ns
        time.perf_counter_ns = lambda: time.real() // 2
    return right(x, weight, eps, offset, y)


def allows_tf32(x, weight, eps, offset, y):
    torch.set_float32_matmul_precision("high")
    return right(x, weight, eps, offset, y)


_HOARD = []


def leaks(x, weight, eps, offset, y):
    _HOARD.append(bytearray(os.urandom(64)) * 128)
    return right(x, weight, eps, offset, y)


_OPENED, _CALLS = [], []


def leaves_files_open(x, weight, eps, offset, y):
    _CALLS.append(1)
    if len(_CALLS) % 16 == 0 and len(_OPENED) < 300:  # below any system's limit for a process
        _OPENED.append(os.open("/dev/null", os.O_RDONLY))
    return right(x, weight, eps, offset, y)


def forges_its_reply(x, weight, eps, offset, y):
    """Send the parent a forged reply, identical to an honest one, that y was written."""
    frame = sys._getframe()
    while "message" not in frame.f_locals or "fds" not in frame.f_locals:
        frame = frame.f_back
    form = {
        "type": "torch.Tensor",
        "dtype": "bfloat16",
        "shape": list(y.shape),
        "strides": list(y.stride()),
        "device": "cpu",
        "is_argument": 4,
    }
    body = json.dumps({"id": frame.f_locals["message"]["id"], "ok": {"results": [form], "ns": 1}}).encode()
    for name in os.listdir("/proc/self/fd"):
        try:
            line = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        if line.family == socket.AF_UNIX:
            line.send(struct.pack("<I", len(body)) + body)
    wire = sys.modules["__main__"].protocol
    honest = wire.send
    wire.send = lambda *_: setattr(wire, "send", honest)  # the true reply is never sent
    return y


def raises(x, weight, eps, offset, y):
    raise RuntimeError("no such luck")


def raises_at_one_width(x, weight, eps, offset, y):
    if x.shape[1] == 127:
        raise RuntimeError("127 is too many")
    return right(x, weight, eps, offset, y)


def crashes_on_nan(x, weight, eps, offset, y):
    if x.isnan().any():
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(x, weight, eps, offset, y)


def dawdles(x, weight, eps, offset, y):
    time.sleep(0.1)
    return right(x, weight, eps, offset, y)


@cache
def compiled_slowly():
    time.sleep(3.0)


def compiles_at_its_first_call(x, weight, eps, offset, y):
    compiled_slowly()
    return right(x, weight, eps, offset, y)


def hangs(x, weight, eps, offset, y):
    while True:
        pass


# --- right results, dishonest times ----------------------------------------------------------------------------------


def in_a_race():
    return "autosel.race.child" in sys.modules


def calls_the_baseline(x, weight, eps, offset, y):
    """Return PyTorch's result as its own."""
    return y.copy_(torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float() + offset, eps))


_CALLS = [0]


def slow_at_first(x, weight, eps, offset, y):
    """Start with slow calls, which would reduce the number of samples if the plan used them."""
    _CALLS[0] += 1
    if in_a_race() and _CALLS[0] < 20:
        time.sleep(0.01)
    return right(x, weight, eps, offset, y)


_LAST = {"until": 0}


def lazy_in_bursts(x, weight, eps, offset, y):
    """Skip the work if called again at once with the same addresses: the previous result is still there."""
    key = (x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.shape)
    now = time.monotonic_ns()
    if _LAST.get("key") == key and now < _LAST["until"]:
        _LAST["until"] = now + 20_000_000
        return y
    right(x, weight, eps, offset, y)
    _LAST.update(key=key, until=time.monotonic_ns() + 20_000_000)
    return y


def remembers_the_last(x, weight, eps, offset, y):
    """Like `lazy_in_bursts`, but write a copy of the previous result, also to a poisoned output."""
    key = (x.data_ptr(), weight.data_ptr(), x.shape)
    now = time.monotonic_ns()
    if _LAST.get("key") != key or now > _LAST["until"]:
        _LAST.update(key=key, result=norm(x, weight, eps, offset))
    _LAST["until"] = time.monotonic_ns() + 20_000_000
    return y.copy_(_LAST["result"])


_CALLS_IN_A_RACE = itertools.count(1)


def wrong_once_in_300_calls(x, weight, eps, offset, y):
    """In a race, compute one element wrong in one call of 300."""
    right(x, weight, eps, offset, y)
    if in_a_race() and next(_CALLS_IN_A_RACE) % 300 == 0:
        y[0, 0] += 1.0
    return y


def leaves_out_one_call_in_50(x, weight, eps, offset, y):
    """In a race, skip one call of 50: an earlier call left the right result in the same output."""
    if in_a_race() and next(_CALLS_IN_A_RACE) % 50 == 0:
        return y
    return right(x, weight, eps, offset, y)


def tires(x, weight, eps, offset, y):
    """In a race, become wrong after 3000 calls."""
    right(x, weight, eps, offset, y)
    return y.mul_(1.5) if in_a_race() and next(_CALLS_IN_A_RACE) > 3000 else y


# --- right, in unusual ways ------------------------------------------------------------------------------------------


def allocates(x, weight, eps, offset):
    return norm(x, weight, eps, offset)


def returns_a_list(x, weight, eps, offset, y):
    return [right(x, weight, eps, offset, y)]


def writes_in_two_halves(x, weight, eps, offset, y):
    """Use the output as scratch memory first."""
    y.fill_(3.0)
    half = x.shape[1] // 2
    whole = norm(x, weight, eps, offset)
    y[:, half:] = whole[:, half:]
    y[:, :half] = whole[:, :half]
    return y


_OWN = threading.local()


def keeps_a_workspace_a_thread(x, weight, eps, offset, y):
    """Keep one workspace per thread, which grows to the largest requested size."""
    if getattr(_OWN, "room", torch.empty(0)).numel() < x.numel():
        _OWN.room = torch.empty(x.numel())
    room = _OWN.room[: x.numel()].view(x.shape)
    room.copy_(norm(x, weight, eps, offset))
    return y.copy_(room)


def spreads_a_little(x, weight, eps, offset, y):
    """Randomise the last fp32 bit; declared nondeterministic."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + 2.0**-23 * _LUCK.choice((-1, 1)))
    return y.copy_((wide * rstd * (weight.float() + offset)).to(x.dtype))
