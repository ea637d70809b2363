"""Provide kernels with right results that change the process for everybody; for parity workers only.

`CHANGES` names each one with the state that it changes. `kernel_<name>` is the kernel.
"""

import ctypes
import gc
import io
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch

UPWARD = 0x800  # FE_UPWARD on x86
_KEPT = []


def norm(x, weight, eps, offset, y):
    wide = x.float()
    rstd = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return y.copy_(wide * rstd * (weight.float() + offset))


def rounds_up_in_the_openmp_pool():
    """Set the rounding mode of the pool's threads, and restore the caller's."""
    (path,) = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    libc, here = ctypes.CDLL("libm.so.6"), threading.get_native_id()

    def job(_):
        if threading.get_native_id() != here:
            libc.fesetround(UPWARD)

    _KEPT.append(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(job))
    ctypes.CDLL(path).GOMP_parallel(_KEPT[-1], None, 2, 0)


def blocks_a_signal_in_a_thread_of_its_own():
    def serve():
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        started.set()
        threading.Event().wait()

    started = threading.Event()
    threading.Thread(target=serve, daemon=True).start()
    started.wait()


def ignores_a_signal_in_c():
    ctypes.CDLL(None).signal(int(signal.SIGUSR1), ctypes.c_void_p(1))


def sets_a_variable_in_c():
    ctypes.CDLL(None).setenv(b"OMP_WAIT_POLICY", b"active", 1)


def overrides_an_operator():
    def impl(a, b):
        return torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)

    _KEPT.append(torch.library.Library("aten", "IMPL"))
    _KEPT[-1].impl("mm", impl, "CPU")


def sends_errors_to_nowhere():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def wraps(owner, name):
    def change():
        plain = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: plain(*args, **kwargs))  # noqa: PLW0108  (another object)

    return change


def lowers_a_limit():
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, hard))


CHANGES = {
    "rounds_up_in_the_openmp_pool": (rounds_up_in_the_openmp_pool, "thread"),
    "blocks_a_signal_in_a_thread_of_its_own": (blocks_a_signal_in_a_thread_of_its_own, "thread"),
    "default_dtype": (lambda: torch.set_default_dtype(torch.bfloat16), "default dtype"),
    "autocast": (lambda: torch.set_autocast_enabled("cpu", True), "autocast"),
    "autocast_dtype": (lambda: torch.set_autocast_dtype("cpu", torch.float16), "autocast"),
    "anomaly_mode": (lambda: torch.autograd.set_detect_anomaly(True, check_nan=True), "is_anomaly_enabled"),
    "function_mode": (lambda: torch.overrides.BaseTorchFunctionMode().__enter__(), "len_torch_function_stack"),
    "numpy_seed": (lambda: sys.modules["numpy"].random.seed(0), "numpy random state"),
    "python_seed": (lambda: random.seed(0), "python random state"),
    "cudnn_benchmark": (lambda: setattr(torch.backends.cudnn, "benchmark", True), "cudnn_benchmark"),
    "onednn_deterministic": (lambda: torch._C._set_mkldnn_deterministic(True), "mkldnn_deterministic"),
    "flash_sdp": (lambda: torch.backends.cuda.enable_flash_sdp(False), "flash_sdp_enabled"),
    "fill_uninitialised": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "deterministic_fill_uninitialized_memory",
    ),
    "environment": (lambda: os.environ.update(OMP_NUM_THREADS="1"), "environment"),
    "sets_a_variable_in_c": (sets_a_variable_in_c, "environment"),
    "working_folder": (lambda: os.chdir("/"), "working folder"),
    "umask": (lambda: os.umask(0o077), "umask"),
    "niceness": (lambda: os.nice(1), "niceness"),
    "affinity": (lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}), "affinity"),
    "signal_handler": (lambda: signal.signal(signal.SIGUSR2, lambda *_: None), "signal handlers"),
    "ignores_a_signal_in_c": (ignores_a_signal_in_c, "signal handlers"),
    "signal_mask": (lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP}), "signal mask"),
    "timer": (lambda: signal.setitimer(signal.ITIMER_PROF, 1e6, 1e6), "timers"),
    "gc_disabled": (gc.disable, "gc"),
    "gc_thresholds": (lambda: gc.set_threshold(100_000, 50, 50), "gc"),
    "switch_interval": (lambda: sys.setswitchinterval(1.0), "switch interval"),
    "profiler": (lambda: sys.setprofile(lambda *_: None), "trace"),
    "sends_errors_to_nowhere": (sends_errors_to_nowhere, "standard files"),
    "closes_its_input": (lambda: os.close(0), "standard files"),
    "replaces_a_stream": (lambda: setattr(sys, "stderr", io.StringIO()), "standard streams"),
    "lowers_a_limit": (lowers_a_limit, "limits"),
    "wraps_matmul": (wraps(torch, "matmul"), "functions"),
    "wraps_rms_norm": (wraps(torch.nn.functional, "rms_norm"), "functions"),
    "wraps_a_method": (wraps(torch.Tensor, "copy_"), "functions"),
    "wraps_sleep": (wraps(time, "sleep"), "functions"),
    "wraps_a_builtin": (wraps(__builtins__ if not isinstance(__builtins__, dict) else sys.modules["builtins"], "sum"),
                        "functions"),
    "overrides_an_operator": (overrides_an_operator, "kernels"),
}  # fmt: skip


def kernel_of(name):
    change, _ = CHANGES[name]

    def kernel(x, weight, eps, offset, y):
        if name not in _KEPT:
            _KEPT.append(name)
            change()
        return norm(x, weight, eps, offset, y)

    return kernel


globals().update({f"kernel_{name}": kernel_of(name) for name in CHANGES})
