"""Test how CUDA's devices are matched with NVML's boards, which are numbered differently, and failures of NVML.

The libraries are replaced at their interfaces (nvml_stand_in.c, cupy_stand_in.py); boards have no numbers there.
"""

from __future__ import annotations

import pytest

from autosel import fingerprint
from autosel.devices.cuda import nvml
from autosel.errors import UsageError
from tests.compile.cupy_stand_in import BOARDS
from tests.compile.test_emulated_probes import (
    SLICE_2,
    Played,
    nvml_library,
    played,
    probes,
)

__all__ = ["nvml_library", "played", "probes"]  # fixtures


@pytest.mark.parametrize("order", [BOARDS, BOARDS[::-1]], ids=["by PCI address", "fastest first"])
def test_each_of_two_boards_is_identified_under_any_cuda_number(played: Played, order: tuple[str, ...]) -> None:
    played(boards=order)
    h200, l4 = order.index(BOARDS[0]), order.index(BOARDS[1])
    assert nvml.read(h200).name == "NVIDIA H200" and nvml.read(h200).uuid.startswith("GPU-0102")
    assert nvml.read(l4).name == "NVIDIA L4" and nvml.read(l4).uuid.startswith("GPU-1112")
    assert [nvml.free_bytes(n) for n in (h200, l4)] == [140 << 30, 23 << 30]
    assert nvml.identity_of(nvml.read(l4))["memory_bus_bits"] == 192


def test_the_only_visible_board_is_device_0(played: Played) -> None:
    for board, name in zip(BOARDS, ("NVIDIA H200", "NVIDIA L4"), strict=True):
        played(boards=(board,))
        assert nvml.counted() == 1 and nvml.read(0).name == name
        with pytest.raises(UsageError) as error:
            nvml.read(1)
        assert "CUDA sees 1 device" in error.value.why


def test_a_slice_of_one_board_does_not_make_the_other_one_a_slice(played: Played) -> None:
    played(slices=3, uuid=SLICE_2, boards=(BOARDS[0],))
    assert nvml.read(0).mig_profile == "1g.18gb"
    played(slices=3, boards=(BOARDS[1],))
    assert nvml.read(0).mig_profile is None and nvml.read(0).name == "NVIDIA L4"


@pytest.mark.parametrize("shown", ["GPU-ffff", "", "7"])
def test_a_name_that_cuda_does_not_know_is_reported_with_the_variable(
    played: Played, monkeypatch: pytest.MonkeyPatch, shown: str
) -> None:
    played(boards=())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    with pytest.raises(UsageError) as error:
        nvml.read(0)
    assert error.value.why == f"CUDA sees 0 devices, with CUDA_VISIBLE_DEVICES={shown!r}"
    assert "CUDA_VISIBLE_DEVICES" in error.value.todo


@pytest.mark.parametrize(
    ("code", "todo"),
    [
        (4, "/dev/nvidiactl"),
        (9, "modprobe nvidia"),
        (12, "install the driver"),
        (18, "upgraded beneath"),
        (999, "nvidia-smi"),
    ],
)
def test_each_failure_of_nvml_has_its_own_fix(played: Played, code: int, todo: str) -> None:
    played(init=code)
    with pytest.raises(UsageError) as error:
        nvml.read(0)
    assert error.value.what == "NVML does not answer" and todo in error.value.todo
    assert nvml.slowdown("GPU-0102") == ""
    with pytest.raises(OSError, match="does not answer"):
        nvml.energy_counter("GPU-0102")


def test_an_older_driver_is_called_by_the_older_function_name(played: Played) -> None:
    played(boards=BOARDS)
    assert nvml.slowdown(nvml.read(1).uuid) == "hardware power brake (0x80)"


def test_rates_are_measured_again_for_another_share_of_the_device(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    played()
    first = fingerprint.take("cuda")
    assert fingerprint.take("cuda") == first and first.validity == {"mps_share": 1.0}  # no power limit is reported
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "40")
    again = fingerprint.take("cuda")
    assert again.env_id == first.env_id and again.validity == {"mps_share": 0.4}
    assert "measured again: mps_share was 1 and is 0.4" in again.notes
    assert fingerprint.take("cuda").rates == again.rates
