"""The whole-step kernel's knobs on every known device: what is compiled in fits it, what it cannot do is refused."""

from __future__ import annotations

import pytest

from autosel.candidates.cuda.step import StepBuild, supports
from autosel.errors import UsageError
from autosel.fingerprint.known import load, names
from autosel.knobs.gpu import step
from autosel.knobs.gpu.facts import facts
from autosel.knobs.gpu.persistent import LANES, SLOTS_MOST, persistent
from autosel.native import cuda
from autosel.values import Fingerprint, Rejected, Workload

PRESETS = {"llama-8b": (32, 8, 128), "llama-1b": (32, 8, 64), "gemma3-1b": (4, 1, 256), "qwen3-1.7b": (16, 8, 128)}


@pytest.fixture(autouse=True)
def _any_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "why_not", lambda cc: "")


def attn(hq: int, hkv: int, d: int, b: int = 1, dtype: str = "bf16", **changes: int) -> Workload:
    dims = {"B": b, "Hq": hq, "Hkv": hkv, "S": 1, "D": d, "L": 8192, **changes}
    return Workload(op="attn", dims=tuple(dims.items()), dtype=dtype)  # type: ignore[arg-type]


def smallest(b: int = 1) -> Workload:
    return Workload(op="linear", dims=(("M", b), ("N", 4096), ("K", 4096)), dtype="bf16")


@pytest.mark.parametrize("device", names())
@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_a_build_fits_its_device(device: str, model: str, batch: int) -> None:
    f, w = facts(load(device)), attn(*PRESETS[model], b=batch)
    k = persistent(w, smallest(batch), f)
    assert k["rows"] in (1, 2, 4, 8)
    assert int(k["rows"]) >= batch
    assert k["head_rows"] in (1, 2, 4, 8)
    assert k["lanes"] in LANES
    assert int(k["lanes"]) * 8 >= w["D"]
    assert k["split_k"] in (1, 2, 4)
    assert 2 <= int(k["slots"]) <= SLOTS_MOST
    slot = 4 * (2 if k["head_rows"] == 8 else 4) * 2 * 32 * 16  # bytes of the four warps of a CTA: attention.cuh
    assert int(k["slots"]) * slot <= f.smem_per_cta


@pytest.mark.parametrize(
    ("workload", "why"),
    [
        (attn(32, 8, 128, b=9), "at most 8 rows"),
        (attn(32, 8, 100), "not whole vectors"),
        (attn(32, 8, 512), "32 lanes hold 256"),
        (attn(32, 8, 128, S=4), "one position a sequence"),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_compiled(workload: Workload, why: str) -> None:
    answer = supports(workload, load("h200"))
    assert isinstance(answer, Rejected)
    assert why in answer.reason
    with pytest.raises(UsageError, match="no whole-step kernel"):
        StepBuild.of(workload, smallest(), load("h200"))


def test_a_cpu_is_refused() -> None:
    cpu = Fingerprint(kind="cpu", name="a CPU", identity={}, environment={}, rates={})
    assert isinstance(supports(attn(32, 8, 128), cpu), Rejected)


def test_it_is_taken_where_the_nodes_it_saves_are_a_twentieth_of_the_step() -> None:
    """On an H200 the 192 kernels of llama-8b are 1.8 % of 3.7 ms; a tenth of its layers' bytes, and they are 18 %."""
    f = facts(load("h200"))
    whole = step.StepCost(kernels=192, bytes_read=16.1e9, flops=15e9)
    assert not step.persistent_wins(whole, f)
    assert step.persistent_wins(step.StepCost(kernels=192, bytes_read=1.6e9, flops=1.5e9), f)
