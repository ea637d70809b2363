"""Test the planted kernels that need a GPU: work left on a side stream, lines pinned in the L2, a missing barrier.

Each check also runs on an honest twin, so that a check that refuses everything fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from autosel.devices.cuda.capture import UncapturableError, captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
Kernel = Callable[[Tensor, Tensor], Tensor]  # (x, out) -> out
SPIN_CYCLES = 10_000_000  # 5 ms and more on any of these devices
N = 1 << 20


@pytest.fixture(scope="module")
def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def honest(x: Tensor, out: Tensor) -> Tensor:
    return torch.mul(x, 2.0, out=out)


def on_a_side_stream(side: torch.cuda.Stream) -> Kernel:
    """Work on another stream without waiting for it, which a timer on the caller's stream does not measure."""

    def kernel(x: Tensor, out: Tensor) -> Tensor:
        with torch.cuda.stream(side):
            torch.mul(x, 2.0, out=out)
        return out

    return kernel


# --- 26: a side stream ------------------------------------------------------------------------------


def right_after_a_delay(kernel: Kernel) -> bool:
    """Return True if the result is right after, on one stream and without synchronisation: a spin, copying the true
    inputs over poison, the kernel, a copy of its result. Work on another stream reads the poison, or is too late for
    the copy."""
    real = torch.randn(N, device="cuda")
    x, out, copy = (torch.full_like(real, float("nan")) for _ in range(3))
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    x.copy_(real)
    kernel(x, out)
    copy.copy_(out)
    torch.cuda.synchronize()
    return torch.equal(copy, real * 2.0)


def test_work_left_on_a_side_stream_is_found_by_a_delayed_input(side: torch.cuda.Stream) -> None:
    assert right_after_a_delay(honest)
    assert not right_after_a_delay(on_a_side_stream(side))


def right_when_replayed(kernel: Kernel) -> bool:
    """Capture once; then write other inputs in place, poison outputs, and replay. Raises UncapturableError."""
    x, out = torch.randn(N, device="cuda"), torch.empty(N, device="cuda")

    def enqueue(count: int) -> None:
        for _ in range(count):
            kernel(x, out)

    graph = captured(enqueue, 1, x.device)
    torch.cuda.synchronize()
    x.copy_(torch.randn(N, device="cuda"))
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return torch.equal(out, x * 2.0)


def test_work_left_on_a_side_stream_is_missing_from_the_graph(side: torch.cuda.Stream) -> None:
    assert right_when_replayed(honest)
    with contextlib.suppress(
        UncapturableError
    ):  # a stream that does not join the capture may end it, which also refuses it
        assert not right_when_replayed(on_a_side_stream(side))
    assert right_when_replayed(honest)


def test_a_call_that_waits_cannot_be_captured_and_the_next_one_can() -> None:
    def waits(x: Tensor, out: Tensor) -> Tensor:
        return torch.mul(x, 2.0 + float(x[0].item() > 1e9), out=out)

    with pytest.raises(UncapturableError):
        right_when_replayed(waits)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert right_when_replayed(honest)
    torch.cuda.empty_cache()  # which PyTorch refuses while it assumes an active capture


# --- 32: lines pinned in the L2 ------------------------------------------------------------------------------

PERSISTING_L2_SIZE = 0x06  # cudaLimitPersistingL2CacheSize, driver_types.h


@pytest.fixture(scope="module")
def runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded."""
    maps = Path("/proc/self/maps").read_text().split()
    found = next((word for word in maps if "libcudart" in word), None)
    if found is None:
        pytest.skip("torch has not loaded a separate libcudart")
    return ctypes.CDLL(found)


def checked(code: int) -> None:
    assert code == 0, f"CUDA error {code}"


def carve_out(runtime: ctypes.CDLL) -> int:
    size = ctypes.c_size_t()
    checked(runtime.cudaDeviceGetLimit(ctypes.byref(size), PERSISTING_L2_SIZE))
    return size.value


def test_lines_pinned_in_the_l2_do_not_survive_the_reset(runtime: ctypes.CDLL) -> None:
    """Check that the reset before each sample releases persisting lines and removes the L2 carve-out."""
    torch.zeros(1, device="cuda")
    wanted = ctypes.c_size_t(torch.cuda.get_device_properties(0).L2_cache_size // 2)
    if runtime.cudaDeviceSetLimit(PERSISTING_L2_SIZE, wanted) or carve_out(runtime) == 0:
        pytest.skip("this device has no persisting L2")
    checked(runtime.cudaCtxResetPersistingL2Cache())
    checked(runtime.cudaDeviceSetLimit(PERSISTING_L2_SIZE, ctypes.c_size_t(0)))
    assert carve_out(runtime) == 0


# --- 18: a missing barrier ------------------------------------------------------------------------------

BLOCK_SUM = r"""
#include <cstdio>
__global__ void sum(const float* x, float* y) {
  __shared__ float part[256];
  part[threadIdx.x] = x[threadIdx.x];
  BARRIER
  float total = 0;
  for (int i = 0; i < 256; ++i) total += part[i];
  y[threadIdx.x] = total;
}
int main() {
  float *x, *y;
  cudaMalloc(&x, 1024);
  cudaMalloc(&y, 1024);
  cudaMemset(x, 0, 1024);
  sum<<<1, 256>>>(x, y);
  return cudaDeviceSynchronize() != cudaSuccess;
}
"""


def test_a_missing_barrier_is_found_by_racecheck(tmp_path: Path) -> None:
    nvcc, sanitizer = shutil.which("nvcc"), shutil.which("compute-sanitizer")
    if nvcc is None or sanitizer is None:
        pytest.skip("needs nvcc and compute-sanitizer on PATH")
    hazards = {}
    for barrier in ("__syncthreads();", ""):
        source, program = tmp_path / "sum.cu", tmp_path / "sum"
        source.write_text(BLOCK_SUM.replace("BARRIER", barrier))
        subprocess.run([nvcc, "-o", str(program), str(source)], check=True)
        command = [sanitizer, "--tool", "racecheck", "--error-exitcode", "9", str(program)]
        hazards[barrier] = subprocess.run(command, capture_output=True, check=False).returncode
    assert hazards == {"__syncthreads();": 0, "": 9}
