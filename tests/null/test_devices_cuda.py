"""Test a GPU's fingerprint from given readings; taking the readings needs a GPU (tests/gpu)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel import fingerprint, settings
from autosel.certify import suite
from autosel.certify.audit import audit
from autosel.cli.certificate import suite_text, summary
from autosel.cli.fingerprint import show
from autosel.cli.main import run
from autosel.cli.output import note_lines
from autosel.cli.tune import show_remarks
from autosel.devices.cuda import identity as gpu
from autosel.devices.cuda import nvml
from autosel.devices.cuda import rates as gpu_rates
from autosel.devices.cuda.rates import SweepPoint
from autosel.errors import UnknownName, UsageError
from autosel.fingerprint import known
from autosel.fingerprint.describe import remarks
from autosel.tuning.job import Report
from autosel.values import Fingerprint
from tests.null.certificates import certificate, decode_run

H200 = nvml.Readings(
    name="NVIDIA H200",
    cc=(9, 0),
    limits={
        "sm_count": 132,
        "l2_bytes": 62914560,
        "regs_per_sm": 65536,
        "smem_per_sm_bytes": 233472,
        "smem_per_cta_bytes": 232448,
        "threads_per_sm": 2048,
        "ctas_per_sm": 32,
    },
    memory_bytes=150_754_820_096,
    memory_bus_bits=6144,
    sm_clock_max_hz=1.98e9,
    memory_clock_max_hz=3.201e9,
    ecc=True,
    mig_profile=None,
    power_limit_w=700.0,
    driver="580.65.06",
    uuid="GPU-00000000-0000-0000-0000-000000000000",
)


# --- identity --------------------------------------------------------------------------------------------------------


def test_identity_has_every_limit_the_formulas_read() -> None:
    assert set(known.load("h200").identity) - set(nvml.identity_of(H200)) <= {"power_limit_w"}


def test_a_driver_that_reserves_a_little_more_memory_is_the_same_device() -> None:
    step = nvml.MEMORY_STEP_BYTES
    more, less = (replace(H200, memory_bytes=140 * 1024 * step // 256 + rest) for rest in (step - 1, 1))
    assert nvml.identity_of(more) == nvml.identity_of(less)


@pytest.mark.parametrize("change", [{"driver": "999"}, {"uuid": "GPU-1"}, {"power_limit_w": 350.0}])
def test_driver_slot_and_power_limit_are_not_part_of_the_identity(change: dict[str, object]) -> None:
    assert nvml.identity_of(replace(H200, **change)) == nvml.identity_of(H200)


@pytest.mark.parametrize("change", [{"mig_profile": "1g.18gb"}, {"ecc": False}, {"memory_bus_bits": 5120}])
def test_a_slice_or_another_memory_is_another_device(change: dict[str, object]) -> None:
    assert nvml.identity_of(replace(H200, **change)) != nvml.identity_of(H200)


def test_peak_bandwidth_is_two_transfers_a_clock() -> None:
    assert nvml.peak_read_bytes_per_s(H200) == pytest.approx(4.917e12, rel=1e-3)
    assert nvml.peak_read_bytes_per_s(replace(H200, mig_profile="1g.18gb")) == 0.0


def test_uuids_compare_without_prefix_and_dashes() -> None:
    assert nvml.plain_uuid("MIG-5A2B0000-0000-0000-0000-00000000000f") == "5a2b000000000000000000000000000f"


def test_only_slowdowns_that_spoil_a_measurement_are_named() -> None:
    assert nvml.reasons_of(0x4) == ""  # software power cap: a device's normal state under load
    assert nvml.reasons_of(0x8 | 0x20) == "hardware slowdown (0x8), thermal slowdown (0x20)"
    assert nvml.reasons_of(0x4 | 0x40 | 0x80) == "hardware thermal slowdown (0x40), hardware power brake (0x80)"


# --- conditions of rates ---------------------------------------------------------------------------------------------


def test_another_power_limit_or_share_of_sms_voids_rates_and_not_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    full, capped = H200, replace(H200, power_limit_w=500.0)
    assert gpu.changed(gpu.validity(full), gpu.validity(capped)) == "power_limit_w was 700 and is 500"
    assert gpu.changed(gpu.validity(full), gpu.validity(replace(H200, power_limit_w=670.0))) == ""
    assert nvml.identity_of(full) == nvml.identity_of(capped)
    whole = gpu.validity(full)
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    assert gpu.changed(whole, gpu.validity(full)) == "mps_share was 1 and is 0.5"


@pytest.mark.parametrize("said", ["", "all", "0", "-5", "300", "nan"])
def test_an_unset_share_is_the_whole_device(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", said)
    assert settings.mps_share() == 1.0


def test_fingerprints_stored_without_these_conditions_still_hold() -> None:
    assert gpu.changed({}, {"power_limit_w": 700.0, "mps_share": 1.0}) == ""
    assert gpu.changed({"power_limit_w": 700.0, "mps_share": 1.0}, {"mps_share": 1.0}) == ""


# --- a missing device ------------------------------------------------------------------------------------------------


def test_a_missing_gpu_is_reported_with_the_missing_part() -> None:
    if nvml.count():
        pytest.skip("there is a GPU here")
    with pytest.raises(UsageError) as error:
        fingerprint.take("cuda")
    assert error.value.todo


@pytest.mark.parametrize("name", ["cuda:x", "cuda:-1", "cpu:1", "rocm", "cuda:0:1"])
def test_an_invalid_device_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownName):
        fingerprint.take(name)


# --- from readings to rates ------------------------------------------------------------------------------------------


@given(latency_us=st.floats(0.3, 1.3), peak_gb=st.floats(200, 8000))
def test_the_ramp_gives_the_latency_of_the_simulated_device(latency_us: float, peak_gb: float) -> None:
    """Simulate a device that follows Little's law up to its peak: the crossing is on the linear part."""
    latency, peak = latency_us * 1e-6, peak_gb * 1e9
    full = latency * peak
    ramp = [
        SweepPoint(size=full * f, value=min(full * f / latency, peak)) for f in (0.1, 0.3, 0.5, 0.69, 0.9, 1.2, 2.0)
    ]
    assert gpu_rates.loaded_latency_s(ramp, peak) == pytest.approx(latency, rel=1e-6)


def test_a_ramp_that_never_crosses_is_refused_with_what_it_reached() -> None:
    with pytest.raises(ValueError, match="from 10% to 50%"):
        gpu_rates.loaded_latency_s([SweepPoint(size=1, value=10), SweepPoint(size=2, value=50)], 100)


def test_a_ramp_that_never_crosses_still_gives_the_latency_of_its_nearest_point() -> None:
    """Use a lower point if one load per thread does not reach 70 %: the law also holds at 65 %."""
    ramp = [SweepPoint(size=4.4e6 * f, value=5.2e12 * f) for f in (0.25, 0.5, 1.0)]
    assert gpu_rates.latency_beside_s(ramp, 8e12) == pytest.approx(4.4e6 / 5.2e12)


def test_effective_l2_is_the_largest_set_on_the_plateau() -> None:
    sweep = [SweepPoint(size=s, value=v) for s, v in ((8, 97), (16, 100), (32, 95), (40, 91), (48, 70), (64, 40))]
    assert gpu_rates.effective_l2_bytes(sweep) == 40
    assert gpu_rates.l2_bytes_per_s(sweep) == 96


def test_the_cost_per_item_cancels_the_common_cost_of_both_runs() -> None:
    assert gpu_rates.per_item_s((50, 7.0 + 50 * 0.25), (500, 7.0 + 500 * 0.25)) == pytest.approx(0.25)


def test_the_floor_of_a_small_read_is_its_time_without_its_bytes() -> None:
    reads = [SweepPoint(size=size, value=2.7e-6 + size / 1.58e12) for size in (64e3, 256e3, 1e6, 3e6)]
    assert gpu_rates.floor_s(reads) == pytest.approx(2.7e-6)


def test_fewest_sms_that_saturate() -> None:
    sweep = [SweepPoint(size=n, value=min(n, 58)) for n in (16, 33, 50, 66, 132)]
    assert gpu_rates.sms_to_saturate(sweep) == 66


# --- plausibility ----------------------------------------------------------------------------------------------------

GOOD = {
    "read_bytes_per_s": 4.3e12,
    "copy_bytes_per_s": 4.2e12,
    "l2_bytes_per_s": 9.7e12,
    "dram_latency_s": 0.78e-6,
    "graph_node_s": 1.27e-6,
    "stream_launch_s": 2.5e-6,
    "sm_clock_hz": 1.755e9,
    "bf16_matrix_flops": 0.78e15,
    "exp_per_clock_sm": 15.7,
    "fma_flop_per_clock_sm": 250.0,
    "shared_bytes_per_clock_sm": 122.0,
    "matrix_clock_hz": 1.6e9,
    "mma_bf16_flops": 0.55e15,
    "fp8_matrix_flops": 1.4e15,
    "sm_bytes_per_s": 1.1e11,
    "read_floor_s": 2.2e-6,
    "l1_latency_s": 2e-8,
    "l2_latency_s": 1.4e-7,
    "l2_far_latency_s": 2e-7,
    "idle_dram_latency_s": 4e-7,
}


def test_blackwell_ultra_has_twice_the_special_function_units() -> None:
    assert nvml.identity_of(replace(H200, cc=(10, 3)))["sfu_per_clock_sm"] == 32
    assert nvml.identity_of(replace(H200, cc=(10, 0)))["sfu_per_clock_sm"] == 16


def complaints(**changes: float) -> list[str]:
    return gpu_rates.complaints({**GOOD, **changes}, nvml.identity_of(H200), nvml.peak_read_bytes_per_s(H200))


def test_plausible_rates_raise_no_complaint() -> None:
    """Also for an L2 not much faster than memory: HBM3e reads at half the rate of a last-level cache of its time."""
    assert complaints() == complaints(l2_bytes_per_s=5.5e12) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("read_bytes_per_s", 5.5e12),  # faster than the bus: something was not read
        ("read_bytes_per_s", 2.0e12),
        ("l2_bytes_per_s", 4.5e12),  # hardly above what memory gives
        ("dram_latency_s", 5e-8),
        ("bf16_matrix_flops", 2e15),
        ("exp_per_clock_sm", 4.0),
        ("fma_flop_per_clock_sm", 128.0),
        ("shared_bytes_per_clock_sm", 64.0),
        ("copy_bytes_per_s", 3.6e12),
        ("bf16_matrix_flops", 0.5e15),
        ("mma_bf16_flops", 0.2e15),
        ("fp8_matrix_flops", 0.5e15),
        ("sm_bytes_per_s", 2e10),
        ("read_floor_s", 1e-5),
        ("graph_node_s", 2e-5),
        ("l2_latency_s", 1e-8),  # below L1's
    ],
)
def test_an_implausible_rate_is_named(name: str, value: float) -> None:
    assert any(name in complaint for complaint in complaints(**{name: value}))


SLOWED = gpu.SLOWED.format("thermal slowdown (0x20)")


def slowed() -> Fingerprint:
    return replace(known.load("h200"), contended=True, notes=(SLOWED,))


def by_report(_: pytest.MonkeyPatch) -> None:
    show_remarks(Report(fingerprint=slowed(), decisions=(), measured=1, rejected=(), undecided=(), seconds=1.0))


def by_fingerprint(_: pytest.MonkeyPatch) -> None:
    show(slowed())


def by_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosel.cli.knobs.find", lambda device: slowed())
    assert run(["knobs", "--fingerprint", "cuda", "--op", "attn", "--model", "llama-1b"]) == 0


def by_run(_: pytest.MonkeyPatch) -> None:
    made = certificate(decode_run(fingerprint=slowed()))
    click.echo(summary(made, audit(made)))


def by_suite(_: pytest.MonkeyPatch) -> None:
    made = suite.Suite(
        level="quick", device="d", hw_id="", env_id="", git_sha="", timestamp="", rows=(), notes=remarks(slowed())
    )
    assert suite.from_document(json.loads(json.dumps(suite.document(made)))) == made
    click.echo(suite_text(made))


@pytest.mark.parametrize("told", [by_report, by_fingerprint, by_knobs, by_run, by_suite])
def test_a_figure_from_a_slowed_device_is_shown_with_a_note(
    told: Callable[[pytest.MonkeyPatch], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch)
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "note:" in line]
    assert len(lines) == 1
    start = said.index(lines[0])
    assert said[start:].startswith(note_lines([SLOWED])[0] + "\n")
    assert all(len(line) <= 80 for line in said.splitlines())
