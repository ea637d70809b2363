"""Test the whole-step kernel's knobs on every known device: the build fits, and impossible steps are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autosel.candidates.cuda.step import StepBuild, supports
from autosel.errors import UsageError
from autosel.fingerprint.known import load, names
from autosel.knobs.gpu.facts import facts
from autosel.knobs.gpu.persistent import LANES, SLOTS_MOST, chunk, crowded, persistent, predict
from autosel.knobs.gpu.step import StepCost
from autosel.native import cuda
from autosel.values import Accepted, Fingerprint, Rejected, Workload

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
        (attn(32, 8, 128, S=4), "one position per sequence"),
    ],
)
def test_an_unsupported_step_is_refused_before_compilation(workload: Workload, why: str) -> None:
    answer = supports(workload, load("h200"))
    assert isinstance(answer, Rejected)
    assert why in answer.reason
    with pytest.raises(UsageError, match="no whole-step kernel"):
        StepBuild.of(workload, smallest(), load("h200"))


def test_a_cpu_is_refused() -> None:
    cpu = Fingerprint(kind="cpu", name="a CPU", identity={}, environment={}, rates={})
    assert isinstance(supports(attn(32, 8, 128), cpu), Rejected)


# --- presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", sorted(PRESETS))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_preset_is_supported_in_narrow_types(monkeypatch: pytest.MonkeyPatch, model: str, dtype: str) -> None:
    monkeypatch.setattr("autosel.candidates.cuda.step.find_compiler", lambda: "g++")
    for device in names():
        assert isinstance(supports(attn(*PRESETS[model], dtype=dtype), load(device)), Accepted), device


def test_heads_that_lanes_cannot_hold_in_fp32_are_refused_with_the_reason() -> None:
    answer = supports(attn(*PRESETS["gemma3-1b"], dtype="fp32"), load("h200"))
    assert isinstance(answer, Rejected)
    assert "32 lanes hold 128 elements of fp32" in answer.reason


def test_it_is_refused_if_no_cta_can_be_resident() -> None:
    small = replace(facts(load("h200")), smem_per_cta=16 << 10)
    why = crowded(attn(*PRESETS["llama-8b"]), small)
    assert "all must be resident" in why and "16384" in why
    assert not crowded(attn(*PRESETS["llama-8b"]), facts(load("h200")))


@pytest.mark.parametrize("device", names())
@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("length", [16, 100, 8192, 131_072])
def test_chunks_cover_the_keys_and_leave_no_more_ctas_than_are_resident(device: str, model: str, length: int) -> None:
    f, w = facts(load(device)), attn(*PRESETS[model], L=length)
    heads = w["Hkv"] * -(-w["Hq"] // w["Hkv"] // 8)
    found = chunk(w, int(persistent(w, smallest(), f)["slots"]), f)
    assert found >= min(length, 128)
    assert -(-length // found) * heads <= max(heads, 3 * f.sms)


# --- against a graph --------------------------------------------------------------------------------------------------

US = 1e-6


def test_the_predicted_times_of_llama_1b_on_an_h200_agree_with_published_ones() -> None:
    """Compare with published times: 760 us for one launch, 795 us for a graph of dependent launches; within 100 us."""
    seen = predict(StepCost(kernels=100, bytes_read=2.47e9, flops=2.5e9), 100, facts(load("h200")), dependent=True)
    assert seen.launch_s == pytest.approx(760 * US, rel=0.01)
    assert seen.graph_s == pytest.approx(795 * US, rel=0.01)
    assert not seen.wins  # 4.3 %: too little for a race


@pytest.mark.parametrize(
    ("cost", "tasks", "launch_us", "graph_us", "wins"),
    [
        (StepCost(kernels=116, bytes_read=2.54e9, flops=3e9), 99, 771, 919, True),  # llama-1b at 2048
        (StepCost(kernels=228, bytes_read=16.1e9, flops=17e9), 195, 4098, 4389, True),  # llama-8b at 8192
        (StepCost(kernels=100, bytes_read=160e9, flops=17e9), 100, 37392, 37492, False),  # a 70b's bytes: F is all
    ],
)
def test_against_a_graph_of_plain_nodes(
    cost: StepCost, tasks: int, launch_us: float, graph_us: float, wins: bool
) -> None:
    found = predict(cost, tasks, facts(load("h200")))
    assert found.launch_s == pytest.approx(launch_us * US, rel=0.005)
    assert found.graph_s == pytest.approx(graph_us * US, rel=0.005)
    assert found.wins is wins
    assert f"{found.launch_s * 1e6:.0f} us against" in found.text


def test_a_slow_barrier_gives_no_gain() -> None:
    f = facts(load("h200"))
    cost = StepCost(kernels=100, bytes_read=2.5e9, flops=2.5e9)
    assert predict(cost, 100, f).wins
    assert not predict(cost, 100, replace(f, flag_s=f.node_s + 2 * f.latency_s)).wins
