"""Kernels that are wrong, each in one way, and kernels that are right in unusual ways; for parity workers only."""

import ctypes
import os
import random
import signal
import time

import torch

_LUCK = random.Random()  # its own: the process's generator is not a kernel's to move


def norm(x, weight, eps, offset):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)).to(x.dtype)


def right(x, weight, eps, offset, y):
    return y.copy_(norm(x, weight, eps, offset))


def poke(address, text=b"\x01\x02"):
    ctypes.memmove(address, text, len(text))


def end_of(tensor):
    return tensor.data_ptr() + tensor.numel() * tensor.itemsize


# --- touches what is not its own -------------------------------------------------------------------------------------


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


def changes_its_input(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)
    x[-1, -1] = 7.0
    return y


def changes_its_weight(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)
    weight.mul_(0.5)
    return y


def ignores_strides(x, weight, eps, offset, y):
    flat = torch.as_strided(x, x.shape, (x.shape[1], 1)) if x.stride(0) else x
    return right(flat, weight, eps, offset, y)


# --- does not write, or not itself -----------------------------------------------------------------------------------


def writes_nothing(x, weight, eps, offset, y):
    return y


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


# --- computes something else -----------------------------------------------------------------------------------------


def zeros(x, weight, eps, offset, y):
    return y.zero_()


def truncates(x, weight, eps, offset, y):
    wide = x.float()
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (weight.float() + offset)
    return y.copy_((exact.contiguous().view(torch.int32) & -65536).view(torch.float32))


def sums_in_half(x, weight, eps, offset, y):
    total = torch.zeros(x.shape[0], 1, dtype=x.dtype)
    for column in range(x.shape[1]):
        total += x[:, column : column + 1].square()
    wide = x.float() * torch.rsqrt(total.float() / x.shape[1] + eps)
    return y.copy_((wide * (weight.float() + offset)).to(x.dtype))


def swallows_nan(x, weight, eps, offset, y):
    return y.copy_(norm(x, weight, eps, offset).nan_to_num(0.0))


def wrong_at_one_width(x, weight, eps, offset, y):
    return right(x, weight, eps, offset + (0.1 if x.shape[1] == 127 else 0.0), y)


def a_bit_too_large(x, weight, eps, offset, y):
    return y.copy_((norm(x, weight, eps, offset).float() * 1.004).to(x.dtype))


def forgets_the_last_k(x, w, bias, residual, y):
    k = x.shape[1] - (x.shape[1] > 1000)
    return y.copy_((x[:, :k].float() @ w[:, :k].float().t()).to(x.dtype))


def flips_a_coin(x, weight, eps, offset, y):
    right(x, weight, eps, offset, y)
    if _LUCK.random() < 0.3:
        y.view(torch.int16)[0, 0] ^= 1
    return y


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


_HOARD = []


def leaks(x, weight, eps, offset, y):
    _HOARD.append(bytearray(os.urandom(64)) * 128)
    return right(x, weight, eps, offset, y)


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


def hangs(x, weight, eps, offset, y):
    while True:
        pass


# --- right, in unusual ways ------------------------------------------------------------------------------------------


def allocates(x, weight, eps, offset):
    return norm(x, weight, eps, offset)


def returns_a_list(x, weight, eps, offset, y):
    return [right(x, weight, eps, offset, y)]


def computes_in_double(x, weight, eps, offset, y):
    return y.copy_(norm(x.double(), weight.double(), eps, offset))


def rounds_twice(x, weight, eps, offset, y):
    """As transformers does: the normalised value in the dtype, then times the weight."""
    unit = norm(x, torch.ones_like(weight), eps, 0.0)
    return y.copy_(unit * (weight.float() + offset).to(x.dtype)) if offset == 0 else right(x, weight, eps, offset, y)


def writes_in_two_halves(x, weight, eps, offset, y):
    """Uses its output as scratch before it is done."""
    y.fill_(3.0)
    half = x.shape[1] // 2
    whole = norm(x, weight, eps, offset)
    y[:, half:] = whole[:, half:]
    y[:, :half] = whole[:, :half]
    return y


_WORKSPACE = {}


def keeps_a_workspace(x, weight, eps, offset, y):
    """Grows to the largest size asked for, then stays."""
    if _WORKSPACE.get("room", torch.empty(0)).numel() < x.numel():
        _WORKSPACE["room"] = torch.empty(x.numel())
    room = _WORKSPACE["room"][: x.numel()].view(x.shape)
    room.copy_(norm(x, weight, eps, offset))
    return y.copy_(room)


def spreads_a_little(x, weight, eps, offset, y):
    """Declared nondeterministic: a last fp32 bit that depends on luck."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + 2.0**-23 * _LUCK.choice((-1, 1)))
    return y.copy_((wide * rstd * (weight.float() + offset)).to(x.dtype))
