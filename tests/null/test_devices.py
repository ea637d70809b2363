"""Test the devices: who may compare them by name, and the decisions for tensors of a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autosel import devices, dispatch
from autosel.devices.cuda import nvml
from autosel.errors import UsageError
from autosel.ops import OPS

PACKAGE = Path(devices.__file__).parents[1]
KIND = f"[\"'](?:{'|'.join(devices.KINDS)})[\"':]"
COMPARISON = re.compile(
    rf"[=!]= {KIND}|{KIND} [=!]=|\bin [(\[{{][^)]*{KIND}|startswith\({KIND}|case {KIND}|{KIND}: .*{KIND}:"
    r"|\.is_cuda\b|\.is_cpu\b|cuda\.is_available\b"
)
ALLOWED = {
    "candidates/arms.py": "which build of PyTorch this is: cuDNN has a version only where CUDA can be used",
    "candidates/libraries/flashinfer_paged.py": "the source of a library's candidate is part of its decisions",
    "fingerprint/known.py": "the format of fingerprints/*.json, which describe GPUs",
    "integrations/engines/probes/hf_kernels_probe.py": "runs in an engine's environment, without autosel",
    "integrations/engines/probes/inductor_probe.py": "runs in an engine's environment, without autosel",
    "integrations/flashinfer_bench.py": "languages of FlashInfer's traces",
    "integrations/vllm_plugin.py": "the name that vLLM gives its platform",
    "ops/eager.py": "the source of the baseline is part of its decisions, and each look-up of its time",
    "ops/eager_stored.py": "the source of the baseline is part of its decisions",
    "ops/stored.py": "a weight in a format has PyTorch's attributes of a tensor",
    "testing/mutants/source.py": "folders of kernels/",
}


def comparisons(text: str) -> list[str]:
    """Return the lines that compare with the name of a kind of device, or ask PyTorch for one."""
    return [line.strip() for line in text.splitlines() if COMPARISON.search(line)]


def test_only_devices_compares_a_device_with_the_name_of_a_kind() -> None:
    files = [file for file in PACKAGE.rglob("*.py") if (PACKAGE / "devices") not in file.parents]
    found = {str(file.relative_to(PACKAGE)): lines for file in files if (lines := comparisons(file.read_text()))}
    new = {file: lines for file, lines in found.items() if file not in ALLOWED}
    assert not new, f"ask autosel.devices instead (docs/architecture.md, Devices): {new}"
    assert set(found) == set(ALLOWED), "these no longer need an exception"


def test_every_spelling_of_a_comparison_is_found() -> None:
    text = """d == "cpu"\nd.type != 'cuda'\nd in ("cpu", "cuda")\nd not in ("cpp", "cuda")\nd.startswith("cuda:")\n"""
    text += """t.is_cuda\ntorch.cuda.is_available()\n{"cpu": 1, "cuda": 2}\n"""
    assert comparisons(text) == text.splitlines()


@pytest.mark.parametrize(
    "trouble",
    [UsageError("NVML does not answer", why="version", todo="install it"), AttributeError("no deviceGetAttribute")],
)
def test_an_unidentified_gpu_is_served_by_the_baseline_and_reported_once(
    trouble: Exception, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(ordinal: int) -> nvml.Readings:
        raise trouble

    monkeypatch.setattr(nvml, "read", read)
    devices._identified.cache_clear()
    with dispatch.use(home) as board:
        for _ in range(2):
            found = board.resolution(OPS["rmsnorm"], OPS["rmsnorm"].workload("fp32", {"M": 1, "d": 32}), "cuda:0")
            board._read()
    assert found.decision is None
    (said,) = (r.getMessage() for r in caplog.records if "cannot be identified" in r.getMessage())
    assert all(part in said for part in str(trouble).splitlines()) and "cuda:0" in said
