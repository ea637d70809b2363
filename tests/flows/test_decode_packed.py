"""Test weights in 12 bits: any bit pattern is restored, and a step that reads them gives the same bits."""

from __future__ import annotations

import itertools
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from autosel import dispatch, fingerprint, models, resources
from autosel.candidates import layouts
from autosel.decode import packed, team
from autosel.decode.account import saved_bytes, time_ops
from autosel.decode.cache import Cache, make_cache
from autosel.decode.model import Decoder
from autosel.decode.persistent import write
from autosel.decode.run import Plan
from autosel.decode.step import Place, Step, write_step
from autosel.decode.team import TeamStep, write_team
from autosel.decode.weights import Weights, load_weights
from autosel.errors import ParityError, UsageError
from autosel.guard import Policy
from autosel.knobs.cpu.facts import ISA_FLAGS, facts
from autosel.native.compile import BASE_FLAGS, compile_source, find_compiler
from autosel.native.isa import ISA_NEEDS, Isa
from autosel.native.load import load_entry
from autosel.testing.serving import serve
from autosel.values import Fingerprint, Rejected
from tests import drawn

PACKER = "cpu/gemv_packed.cpp"  # has the entries that pack


@pytest.fixture(scope="module")
def here() -> Fingerprint:
    return fingerprint.take("cpu")


@pytest.fixture(scope="module")
def fp(here: Fingerprint) -> Fingerprint:
    """Return this CPU; skip the test if a team has no kernel for packed weights on it."""
    if isinstance(support := packed.supports("bf16", here), Rejected):
        pytest.skip(support.reason)
    return here


@pytest.fixture(scope="module")
def entry(here: Fingerprint) -> Callable[[str], Callable[..., Any]]:
    made = compile_source(PACKER, (*ISA_FLAGS[facts(here).isa], "-DAUTOSEL_BF16"))
    return lambda name: load_entry(made.digest, name)


def there_and_back(entry: Callable[[str], Callable[..., Any]], w: Tensor, threads: int = 1) -> tuple[Tensor, Tensor]:
    """Return the packed bytes, and the matrix unpacked from them."""
    size = torch.zeros(1, dtype=torch.int64)
    entry("pack")(w, None, size, threads)
    made = torch.empty(int(size) + 64, dtype=torch.uint8)
    made = made[-made.data_ptr() % 64 :][: int(size)]
    entry("pack")(w, made, size, threads)
    back = torch.zeros(w.shape, dtype=w.dtype)
    entry("unpack")(made, back, threads)
    return made, back


# --- bits there and back ---------------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 33),
    columns=st.integers(1, 400),
    seed=st.integers(0, 2**31),
    wild=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
    threads=st.integers(1, 3),
)
def test_any_bits_are_restored(entry: Any, rows: int, columns: int, seed: int, wild: float, threads: int) -> None:
    """Replace some normal values by any 16 bits: infinities, NaN with payloads, subnormals, both zeros."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, columns, generator=g).mul(0.02).bfloat16().view(torch.int16)
    any_bits = torch.randint(-(2**15), 2**15, w.shape, generator=g, dtype=torch.int32).to(torch.int16)
    w = torch.where(torch.rand(w.shape, generator=g) < wild, any_bits, w).view(torch.bfloat16)
    _, back = there_and_back(entry, w, threads)
    assert torch.equal(back.view(torch.int16), w.view(torch.int16))


def test_a_slice_of_wider_rows_is_packed_like_any_other(entry: Any) -> None:
    wide = torch.randn(16, 384).bfloat16()
    _, back = there_and_back(entry, wide[:, 128:256])
    assert torch.equal(back, wide[:, 128:256])


def test_trained_weights_take_three_quarters(entry: Any) -> None:
    made, _ = there_and_back(entry, torch.randn(512, 2048).mul(0.02).bfloat16())
    assert 0.75 < made.numel() / (512 * 2048 * 2) < 0.752


@pytest.mark.parametrize(
    ("w", "why"),
    [(torch.zeros(0, 128).bfloat16(), "0 x 128"), (torch.zeros(8, 128), "bfloat16")],
)
def test_anything_but_a_matrix_of_bf16_is_refused(entry: Any, w: Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        entry("pack")(w, None, torch.zeros(1, dtype=torch.int64), 1)


# --- steps -----------------------------------------------------------------------------------------------------------


def plan_of(name: str, batch: int = 1, **sizes: int) -> Plan:
    whole = models.load(name)
    sizes = {"layers": 2, "d": 256, "Hq": 4, "Hkv": 2, "D": 64, "I": 384, "V": 640} | sizes
    local = whole.rope_local and replace(whole.rope_local, rotary_dim=sizes["D"])
    shape = replace(
        whole,
        **sizes,
        rope=replace(whole.rope, rotary_dim=sizes["D"]),
        rope_local=local,
        layer_types=whole.layer_types[: sizes["layers"]],
    )
    return Plan(model=shape, dtype="bf16", batch=batch, seq=32)


def filled_cache(plan: Plan) -> Cache:
    cache = make_cache(plan.shape, "bf16", rows=plan.batch, room=plan.seq)
    for t in (*cache.k, *cache.v):
        t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(4)))
    return cache


def steps_of(plan: Plan, weights: Weights, fp: Fingerprint, threads: int = 2) -> tuple[TeamStep, TeamStep]:
    """Return the team's steps on unpacked and packed weights, each from the same position in a separate cache."""
    made = []
    for packs in (False, True):
        cache = filled_cache(plan)
        place = Place.at(torch.arange(plan.batch) * 5, [plan.seq - 4 - b % 3 for b in range(plan.batch)])
        with torch.inference_mode():
            step = write_team(write_step(Decoder(weights), cache, place), fp, "packed" if packs else "whole")
        times = torch.zeros(threads, len(step.tasks), 2, dtype=torch.int64)
        made.append(replace(step, threads=threads, times=times))
    return made[0], made[1]


def assert_same_bits(plan: Plan, weights: Weights, fp: Fingerprint) -> None:
    plain, other = steps_of(plan, weights, fp)
    for step in (plain, other):
        step.run()
    assert torch.equal(plain.logits, other.logits) and other.packed is not None


def with_strange_values(weights: Weights) -> Weights:
    """Add finite values without a code: zeros, subnormals, and large ones."""
    g = torch.Generator().manual_seed(9)
    with torch.inference_mode():
        for _, w in weights.matrices():
            at = torch.randint(0, w.numel(), (40,), generator=g)
            w.view(-1)[at[:20]] = 0.0
            w.view(-1)[at[20:30]] = 1e-39
            w.view(-1)[at[30:]] = 3.0
    return weights


MODELS = ("llama-1b", "qwen3-1.7b", "gemma3-1b")


# Each batch with each model; every second of these on one thread, the others on three.
@pytest.mark.parametrize(
    ("name", "batch", "threads"),
    [(name, batch, 1 + 2 * ((at + batch) % 2)) for at, name in enumerate(MODELS) for batch in range(1, 9)],
)
def test_a_step_on_packed_weights_leaves_the_same_bits(fp: Fingerprint, name: str, batch: int, threads: int) -> None:
    plan = plan_of(name, batch)
    weights = with_strange_values(load_weights(plan))
    plain, other = steps_of(plan, weights, fp, threads)
    for _ in range(3):
        for step in (plain, other):
            step.run()
            step.place.advance()
        assert torch.equal(plain.logits, other.logits) and plain.logits.isfinite().all()
        assert all(torch.equal(a, b) for a, b in zip(plain.cache.k, other.cache.k, strict=True))
    assert other.packed is not None and other.candidate == team.PACKED and not plain.packed
    assert sum(task.saved_bytes for task in other.tasks) > 0.2 * other.packed.prepared.plain_bytes


@pytest.mark.parametrize("isa", drawn.share([isa for isa in ISA_NEEDS if isa != "portable"], days=3))
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_every_instruction_set_leaves_the_bits_of_its_own_team(here: Fingerprint, isa: Isa, batch: int) -> None:
    if missing := set(ISA_NEEDS[isa]) - set(here.identity["isa"]):
        pytest.skip(f"this CPU lacks {', '.join(sorted(missing))}")
    taken = replace(here, identity={**here.identity, "isa": ISA_NEEDS[isa]})
    plan = plan_of("llama-1b", batch)
    assert_same_bits(plan, with_strange_values(load_weights(plan)), taken)


@pytest.mark.parametrize("d", [1920, 2048, 2176])
def test_packed_rows_short_and_long_are_added_up_like_unpacked_ones(fp: Fingerprint, d: int) -> None:
    """Include rows below 4 KB, which are added in another order."""
    plan = plan_of("llama-1b", layers=1, d=d, V=128)
    assert_same_bits(plan, load_weights(plan), fp)


def test_a_matrix_without_whole_units_stays_unpacked_among_packed_ones(fp: Fingerprint) -> None:
    plan = plan_of("llama-1b", I=324)  # gate and up have 324 rows, down 324 columns
    weights = load_weights(plan)
    assert_same_bits(plan, weights, fp)
    made = packed.pack(weights, fp)
    assert made.of("0.gate") is None and made.of("0.qkv") is not None


def test_gate_and_up_are_both_packed_or_both_unpacked(fp: Fingerprint) -> None:
    plan = plan_of("llama-1b", layers=1)
    weights = load_weights(plan)
    with torch.inference_mode():
        up = weights["0.up"]
        up.copy_(torch.exp2(torch.rand(up.shape) * 60 - 60))  # has so many exponents that packing does not pay
    assert_same_bits(plan, weights, fp)
    made = packed.pack(weights, fp)
    assert made.of("0.up") is None and made.of("0.gate") is not None


@pytest.mark.parametrize(
    ("source", "isa"), drawn.share(list(itertools.product([team.SOURCE, PACKER], ISA_FLAGS)), days=4)
)
def test_a_cpu_without_the_instruction_still_has_the_rest(source: str, isa: Any) -> None:
    """Compile the sources without the instruction: they then contain only the layout of packed weights."""
    compiler = find_compiler()
    assert compiler is not None
    include = Path(tvm_ffi.__file__).parent / "include"
    command = [compiler.path, *BASE_FLAGS, *ISA_FLAGS[isa], "-DAUTOSEL_BF16", f"-I{include}", "-fsyntax-only"]
    done = subprocess.run([*command, str(resources.kernels() / source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:2000]


# --- without packed weights ------------------------------------------------------------------------------------------


def test_packing_needs_memory_in_addition_to_the_original(fp: Fingerprint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "free_memory", lambda: packed.RESERVE_BYTES + 1000)
    with pytest.raises(UsageError, match="packed weights") as refused:
        packed.pack(load_weights(plan_of("llama-1b")), fp)
    assert "in addition to the original weights; 0.0 GiB are free" in refused.value.why


def test_packed_weights_are_freed_for_a_run_that_needs_the_memory(
    fp: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of("llama-1b")
    weights = load_weights(plan)
    first = packed.pack(weights, fp)
    packed.make_room(weights, plan)
    assert packed.pack(weights, fp) is first
    monkeypatch.setattr(packed, "free_memory", lambda: 0)
    packed.make_room(weights, plan)
    with pytest.raises(UsageError, match="packed weights"):
        packed.pack(weights, fp)


def test_memory_that_the_run_still_needs_does_not_count_as_free(
    fp: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "free_memory", lambda: packed.RESERVE_BYTES + (1 << 30))
    weights = load_weights(plan_of("llama-1b"))
    with pytest.raises(UsageError, match="packed weights"):
        packed.pack(weights, fp, to_come_bytes=1 << 30)
    assert packed.pack(weights, fp).prepared.bytes < 1 << 30


def test_weights_that_packing_would_not_shrink_are_not_packed(fp: Fingerprint) -> None:
    weights = load_weights(plan_of("llama-1b"))
    with torch.inference_mode():
        for _, w in weights.matrices():
            w.view(torch.int16).random_(-(2**15), 2**15)
    with pytest.raises(UsageError, match="packed weights") as refused:
        packed.pack(weights, fp)
    assert "no matrix would be smaller" in refused.value.why


def test_a_single_wrong_bit_is_found_before_a_step_reads_it(entry: Any) -> None:
    w = torch.randn(16, 256, generator=torch.Generator().manual_seed(1)).mul(0.02).bfloat16()
    w[3, 7] = 1e-30  # one has no code; neither has one in 10,000 random weights, whose stored code is arbitrary
    made, _ = there_and_back(entry, w, 2)
    different = torch.zeros(1, dtype=torch.int64)
    entry("compare")(made, w, different, 2)
    assert int(different) == 0
    for at in (128 + 5, 128 + 64 + 3, made.numel() - 64):  # a code, a lower byte, an upper byte in the list
        made[at] ^= 1
        entry("compare")(made, w, different, 2)
        made[at] ^= 1
        assert int(different) == 1
    with pytest.raises(ValueError, match="not the bytes of a 8 x 256 matrix"):
        entry("compare")(made, w[:8], different, 1)


def test_weights_that_unpack_to_other_bits_are_not_used(fp: Fingerprint, monkeypatch: pytest.MonkeyPatch) -> None:
    load = layouts.load_entry

    def wrong(digest: str, name: str) -> Callable[..., Any]:
        return (lambda p, w, different, threads: different.fill_(2)) if name == "compare" else load(digest, name)

    monkeypatch.setattr(layouts, "load_entry", wrong)
    with pytest.raises(ParityError, match="prepared weights differ from the weights"):
        packed.pack(load_weights(plan_of("llama-1b")), fp)


def test_only_bf16_on_a_cpu_with_the_instruction_is_packed(here: Fingerprint) -> None:
    older = replace(here, identity={**here.identity, "isa": ("sse4_2", "avx")})
    assert "fp32" in packed.supports("fp32", here).reason  # type: ignore[union-attr]
    assert "AVX2" in packed.supports("bf16", older).reason  # type: ignore[union-attr]
    assert isinstance(packed.supports("bf16", replace(here, kind="cuda")), Rejected)


# --- op by op --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", drawn.share([1, 3], days=2))
def test_single_ops_on_packed_weights_give_the_bits_of_plain_ones_and_report_saved_bytes(
    fp: Fingerprint, batch: int, tmp_path: Path
) -> None:
    plan = plan_of("llama-1b", batch)
    weights = with_strange_values(load_weights(plan))
    kernels = {"linear": "gemv", "norm_qkv": "norm_qkv", "gate_up": "gate_up", "lm_head": "lm_head"}
    logits, saved, moved = [], [], []
    for end in ("", "_packed"):
        named = models.step(plan.shape, batch=batch, context=plan.seq, dtype="bf16")
        chosen = [(n.workload, f"cpp:{kernels[n.workload.op]}{end}") for n in named if n.workload.op in kernels]
        with dispatch.use(serve(tmp_path / f"home{end}", chosen), Policy(on=False)), torch.inference_mode():
            step = write(Decoder(weights), filled_cache(plan), Place.at(torch.arange(batch) * 5, [20] * batch), fp=fp)
            assert isinstance(step, Step)
            step.run()
            logits.append(step.logits.clone())
            saved.append(saved_bytes(step))
            moved.append(sum(t.bytes_moved * t.count_per_step for t in time_ops(step, plan, time.perf_counter_ns)))
    assert torch.equal(*logits) and logits[0].isfinite().all()
    packed_bytes = sum(w.nbytes for name, w in weights.matrices())
    assert saved[0] == 0 and 0.2 * packed_bytes < saved[1] < 0.25 * packed_bytes
    assert moved[0] - moved[1] == pytest.approx(saved[1], abs=100)  # rows of few calls differ by some bytes
    packed.make_room(weights, plan)
    layouts.STORE.forget([w for _, w in weights.matrices()])
    assert saved_bytes(step) == 0
