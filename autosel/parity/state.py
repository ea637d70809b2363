"""The process-wide state that a candidate must not change. Runs in the worker, for `Session.look`.

    before = State()            # keeps the functions it sees, so that no other object can take their identity
    before.now()["gc"]          # 'True (700, 10, 10)'

Values are text: the parent compares them and never interprets them. The parent itself reads the state of threads
(workers/registers.py).
"""

from __future__ import annotations

import builtins
import ctypes
import faulthandler
import gc
import hashlib
import locale
import math
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autosel import devices
from autosel.ops.precision import matmul_precision

# Getters of torch._C without arguments. Functions of torch.backends, torch.autograd and torch.overrides set the values.
SWITCHES = (
    "_get_blas_preferred_backend", "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction", "_get_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_tf32", "_get_cudnn_allow_tf32",
    "_get_cudnn_benchmark", "_get_cudnn_deterministic", "_get_cudnn_enabled", "_get_cudnn_sdp_enabled",
    "_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only",
    "_get_deterministic_fill_uninitialized_memory", "_get_flash_sdp_enabled", "_get_graph_executor_optimize",
    "_get_linalg_preferred_backend", "_get_math_sdp_allow_fp16_bf16_reduction", "_get_math_sdp_enabled",
    "_get_mem_efficient_sdp_enabled", "_get_mkldnn_deterministic", "_get_mkldnn_enabled", "_get_nnpack_enabled",
    "_get_onednn_allow_tf32", "_get_overrideable_sdp_enabled", "_get_qengine", "_get_sdp_priority_order",
    "_get_sm_carveout_experimental", "_get_warnAlways", "_is_grad_layout_enforcement_enabled",
    "_is_multithreading_enabled", "_is_torch_function_enabled", "_is_view_replay_enabled", "_is_xnnpack_enabled",
    "_len_torch_dispatch_stack", "_len_torch_function_stack", "is_anomaly_check_nan_enabled", "is_anomaly_enabled",
)  # fmt: skip
MATMUL = ("all", "matmul", "conv", "rnn")  # operations for which torch.backends sets an fp32 precision
# Kernels that a Library("aten", "IMPL") could replace for the whole process: the most called ones.
ATEN = (
    "add.Tensor", "add_.Tensor", "addmm", "argmax", "bmm", "clone", "copy_", "cos", "div.Tensor", "embedding", "empty",
    "empty.memory_format", "empty_strided", "equal", "exp", "fill_.Scalar", "gelu", "index.Tensor", "index_copy_",
    "index_put_", "linear", "matmul", "mean.dim", "mm", "mul.Tensor", "mul_.Tensor", "mv", "pow.Tensor_Scalar",
    "rms_norm", "rsqrt", "scaled_dot_product_attention", "silu", "sin", "_softmax", "softmax.int", "_to_copy",
    "topk", "zero_", "zeros",
)  # fmt: skip
OWNERS = (torch, torch.nn.functional, torch.Tensor, torch.linalg, torch.special, time, builtins, os, math, random, gc,
          threading)  # fmt: skip
# Modules that may add variables when they are imported.
COMPILERS = (b"TORCH", b"_TORCH", b"PYTORCH", b"TRITON", b"KMP_", b"CUDA_", b"NVIDIA_")
NO_VALUE = object()


class State:
    """The initial state: functions by owner and name, and the variables of the environment."""

    def __init__(self) -> None:
        with suppress(ImportError):  # tvm_ffi installs a crash handler; compiled kernels need the module
            import_module("tvm_ffi")
        if faulthandler.is_enabled():  # keep the handler that prints the Python frame
            faulthandler.disable()
            faulthandler.enable()
        self.recursion_limit = sys.getrecursionlimit()
        self.functions = {_name(owner): _functions(owner) for owner in OWNERS}
        self.kernels = _kernels()
        self.variables = set(_environment())

    def now(self) -> dict[str, str]:
        """Return all of the state, as comparable text."""
        limit = min(sys.getrecursionlimit(), self.recursion_limit)  # torch.compile raises it
        found = _settings() | _modes() | _randomness() | _process() | _interpreter() | self._replaced()
        return found | {"recursion limit": str(limit)}

    def _replaced(self) -> dict[str, str]:
        """Return the replaced functions and kernels ("" for none) and the environment. New functions are allowed."""
        replaced = [
            f"{owner_name}.{name}"
            for owner_name, owner in zip(self.functions, OWNERS, strict=True)
            for name, was in self.functions[owner_name].items()
            if (now := _functions(owner, only=name).get(name, NO_VALUE)) is not was and not _by_torch(now)
        ]
        registered = [f"aten::{name}" for name, was in self.kernels.items() if _kernels(name)[name] != was]
        return {"functions": ", ".join(replaced[:20]), "kernels": ", ".join(registered), "environment": self._changed()}

    def _changed(self) -> str:
        """Return the environment as C code sees it, without the variables that compilers add when they are imported."""
        now = _environment()
        kept = {n: v for n, v in now.items() if n in self.variables or not n.startswith(COMPILERS)}
        return f"{len(kept)} variables, {_digest(repr(sorted(kept.items())))}"


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def _settings() -> dict[str, str]:
    precisions = [_get("_get_fp32_precision_getter", "mkldnn", op) for op in MATMUL]
    precisions += [_get("_get_fp32_precision_getter", "cuda", op) for op in MATMUL]
    found = {name.removeprefix("_get_").removeprefix("_"): _get(name) for name in SWITCHES}
    return {
        "torch threads": str(torch.get_num_threads()),
        "torch interop threads": str(torch.get_num_interop_threads()),
        "float32 matmul precision": str(matmul_precision()),
        "fp32 precision by library": str(precisions),
        "opt_einsum": f"{torch.backends.opt_einsum.enabled} {torch.backends.opt_einsum.strategy}",
        **found,
    }


def _get(name: str, *arguments: Any) -> str:
    """Return a getter's value; "" if this PyTorch lacks the getter or rejects these arguments."""
    try:
        return str(getattr(torch._C, name)(*arguments))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return ""


def _modes() -> dict[str, str]:
    """Return the modes of the thread that calls candidates."""
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "grad mode": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "autocast": str([(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in devices.KINDS]),
        "autocast cache": str(torch.is_autocast_cache_enabled()),
        "rounding mode": str(ctypes.CDLL(None).fegetround()),
        "subnormals": _subnormals(),
    }


def _subnormals() -> str:
    """Return "kept" if this thread computes with subnormal numbers (FTZ and DAZ are off), else "flushed"."""
    tiny = 2.0**-1060
    return "kept" if tiny * 0.5 > 0.0 and tiny * 2.0**40 > 0.0 else "flushed"


def _randomness() -> dict[str, str]:
    numpy = sys.modules.get("numpy")
    return {
        "torch random state": _digest(torch.get_rng_state().numpy().tobytes()),
        "python random state": _digest(repr(random.getstate())),
        "numpy random state": _digest(repr(numpy.random.get_state(legacy=False))) if numpy else "",
    }


# --- the process ------------------------------------------------------------------------------------------------------


def _process() -> dict[str, str]:
    limits = {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")}
    return {
        "working folder": str(Path.cwd()),
        "umask": _status("Umask"),
        "niceness": str(os.getpriority(os.PRIO_PROCESS, 0)),
        "scheduling": f"{os.sched_getscheduler(0)} {os.sched_getparam(0).sched_priority}",
        "affinity": str(sorted(os.sched_getaffinity(0))),
        "limits": str(sorted(limits.items())),
        "signal handlers": _digest(repr(list(_handlers()))),
        "signal mask": str(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "timers": str([signal.getitimer(which)[1] for which in (signal.ITIMER_REAL, signal.ITIMER_PROF)]),
        "standard files": str([_file(fd) for fd in (0, 1, 2)]),
    }


def _status(name: str) -> str:
    return Path("/proc/self/status").read_text().partition(f"\n{name}:")[2].partition("\n")[0].strip()


def _handlers() -> Iterator[tuple[int, int, int]]:
    """Yield (signal, address of its handler, flags) from the C library: Python's list lacks handlers of C code."""
    libc = ctypes.CDLL(None)
    for number in signal.valid_signals():
        action = ctypes.create_string_buffer(256)
        if libc.sigaction(int(number), None, action) == 0:
            handler, flags = int.from_bytes(action.raw[:8], "little"), int.from_bytes(action.raw[136:140], "little")
            yield int(number), handler, flags


def _file(fd: int) -> str:
    try:
        return f"{Path(f'/proc/self/fd/{fd}').readlink()} {'blocking' if os.get_blocking(fd) else 'non-blocking'}"
    except OSError:
        return "closed"


def _environment() -> dict[bytes, bytes]:
    """Return the variables in the C library's table: os.environ does not show variables that C code sets."""
    table = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found, at = {}, 0
    while table and table[at] is not None:
        name, _, value = (table[at] or b"").partition(b"=")
        found[name], at = value, at + 1
    return found


# --- Python -----------------------------------------------------------------------------------------------------------


def _interpreter() -> dict[str, str]:
    return {
        "gc": f"{gc.isenabled()} {gc.get_threshold()} {gc.get_debug()}",
        "switch interval": str(sys.getswitchinterval()),
        "trace": f"{sys.gettrace()} {sys.getprofile()}",
        "locale": locale.setlocale(locale.LC_ALL),
        "standard streams": str([id(stream) for stream in (sys.stdin, sys.stdout, sys.stderr)]),
    }


def _functions(owner: Any, only: str = "") -> dict[str, Any]:
    """Return the callables of a module, or of a class and its bases, by name."""
    owners = [owner] if isinstance(owner, ModuleType) else reversed(owner.__mro__[:-1])
    found: dict[str, Any] = {}
    for one in owners:
        members: Mapping[str, Any] = vars(one)
        found |= {only: members[only]} if only in members else {} if only else members
    return {
        name: value for name, value in found.items() if callable(value) or isinstance(value, (classmethod, property))
    }


def _by_torch(value: Any) -> bool:
    """Return True for PyTorch's own functions: importing torch.compile's modules wraps some."""
    code = getattr(value, "__code__", None)
    return code is not None and str(code.co_filename).startswith(f"{Path(torch.__file__).parent}/")


def _kernels(only: str = "") -> dict[str, str]:
    """Return the implementations of PyTorch's operators, from its dispatcher."""
    dump: Callable[[str], str] = torch._C._dispatch_dump
    return {name: _digest(dump(f"aten::{name}")) for name in ([only] if only else ATEN)}


def _name(owner: Any) -> str:
    return str(owner.__name__) if isinstance(owner, ModuleType) else f"torch.{owner.__name__}"


def _digest(value: str | bytes) -> str:
    return hashlib.sha256(value.encode() if isinstance(value, str) else value).hexdigest()[:16]
