"""Test the headline of a tune, and the order of its table."""

from __future__ import annotations

from typing import Any

import click

from autosel import models
from autosel.cli.figures import decision_table
from autosel.cli.headline import headline, step_times
from autosel.models.workloads import Named, step
from autosel.values import Arm, Decision, Effect, PythonRecipe, Timing, Verdict

MODEL = models.load("llama-1b")
STEP = step(MODEL, context=512)
TORCH = Arm(candidate="torch:x", backend="TORCH", recipe=PythonRecipe(target="a:b"), knobs={}, digest="b" * 64)
CPP = Arm(candidate="cpp:x", backend="CPP", recipe=PythonRecipe(target="a:c"), knobs={}, digest="c" * 64)


def timing(us: float) -> Timing:
    return Timing(median_us=us, lo_us=us, hi_us=us, p95_us=us, min_us=us, samples=9)


def decided(n: Named, speedup: float = 2.0, us: float = 10.0, **changes: Any) -> Decision:
    """Return a decision for the C++ kernel, which takes `us`, or for PyTorch's if there is no speedup."""
    arm = CPP if speedup > 1 else TORCH
    verdict = Verdict(
        outcome="promote" if speedup > 1 else changes.pop("outcome", "lose"),
        winner=arm.candidate,
        reason="a reason",
        effect=Effect(median=speedup, lo=speedup, hi=speedup),
        timings={"torch:x": timing(us * speedup), arm.candidate: timing(us)},
    )
    values: dict[str, Any] = {
        "id": 1, "state": "promoted", "hw_id": "h", "op": n.workload.op, "bucket": n.workload.bucket,
        "mode": "eager.t2.highest", "workload": n.workload, "arm": arm, "baseline": TORCH, "verdict": verdict,
        "reason": "a reason", "created_at": "2026-11-20T11:17:24+00:00",
    }  # fmt: skip
    return Decision(**values | changes)


def test_the_headline_weighs_ops_by_their_calls_in_a_step() -> None:
    ops = [n for n in STEP if n.label in ("lm_head", "rope")]
    slow, fast = (next(n for n in ops if n.label == label) for label in ("lm_head", "rope"))
    assert (slow.calls_per_step, fast.calls_per_step) == (1, 16)
    times = step_times([decided(slow, us=160), decided(fast, 1.0, us=10)], ops)
    assert times is not None and (times.pytorch_us, times.decided_us) == (320 + 160, 160 + 160)


def test_the_headline_counts_what_improved() -> None:
    told = headline([decided(n) for n in STEP], STEP, "decode step of llama-1b").splitlines()
    assert told[0] == (
        f"decode step of llama-1b: about 2.0x faster than PyTorch; {len(STEP)} of {len(STEP)} ops improved"
    )
    assert "run` measures a step" in told[1]


def test_one_length_of_attention_and_one_chain_count() -> None:
    """Attention at 128 to 512 and both chains are decided; a step runs one length and one chain."""
    times = step_times([decided(n) for n in STEP], STEP)
    fused = [n for n in STEP if n.chain != "split" and (n.workload.op != "attn" or n.workload["L"] == 512)]
    split = [n for n in STEP if n.chain != "fused" and (n.workload.op != "attn" or n.workload["L"] == 512)]
    assert times is not None
    assert times.decided_us == 10 * min(sum(n.calls_per_step for n in chain) for chain in (fused, split))


def test_what_is_not_decided_is_named_and_in_neither_sum() -> None:
    others = [n for n in STEP if n.label not in ("lm_head", "sample", "rope")]
    lost = next(n for n in STEP if n.label == "rope")
    told = headline([*(decided(n) for n in others), decided(lost, 1.0, us=1e-6)], STEP, "a step")
    told = " ".join(told.split())
    assert told.startswith("a step without lm_head, sample (not timed): about 2.0x faster than PyTorch; 15 of 18 ops")
    assert "PyTorch stays for 1, 2 undecided" in told
    open_ = decided(lost, 1.0, outcome="undecided")
    assert "3 undecided" in headline([*(decided(n) for n in others), open_], STEP, "a step")
    assert headline([], STEP, "a step") == ""


def test_decisions_of_several_devices_have_no_headline() -> None:
    both = [decided(n, hw_id=hw_id) for n in STEP for hw_id in ("a", "b")]
    assert headline(both, STEP, "a step") == ""


def test_the_table_fits_80_columns_with_attention_in_the_order_of_lengths() -> None:
    made = [decided(n, us=1234.0) for n in reversed(step(models.load("llama-8b"), context=8192))]
    text = click.unstyle(decision_table(made, {n.workload.key: n.label for n in step(models.load("llama-8b"))}))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    lengths = [line.split()[4] for line in lines if line.startswith("attn ")]
    assert lengths == ["L128", "L256", "L512", "L1024", "L2048", "L4096", "L8192"]
    assert len(lines) == len(made) + 1, "no row is wrapped"
