"""Test a GPU's fingerprint here: the probes run on emulated threads, with stand-ins for the interfaces of cupy, NVML
and the driver.

The stand-ins replace the libraries at their interfaces: nvidia-ml-py and ctypes make their real calls. Times have no
meaning.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

from autosel import devices, fingerprint
from autosel.devices import store
from autosel.devices.cuda import arithmetic as gpu_arithmetic
from autosel.devices.cuda import bench as gpu_bench
from autosel.devices.cuda import cost as gpu_cost
from autosel.devices.cuda import identity as gpu
from autosel.devices.cuda import libcuda, nvml
from autosel.devices.cuda import probe as gpu_probe
from autosel.devices.cuda import rates as gpu_rates
from autosel.devices.cuda.bench import ProbeBench
from autosel.devices.device import Drift
from autosel.errors import UsageError
from autosel.native.compile import find_compiler
from autosel.values import Fingerprint
from tests.compile import cupy_stand_in
from tests.compile.cupy_stand_in import HostEvent
from tests.compile.emulate import HERE, library
from tests.compile.machine_code import functions

SLICE_2 = bytes.fromhex("0102020405060708090a0b0c0d0e0f10")  # of nvml_stand_in.c
RATES = {
    "read_bytes_per_s", "copy_bytes_per_s", "saturating_sms", "l2_bytes_per_s", "l2_effective_bytes", "sm_clock_hz",
    "dram_latency_s", "l1_latency_s", "idle_dram_latency_s", "stream_launch_s", "graph_node_s", "flag_barrier_s",
    "pdl_node_s", "persistent_saving_s", "host_launch_s", "exp_per_s", "fma_flops", "sm_bytes_per_s", "grid_sync_s",
    "read_floor_s", "host_answer_s", "from_device_bytes_per_s", "to_device_bytes_per_s", "from_fp8_per_s",
    "exp_per_clock_sm", "fma_flop_per_clock_sm", "shared_bytes_per_s", "shared_bytes_per_clock_sm",
    "from_fp8_per_clock_sm", "mma_bf16_flops", "matrix_clock_hz",
}  # fmt: skip


@pytest.fixture(scope="module")
def probes() -> Path:
    return library(str(HERE / "probes_host"))


@pytest.fixture(scope="module")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared("nvml_stand_in.c", tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1")


@pytest.fixture(scope="module")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared("libcuda_stand_in.c", tmp_path_factory.mktemp("driver") / "libcuda.so.1")


def shared(source: str, made: Path) -> Path:
    compiler = find_compiler()
    assert compiler is not None
    command = [compiler.path, "-x", "c", "-shared", "-fPIC", str(HERE / source), "-o", str(made)]
    subprocess.run(command, check=True, timeout=60)
    return made


Played = Callable[..., None]
PLAIN_CDLL = ctypes.CDLL  # before a test changes it


@pytest.fixture
def played(probes: Path, nvml_library: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """Simulate a device on this machine: `slices`, `shared`, `init` of nvml_stand_in.c; `uuid` as CUDA reports it."""
    import pynvml

    def play(*, slices: int = 0, shared: int = 0, init: int = 0, **given: Any) -> None:
        for name, module in cupy_stand_in.modules(probes, **given).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(pynvml, "nvmlLib", PLAIN_CDLL(str(nvml_library)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr(gpu_bench.ctypes, "CDLL", lambda name: PLAIN_CDLL(str(probes)))
        # A launch here has ended when it returns, so a wait for the gate never succeeds.
        less = {"WINDOWS": 2, "WINDOW_S": 1e-4, "WARM_UP_S": 1e-3, "BLOCK_BYTES": 1 << 18, "GATE_TICKS": 10_000}
        less |= {"SWEEP_WINDOWS": 2, "SWEEP_WINDOW_S": 1e-4, "CHUNKED_BYTES": 1 << 22}
        for name, value in less.items():
            monkeypatch.setattr(gpu_bench, name, value)
        monkeypatch.setattr(gpu_probe, "LOOK_WINDOW_S", 1e-4)
        monkeypatch.setattr(gpu_arithmetic, "STEPS", 64)
        monkeypatch.setattr(gpu_arithmetic, "PRODUCT_STEPS", 64)
        monkeypatch.setattr(cupy_stand_in, "FREE_BYTES", 4 << 20)
        set_for_libraries(SLICES=slices, SHARED=shared, INIT=init)
        for name in ("COOLING_LEAST_S", "COOLING_MOST_S", "COOLING_STEP_S"):
            monkeypatch.setattr(gpu, name, 0.0)

    yield play
    set_for_libraries(SLICES=0, SHARED=0, INIT=0)
    slow(0)


def set_for_libraries(**variables: int) -> None:
    """Set variables for C libraries, which read the environment of the process."""
    for name, value in variables.items():
        PLAIN_CDLL(None).setenv(name.encode(), str(value).encode(), 1)


def slow(looks: int) -> None:
    """Let the simulated board report this many times that heat slows it."""
    import pynvml

    ctypes.c_int.in_dll(pynvml.nvmlLib, "slow_looks").value = looks


def test_rates_of_a_gpu_are_measured_stored_and_outlive_a_refresh_on_a_slowed_device(
    played: Played, probes: Path
) -> None:
    played()
    taken = fingerprint.take("cuda")
    assert set(taken.rates) >= RATES
    assert set(taken.rates) <= set(gpu_rates.MEASURED)
    assert all(rate.value > 0 for rate in taken.rates.values())
    assert taken.identity["cc"] == "9.0" and taken.identity["sm_count"] == 2
    assert taken.identity["ecc"] is True and taken.identity["mig_profile"] is None
    assert taken.environment["driver"] == "580.65.06"
    assert not any("slowed" in note for note in taken.notes)
    assert any("matrix rates" in note for note in taken.notes)  # the installed torch has no CUDA
    again = fingerprint.take("cuda")
    assert again.rates == taken.rates
    assert store.read(taken.env_id) is not None
    assert ctypes.c_int.in_dll(ctypes.CDLL(str(probes)), "dependent_launches").value > 0
    slow(1_000_000)
    slowed = fingerprint.take("cuda", refresh=True)
    assert slowed.contended and set(slowed.rates) >= RATES
    assert any("thermal slowdown (0x20)" in note and "not stored" in note for note in slowed.notes)
    slow(0)
    assert fingerprint.take("cuda").rates == taken.rates


def test_rates_of_a_slowed_device_are_measured_again(played: Played) -> None:
    """Slow the device only at the end of an early stage, because the check follows each stage."""
    played()
    slow(3)
    taken = fingerprint.take("cuda")
    assert not any("slowed" in note for note in taken.notes)
    kept = store.read(taken.env_id)
    assert kept is not None and kept.rates == taken.rates


def test_a_device_with_full_memory_is_reported(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    played()
    monkeypatch.setattr(cupy_stand_in, "FREE_BYTES", 3 << 18)
    with pytest.raises(UsageError, match="out of memory"):
        gpu_probe.reader(0)


def test_a_reader_can_be_used_repeatedly(played: Played) -> None:
    played()
    rate = gpu_probe.reader(0)
    assert rate() > 0 and rate() > 0


@pytest.fixture
def bench(played: Played) -> ProbeBench:
    played()
    return ProbeBench(cupy=sys.modules["cupy"], identity=nvml.identity_of(nvml.read(0)))


@pytest.fixture
def multiplying(bench: ProbeBench, monkeypatch: pytest.MonkeyPatch) -> ProbeBench:
    """Let PyTorch multiply on this CPU; a clock provides the times of its events."""
    assert str(gpu_arithmetic.torch_device(bench.cupy)) == "cuda:0"
    stand_ins = {"is_available": lambda: True, "device": lambda device: contextlib.nullcontext(), "Event": HostEvent}
    for name, value in {**stand_ins, "empty_cache": lambda: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(gpu_arithmetic, "torch_device", lambda cupy: torch.device("cpu"))
    monkeypatch.setattr(gpu_arithmetic, "MATRIX_SIDE", 64)
    return bench


def test_matrix_rates_are_measured_on_the_right_device(multiplying: ProbeBench) -> None:
    gpu_arithmetic.matrix(multiplying)
    assert set(multiplying.rates) == {"bf16_matrix_flops", "fp8_matrix_flops"}
    assert all(rate.value > 0 for rate in multiplying.rates.values())


def test_with_a_library_without_fp8_products_only_that_rate_is_missing(
    multiplying: ProbeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("no such product for this device")

    monkeypatch.setattr(torch, "_scaled_mm", refuses)
    gpu_arithmetic.matrix(multiplying)
    assert set(multiplying.rates) == {"bf16_matrix_flops"}
    assert any("no such product" in note for note in multiplying.notes)


def test_a_slice_of_a_board_is_found_by_its_uuid(played: Played) -> None:
    played(slices=3, uuid=SLICE_2)
    assert nvml.read(0).mig_profile == "1g.18gb"
    assert nvml.read(0).memory_bytes == 18 << 30


@pytest.mark.parametrize(
    ("slices", "uuid", "named"),
    [
        (1, bytes.fromhex("01020004050607080900000000000000"), "MIG-01020004"),
        (3, SLICE_2 + b"\x07\x08", "MIG-01020204"),  # the bytes after it in CUDA's structure
    ],
    ids=["shorter", "longer"],
)
def test_a_uuid_of_another_length_still_names_its_slice(played: Played, slices: int, uuid: bytes, named: str) -> None:
    """Check this, because Cython makes a C string of CUDA's sixteen bytes, which ends at a zero."""
    played(slices=slices, uuid=uuid)
    assert nvml.read(0).uuid.startswith(named)


def test_an_ambiguous_slice_is_refused(played: Played) -> None:
    played(slices=3, uuid=b"\x99" * 16)
    with pytest.raises(UsageError) as error:
        nvml.read(0)
    assert "3 slices, 0 with CUDA's UUID" in error.value.why


def test_a_slice_of_a_slowed_board_is_slowed(played: Played) -> None:
    played(slices=3, uuid=SLICE_2)
    slow(2)
    assert nvml.slowdown(nvml.read(0).uuid) == "thermal slowdown (0x20)"
    assert nvml.slowdown("GPU-0") == "thermal slowdown (0x20)"
    assert nvml.slowdown("GPU-0") == ""


def test_a_board_counts_its_energy_and_a_slice_does_not(played: Played) -> None:
    played()
    read = nvml.energy_counter(nvml.read(0).uuid)
    counted = [read() for _ in range(20)]
    assert (
        sorted(counted) == counted and set(range(1000, counted[-1] + 1, 300)) >= set(counted) and len(set(counted)) > 1
    )
    assert devices.named("cuda").meter().why == ""
    played(slices=3, uuid=SLICE_2)
    assert "a slice of a GPU has no energy counter" in devices.named("cuda").meter().why


def test_a_chip_that_shares_its_hosts_memory_is_described_by_cuda(played: Played) -> None:
    played(shared=1)
    found, free = nvml.read(0), nvml.free_bytes(0)
    assert found.memory_bytes == 128 << 30 and found.ecc is None and free is None
    assert nvml.peak_read_bytes_per_s(found) == 0.0  # not reported


def test_free_memory_is_read_from_the_device_or_its_slice(played: Played) -> None:
    played()
    assert nvml.free_bytes(0) == 140 << 30
    played(slices=3, uuid=SLICE_2)
    assert nvml.free_bytes(0) == 18 << 30


def test_a_device_that_cuda_does_not_show_is_refused(played: Played) -> None:
    played(devices=2)
    with pytest.raises(UsageError) as error:
        nvml.read(2)
    assert "CUDA sees 2 devices" in error.value.why


@pytest.mark.parametrize("cupy", ["none", "broken"])
def test_without_cupy_the_driver_identifies_a_device(
    cupy: str, played: Played, driver_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with cupy's readings, so that decisions made with cupy serve without it."""
    played()
    told = nvml.read(0)
    library = PLAIN_CDLL(str(driver_library))
    monkeypatch.setattr(libcuda.ctypes, "CDLL", lambda name: library)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None if cupy == "none" else Broken("cupy.cuda"))
    assert nvml.read(0) == told
    with pytest.raises(UsageError, match="no such device: cuda:2") as error:
        nvml.read(2)
    assert "CUDA sees 2 devices" in error.value.why
    with pytest.raises(UsageError, match="needs cupy"):
        nvml.counted()  # without cupy it cannot be measured


class Broken(ModuleType):
    """A cupy built for another CUDA."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("CuPy failed to load libnvrtc.so.12")


def test_refusals_of_the_driver_are_reported(driver_library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = PLAIN_CDLL(str(driver_library))
    monkeypatch.setattr(libcuda.ctypes, "CDLL", lambda name: library)
    with pytest.raises(libcuda.CUDARuntimeError, match="cuDeviceGet: invalid device ordinal"):
        libcuda.runtime().deviceGetPCIBusId(5)


# --- drift ------------------------------------------------------------------------------------------------------------


def looked(monkeypatch: pytest.MonkeyPatch, fp: Fingerprint, reads: list[float], nodes: list[float]) -> Drift:
    """Check drift on a device whose checks give these shares of the stored rates."""
    read, node = fp.rates["read_bytes_per_s"].value, fp.rates["graph_node_s"].value
    found = [
        gpu_probe.DriftLook(read_bytes_per_s=r * read, graph_node_s=node / n) for r, n in zip(reads, nodes, strict=True)
    ]
    monkeypatch.setattr(gpu_probe, "looks", lambda ordinal, count: found)
    return fingerprint.drifted(fp, "cuda:0")


def test_a_rate_of_a_gpu_has_moved_if_every_measurement_is_off(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    played()
    fp = fingerprint.take("cuda")
    for reads, nodes, moved in (
        ([0.9, 0.8, 0.9], [1.0, 1.0, 1.0], True),
        ([1.2, 1.1, 1.1], [1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 1.0], [0.7, 0.9, 0.9], True),
        ([0.5, 0.95, 0.5], [0.5, 1.05, 0.5], False),
    ):
        found = looked(monkeypatch, fp, reads, nodes)
        assert found.moved == moved and not found.shared
        assert found.read == pytest.approx(max(reads)) and "graph node speed" in found.reason


def test_a_drift_check_reads_memory_and_replays_a_graph(played: Played) -> None:
    played()
    found = fingerprint.drifted(fingerprint.take("cuda"), "cuda")
    assert found.read > 0 and found.start > 0 and not found.shared


def test_a_gpu_in_use_by_others_is_not_checked_for_drift(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    played()
    fp = fingerprint.take("cuda")
    monkeypatch.setattr(gpu_probe, "looks", None)  # would raise
    process = ctypes.c_uint.in_dll(pynvml.nvmlLib, "neighbour")
    try:
        process.value = os.getpid() + 1
        found = fingerprint.drifted(fp, "cuda")
        assert found.shared and not found.moved
        process.value = os.getpid()
        assert not nvml.is_shared(nvml.read(0).uuid)
    finally:
        process.value = 0


def test_heat_is_not_drift(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    played()
    fp = fingerprint.take("cuda")
    slow(1)
    found = looked(monkeypatch, fp, [0.5, 0.5, 0.5], [1.0, 1.0, 1.0])
    assert found.moved and found.shared


def test_a_slice_shares_its_memory(played: Played) -> None:
    played(slices=3, uuid=SLICE_2)
    assert nvml.is_shared(nvml.read(0).uuid)


# --- what each probe does ---------------------------------------------------------------------------------------------


def test_data_is_random_to_its_last_word(bench: ProbeBench) -> None:
    assert bench.data.nbytes == 1 << 20
    assert len(numpy.unique(numpy.array(bench.data))) > bench.data.size // 8
    assert int((bench.data == 0).sum()) < 4


@pytest.mark.parametrize("count", [1, 7, 1000, 8 * 512 + 5])
def test_a_copy_copies_every_vector_and_no_more(bench: ProbeBench, count: int) -> None:
    cp = bench.cupy
    other = cp.zeros(bench.data.size, dtype=cp.uint32)
    cp.cuda.Device().synchronize()
    bench.launch("probe_copy", 4, 32, other, bench.data, cp.uint64(count))
    assert numpy.array_equal(other[: 4 * count], bench.data[: 4 * count])
    assert not other[4 * count :].any()


def test_a_chase_follows_the_cycle(bench: ProbeBench) -> None:
    assert bench._chase(64 * 128) > 0
    at, following = 0, numpy.array(bench.data[: 64 * 32 : 32])
    for _ in range(2 * (64 + 64 * 64)):
        at = int(following[at])
    assert int(bench.word[0]) == at
    assert sorted(following) == list(range(64))


def test_a_chase_through_memory_meets_no_line_twice(bench: ProbeBench) -> None:
    """Check this, because the first walk brings lines into L2, and the second must not find them there."""
    lines = 8192
    bench._chase(lines * 128)
    at, following, met = 0, numpy.array(bench.data[: lines * 32 : 32]), set()
    for _ in range(2 * (64 + 4096)):
        met.add(at)
        at = int(following[at])
    assert int(bench.word[0]) == at and len(met) == lines


def test_all_blocks_meet_at_the_barrier_each_time(bench: ProbeBench) -> None:
    gpu_cost.barriers(bench, 7)
    assert int(bench.word[0]) == 7 * bench.sms


def test_all_blocks_meet_at_the_toolkits_barrier(bench: ProbeBench) -> None:
    """Test kernels/cuda/grid_sync.cu: a block that does not wait ends this process, because all threads must meet."""
    synced = gpu_cost._grid_sync(bench)
    assert synced is not None
    synced(5)


def test_only_the_barriers_figure_is_missing_if_it_does_not_compile(
    bench: ProbeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = bench.cupy.RawModule

    def no_header(code: str, options: tuple[str, ...], enable_cooperative_groups: bool = False) -> Any:
        if enable_cooperative_groups:
            raise RuntimeError("cannot open source file cooperative_groups.h")
        return plain(code, options)

    monkeypatch.setattr(bench.cupy, "RawModule", no_header)
    gpu_cost.measure(bench)
    assert "grid_sync_s" not in bench.rates and "flag_barrier_s" in bench.rates
    assert any("cooperative_groups.h" in note for note in bench.notes)


def test_rates_of_missing_instructions_are_not_measured(bench: ProbeBench) -> None:
    bench.identity = {**bench.identity, "cc": "7.5"}
    gpu_arithmetic.measure(bench)
    assert {"exp_per_s", "shared_bytes_per_s"} <= set(bench.rates)
    assert not {"mma_bf16_flops", "mma_fp8_flops", "from_fp8_per_s"} & set(bench.rates)
    bench.identity = {**bench.identity, "cc": "8.9"}
    gpu_arithmetic.measure(bench)
    assert {"mma_bf16_flops", "mma_fp8_flops", "from_fp8_per_s"} <= set(bench.rates)


def test_copies_to_and_from_the_host_do_not_change_the_data(bench: ProbeBench) -> None:
    before = numpy.array(bench.data)
    gpu_cost._to_the_host(bench)
    assert numpy.array_equal(bench.data, before)


def test_small_reads_are_of_pieces_that_fit_twice(bench: ProbeBench) -> None:
    sizes = [point.size for point in gpu_cost._small_reads(bench)]
    assert sizes == [size for size in gpu_cost.PIECES if 2 * size <= bench.data.nbytes] and len(sizes) > 1


def test_a_gate_holds_until_it_is_opened_or_too_long(bench: ProbeBench) -> None:
    cp, gate = bench.cupy, ctypes.c_uint32.from_address(bench.gate.ptr)
    gate.value = 0
    bench.launch("probe_gate", 1, 1, cp.uint64(bench.gate.ptr), cp.int64(10_000))
    gate.value = 1
    bench.launch("probe_gate", 1, 1, cp.uint64(bench.gate.ptr), cp.int64(1 << 60))


@pytest.mark.parametrize("name", ["probe_read", "probe_read_one"])
def test_the_sink_is_written_only_for_the_impossible_value(bench: ProbeBench, name: str) -> None:
    """Write to the sink if every vector is the word that the sink's condition compares with; random data never does."""
    cp = bench.cupy
    bench.launch(name, 2, 64, bench.data, cp.uint64(4096), bench.word)
    assert not bench.word.any()
    never = numpy.array([0x12345678, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF], dtype=numpy.uint32)
    assert (never[0] & never[1] & never[2] & never[3]) != 0xDEADBEEF  # no vector can be equal to both
    bench.launch("probe_chunks", 4, 64, bench.data, cp.uint64(300), cp.uint32(2), cp.uint32(3), bench.word)
    assert not bench.word.any()


def test_a_wrong_argument_is_noticed(bench: ProbeBench) -> None:
    """Pass four bytes for a parameter of eight."""
    with pytest.raises(RuntimeError, match="argument 1 has 4 bytes; the kernel takes 8"):
        bench.launch("probe_read", 1, 32, bench.data, bench.cupy.uint32(4), bench.word)


def test_the_rate_of_l2_is_not_measured_in_l1() -> None:
    """Check that loads bypass L1, because a block's chunk may fit L1."""
    (found,) = (f for f in functions("probes", (9, 0)) if "probe_chunks" in f.name)
    assert {op: n for op, n in found.instructions.items() if op.startswith("LDG")} == {"LDG.E.NA.LTC128B.128": 5}
