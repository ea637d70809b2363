"""Run the PTX of the probes of a GPU's rates on this CPU: a whole fingerprint without meaningful times."""

from __future__ import annotations

import ctypes
import re
import subprocess
from functools import cache
from typing import Any

import numpy
import pytest
import torch

from autosel import fingerprint, resources
from autosel.devices.cuda import rates as gpu_rates
from autosel.native.cuda import find_nvcc, headers
from tests.compile import cupy_stand_in, ptx_machine
from tests.compile.cupy_stand_in import Array, Kernel
from tests.compile.test_emulated_probes import (  # noqa: F401  (fixtures)
    RATES,
    Played,
    driver_library,
    nvml_library,
    played,
    probes,
)

SOURCES = ("probes", "grid_sync")
NOT_BY_CUPY = {"probe_tiny_dependent", "probe_mma_fp8"}  # except rates by the driver, and fp8 products by a warp


@cache
def text_of(source: str) -> str:
    """Return the PTX of kernels/cuda/<source>.cu."""
    nvcc = find_nvcc()
    assert nvcc is not None
    file = resources.kernels() / "cuda" / f"{source}.cu"
    command = [nvcc.path, "-std=c++17", "-O3", "-ptx", "-arch=compute_90a", *headers(nvcc), str(file), "-o", "-"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=280).stdout


def launch(self: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared: int) -> None:
    """Replace the stand-in's launch: run PTX instead of the source on emulated threads."""
    assert self.name in self.loaded
    source = next(s for s in SOURCES if f".entry {self.name}(" in text_of(s))
    held = [numpy.uint64(a.data.ptr) if isinstance(a, Array) else a for a in args]
    values = [ctypes.create_string_buffer(v.tobytes(), v.nbytes) for v in held]
    ran.add(self.name)
    ptx_machine.launch(
        text_of(source),
        self.name,
        *values,
        grid=(grid[0], 1, 1),
        threads=block[0],
        shared_bytes=shared,
        together=source == "grid_sync",
    )


ran: set[str] = set()


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile before a test changes the home and the libraries that ctypes loads."""
    ptx_machine.bare()


def test_the_compiled_probes_measure_every_rate_of_a_gpu(
    played: Played,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cupy_stand_in.Kernel, "launch", launch)
    played()
    taken = fingerprint.take("cuda")
    assert set(taken.rates) >= RATES
    assert set(taken.rates) <= set(gpu_rates.MEASURED)
    assert all(rate.value > 0 for rate in taken.rates.values())
    there = {name for source in SOURCES for name in re.findall(r"\.entry (\w+)\(", text_of(source))}
    assert there - ran == NOT_BY_CUPY


def test_all_blocks_wait_for_each_other_at_the_barrier() -> None:
    ptx_machine.launch(
        text_of("grid_sync"), "probe_grid_sync", ctypes.c_uint32(5), grid=(4, 1, 1), threads=64, together=True
    )
    with pytest.raises(RuntimeError, match="5 blocks"):
        ptx_machine.launch(text_of("grid_sync"), "probe_grid_sync", ctypes.c_uint32(1), grid=(5, 1, 1), together=True)
    with pytest.raises(RuntimeError, match="trap"):  # a normal launch has no barrier for the grid
        ptx_machine.launch(text_of("grid_sync"), "probe_grid_sync", ctypes.c_uint32(1), grid=(4, 1, 1))


def test_products_of_fp8_are_timed_in_ticks() -> None:
    """Read ticks from the interpreted clock."""
    ticks, sink = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    ptx_machine.launch(
        text_of("probes"), "probe_mma_fp8", ctypes.c_uint32(3), ctypes.c_float(0), ticks, sink, threads=128
    )
    assert (ticks > 0).any()
