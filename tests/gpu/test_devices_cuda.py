"""Test a real GPU's fingerprint: complete, plausible, repeatable."""

from __future__ import annotations

import pytest

from autosel import fingerprint
from autosel.fingerprint import known
from autosel.knobs.gpu.facts import facts
from autosel.values import Fingerprint

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> Fingerprint:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("cupy", reason="a GPU's fingerprint needs cupy: extra cuda12 or cuda13")
    return fingerprint.take("cuda", refresh=True)


def test_every_formula_finds_its_facts(device: Fingerprint) -> None:
    assert facts(device).in_flight > 0


def test_rates_are_plausible(device: Fingerprint) -> None:
    assert not [note for note in device.notes if " is outside " in note or " is below " in note]


def test_identity_is_the_same_when_read_again(device: Fingerprint) -> None:
    again = fingerprint.take("cuda")
    assert (again.hw_id, again.env_id, again.rates) == (device.hw_id, device.env_id, device.rates)


def test_a_known_device_agrees_with_its_datasheet(device: Fingerprint) -> None:
    sheet = next((known.load(n) for n in known.names() if known.load(n).name == device.name), None)
    if sheet is None:
        pytest.skip(f"{device.name} is not in fingerprints/")
    for limit in ("sm_count", "regs_per_sm", "smem_per_sm_bytes", "smem_per_cta_bytes", "threads_per_sm"):
        assert device.identity[limit] == sheet.identity[limit], limit
