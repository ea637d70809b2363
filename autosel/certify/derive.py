"""Figures of a certificate that follow from its other fields: computed when it is issued, and again by `verify`.

Every reader of the document can repeat the sums.

    tokens_per_sec  1000 * batch * tokens_per_step / latency_ms.med; the baseline gives one token a step
    speedup         tokens_per_sec / baseline_tokens_per_sec
    roofline        median over the steps of bytes_per_step / read rate just before it / its time
"""

from __future__ import annotations

from collections.abc import Sequence

from autosel.certify import slo
from autosel.certify.certificate import AgainstBaseline, Certificate, Cost, Derived, Gaps, Latency, Measured
from autosel.certify.physics import Physics, weigh
from autosel.certify.statistics import FEWEST_TO_RESAMPLE, Interval, median, median_interval, quantile, speedup_interval
from autosel.formats import PLAIN, find_weight_format

NS_PER_MS = 1e6
LENIENT = 2  # for a single step: memory may have been twice as fast as the best window during the run


def derive(made: Measured) -> Derived:
    """Compute every figure that follows from the measured ones."""
    s, per_step = made.samples, tokens_per_step(made)
    optimised, med = s.optimised_ns, median(s.optimised_ns) / NS_PER_MS
    base = _baseline(made, med)
    tokens = made.shape.batch * per_step
    rate, gaps = 1e3 * tokens / med, _gaps(made)
    latency = Latency(med=med, p95=quantile(optimised, 0.95) / NS_PER_MS)
    return Derived(
        iters=len(optimised),
        latency_ms=latency,
        latency_interval_ms=_in_ms(median_interval(optimised)),
        baseline_ms=base.med if base else None,
        baseline_p95_ms=base.p95 if base else None,
        host_ms=_median_ms(s.optimised_host_ns),
        baseline_host_ms=_median_ms(s.baseline_host_ns),
        speedup=base.speedup if base else None,
        speedup_interval=base.interval if base else None,
        tokens_per_step=per_step,
        tokens_per_sec=rate,
        baseline_tokens_per_sec=base.tokens_per_sec if base else None,
        peak_tokens_per_sec=1e9 * tokens / min(optimised),
        sustained_tokens_per_sec=1e9 * tokens * len(optimised) / sum(optimised),
        itl_ms=gaps,
        cost=_cost(made, rate),
        slo=_judged(made, latency, gaps, rate),
        bytes_per_token=made.bytes_per_step / tokens,
        read_median_bytes_per_s=median(made.read_probes) if made.read_probes else 0.0,
        roofline=median(rooflines(made)) if made.read_probes else 0.0,
        decision_ids=tuple(sorted({o.decision_id for o in made.per_op.values() if o.decision_id is not None})),
        verification_ok=verified(made),
    )


def _baseline(made: Measured, optimised_ms: float) -> AgainstBaseline | None:
    """Return the baseline's figures; None without its steps."""
    s = made.samples
    if not s.baseline_ns:
        return None
    med = median(s.baseline_ns) / NS_PER_MS
    return AgainstBaseline(
        med=med,
        p95=quantile(s.baseline_ns, 0.95) / NS_PER_MS,
        tokens_per_sec=1e3 * made.shape.batch / med,
        speedup=med / optimised_ms * (tokens_per_step(made) if counts_tokens(made) else 1),
        interval=speedup_interval(s.baseline_ns, s.optimised_ns, s.kept),
    )


def counts_tokens(made: Measured) -> bool:
    """Return True if the speedup counts tokens. Before version 6, a speculative run's counted steps."""
    return made.version >= 6


def tokens_per_step(made: Measured) -> float:
    """Return the tokens per step of a sequence. Before version 6 only the certificate itself states them."""
    kept = made.samples.kept
    if kept or counts_tokens(made):
        return sum(kept) / len(kept) if kept else 1.0
    assert isinstance(made, Certificate), "a run is issued in this version"
    return made.tokens_per_step


def speedup(made: Certificate) -> float | None:
    """Return tokens per second over the baseline's, also for versions whose stated speedup counts steps; None without
    a baseline.
    """
    base = made.baseline
    return None if base is None else base.speedup * (1 if counts_tokens(made) else made.tokens_per_step)


def against_baseline(made: Certificate) -> AgainstBaseline:
    """Return the baseline's figures of a run that has one, as every run of a suite, a sweep and the demo."""
    assert made.baseline is not None, "the plan has a baseline"
    return made.baseline


def baseline_interval_ms(made: Certificate) -> Interval:
    """Return the 95 % interval of the baseline's median step."""
    return _in_ms(median_interval(made.samples.baseline_ns))


def claimed_interval(made: Certificate) -> Interval | None:
    """Return the interval of the speedup; None for fewer than eight pairs of steps, whose range covers nothing, and
    without a baseline.
    """
    return made.speedup_interval if made.iters >= FEWEST_TO_RESAMPLE else None


def headline_roofline(made: Certificate) -> float:
    """Return the share of a step that reading its bytes takes at this run's best rate; 0 if no rate was measured.

    The stored `roofline` uses the rate just before each step, which a neighbour may have slowed.
    """
    if not made.read_bytes_per_s:
        return 0.0
    return made.bytes_per_step / made.read_bytes_per_s / (made.latency_ms.med / 1e3)


def physics(made: Certificate) -> dict[str, Physics]:
    """Return both arms' need of memory rate against the rate measured in the same run."""
    prompts, base = {"the prompt": made.ttft_ms, "the baseline's prompt": made.baseline_ttft_ms}, made.baseline
    plain = {"the baseline's step": _weigh(made, base.med, made.bytes_per_step + saved(made))} if base else {}
    return {
        "the optimised step": _weigh(made, made.latency_ms.med, made.bytes_per_step),
        "the fastest step, in twice its time,": _weigh(
            made, LENIENT * min(made.samples.optimised_ns) / NS_PER_MS, made.bytes_per_step
        ),
        **plain,
        # Each weight once, except an embedding that is not the output head.
        **{
            name: _weigh(made, ms, made.weights_bytes - embedding_bytes(made))
            for name, ms in prompts.items()
            if ms is not None
        },
    }


def rooflines(made: Measured, bytes_per_step: int | None = None) -> list[float]:
    """Return for each step the share that reading its bytes takes at the memory's rate just before it.

    `bytes_per_step` replaces the stated bytes. A share exceeds 1 only if a cache helps, or if the machine became faster
    within the pair.
    """
    steps, rates = made.samples.optimised_ns, made.read_probes
    paired = rates if len(rates) == len(steps) else (median(rates),) * len(steps)
    moved = bytes_per_step or made.bytes_per_step
    return [moved / rate / ns * 1e9 for rate, ns in zip(paired, steps, strict=True)]


def verified(made: Measured) -> bool:
    """Return True if the run is verified.

    Every token was compared, judged logits are within their bound, no token differs that the bound decides, and every
    arm except the baseline has a proof.
    """
    v = made.verification
    compared = v.tokens_checked == made_tokens(made) or made.version < 4
    right = v.max_logit_error <= v.logit_bound and not wrong_tokens(made)
    return v.tokens_checked > 0 and compared and right and proven(made)


def made_tokens(made: Measured) -> int:
    """Return the number of tokens that the timed steps gave."""
    return round(len(made.samples.optimised_ns) * tokens_per_step(made) * made.shape.batch)


def wrong_tokens(made: Measured) -> int:
    """Count the tokens that differ from the baseline's although the bound decides them; 0 before version 4."""
    v = made.verification
    if made.version < 4:
        return 0
    return v.tokens_checked - v.tokens_equal - (v.tokens_open or 0)


def proven(made: Measured) -> bool:
    """Return True if every arm except the baseline has a known proof of parity."""
    return all(o.parity is not None for o in made.per_op.values() if o.baseline not in ("", o.candidate))


def lossy(dtype: str, weight: str = PLAIN, weights: str = "random", stored: str = PLAIN) -> str:
    """Name what loses quality that a text could show, or return "".

    Lossy are arithmetic in fewer than 16 bits, and weights rounded to a format. Random weights have no text to lose,
    and weights that the checkpoint itself stores in the format (`stored`) are not rounded.
    """
    if dtype.startswith(("fp8", "fp4", "int8", "int4", "nf4")):
        return dtype
    rounded = weights != "random" and weight != stored and not find_weight_format(weight).exact
    return weight if rounded else ""


def saved(made: Measured) -> int:
    """Return how many bytes less than the baseline the optimised step reads, because its weights are packed
    (decode.packed).
    """
    stated = made.options.get("saved_bytes", 0)
    return stated if isinstance(stated, int) else -1


def embedding_bytes(made: Measured) -> int:
    """Return the bytes of the input embedding's rows, of which a prompt reads only a part."""
    known = made.architecture or {}
    table = dict(known.get("others", ())).get("embedding") or known.get("table") or weight_format(made)
    return find_weight_format(str(table)).nbytes(made.dtype, made.shape.V, made.shape.d)


def arithmetic(made: Measured) -> str:
    """Name the dtype, with the formats of the weights if they have any: `bf16`, `bf16 with int8-row weights`."""
    names = dict.fromkeys((weight_format(made), *dict((made.architecture or {}).get("others", ())).values()))
    coded = ", ".join(name for name in names if name != PLAIN)
    return f"{made.dtype} with {coded} weights" if coded else made.dtype


def stored_format(made: Measured) -> str:
    """Return the name of the format that the checkpoint itself stores the matrices in."""
    return str((made.architecture or {}).get("stored", PLAIN))


def weight_format(made: Measured) -> str:
    """Return the name of the format of the weights' matrices; plain if the certificate does not state one."""
    return str((made.architecture or {}).get("weight", PLAIN))


def _weigh(made: Measured, step_ms: float, moved: int) -> Physics:
    return weigh(
        bytes_per_step=moved,
        step_ms=step_ms,
        read_bytes_per_s=made.read_bytes_per_s,
        cache_bytes=made.cache_bytes,
    )


def _gaps(made: Measured) -> Gaps:
    """Return the gaps between tokens. A sequence waits a whole step, unless the batch is one stream."""
    per_step = tokens_per_step(made) * (made.shape.batch if made.options.get("small_batch") else 1)
    steps = [ns / NS_PER_MS / per_step for ns in made.samples.optimised_ns]
    return Gaps(p50=median(steps), p90=quantile(steps, 0.9), p99=quantile(steps, 0.99))


def _cost(made: Measured, rate: float) -> Cost:
    c = made.cost
    tokens = made.shape.batch * tokens_per_step(made) * len(made.samples.optimised_ns)
    return Cost(
        tokens_per_watt_hour=tokens / (c.energy_joules / 3600) if c.energy_joules else None,
        tokens_per_dollar=rate * 3600 / c.price_per_hour if c.price_per_hour else None,
        price_per_hour=c.price_per_hour,
        energy_joules=c.energy_joules,
    )


def _judged(made: Measured, latency: Latency, itl: Gaps, rate: float) -> tuple[slo.Judged, ...]:
    measured = {
        "itl": itl.p50,
        "p50_itl": itl.p50,
        "p90_itl": itl.p90,
        "p99_itl": itl.p99,
        "p95": latency.p95,
        "tps": rate,
    }
    if made.ttft_ms is not None:
        measured["ttft"] = made.ttft_ms
    objectives = [objective for asked in made.slo for objective in slo.parse(asked.objective)]
    return slo.judge(objectives, measured)


def _median_ms(host_ns: Sequence[int]) -> float | None:
    return median(host_ns) / NS_PER_MS if host_ns else None


def _in_ms(interval: Interval) -> Interval:
    return Interval(lo=interval.lo / NS_PER_MS, hi=interval.hi / NS_PER_MS)
