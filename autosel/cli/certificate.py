"""Output of `run`: the certificate, the memory table and the suite, for people."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click

from autosel import settings
from autosel.certify import words
from autosel.certify.audit import INSTEAD, Audit, proof_of_use
from autosel.certify.capacity import Capacity
from autosel.certify.certificate import Certificate
from autosel.certify.compare import Change
from autosel.certify.derive import arithmetic, claimed_interval, headline_roofline
from autosel.certify.suite import Suite
from autosel.cli.output import WIDTH, note_lines, paragraph, table
from autosel.ledger.describe import bandwidth, bytes_text


def summary(made: Certificate, found: Audit) -> str:
    """Format a certificate: what ran, its speed and interval, where the time goes."""
    part = f"{made.layers.run} of {made.layers.of} layers"
    if made.layers.run != made.layers.of:
        part = click.style(f"{part} only", fg="yellow")
    head = f"{made.model} {arithmetic(made)}, {part}, {_batch(made)}, context {made.shape.seq}, {_weights(made)}"
    lines = [paragraph(head, hang="  "), *_arms(made)]
    if told := words.speculated(made):
        lines.append(paragraph(f"  speculation: {told}", hang="  "))
    lines += _tokens(made)
    if found.rows:
        lines += [*shares(found), *fusions(found)]
    if made.python_overhead is not None:
        lines.append(f"autosel's Python: {100 * made.python_overhead:.2g} % of the step")
    word = "verified" if made.verification_ok else click.style("NOT verified", fg="red")
    lines.append(paragraph(f"{word}: {words.compared(made)}", hang="  "))
    if used := proof_of_use(made):
        lines.append(f"served: {used}")
    lines += [*_undecided(made), *_quality(made)]
    for j in made.slo:
        lines.append(f"objective {j.objective}: {'met' if j.met else click.style('missed', fg='red')}, {j.found}")
    lines += note_lines(made.notes)
    lines += ["contended: other work ran, or the device was slowed, during the measurement"] if made.contended else []
    return "\n".join(lines)


def _undecided(made: Certificate) -> list[str]:
    """Return a note if no op is tuned, so that a user does not take PyTorch's time for the best possible time."""
    if any(o.decision_id is not None or o.candidate.partition(":")[0] != "torch" for o in made.per_op.values()):
        return []
    ran = shlex.split(made.repro_cmd)
    model = ran[ran.index("--model") + 1] if "--model" in ran[:-1] else made.model.partition("[")[0]
    elsewhere = sorted({o.reason for o in made.per_op.values() if o.reason.startswith("tuned ")})
    told = "; ".join(elsewhere) or "no decisions for these ops"
    text = paragraph(f"{told}: PyTorch serves all of them", hang="  ")
    stored = f" --format {ran[ran.index('--format') + 1]}" if "--format" in ran[:-1] else ""
    first = f"tune first:  {settings.spelling()} tune --model {shlex.quote(model)}{stored}"
    return [click.style(text, fg="yellow"), first]


def _quality(made: Certificate) -> list[str]:
    lines = [paragraph(f"quality: {words.scored(made)}", hang="  ")] if made.quality else []
    if told := words.compared_format(made):
        lines.append(paragraph(f"{'format' if made.format_quality else 'quality'}: {told}", hang="  "))
    if words.suspected(made):
        lines.append(paragraph(click.style("SUSPECT", fg="yellow") + f": {words.suspected(made)}", hang="  "))
    return lines


def _whole(value: float, digits: int = 4) -> str:
    """Format a number without an exponent."""
    return words.figure(value, digits).replace("\N{NARROW NO-BREAK SPACE}", " ")


def _batch(made: Certificate) -> str:
    count = made.shape.batch
    return f"{count} tokens of a stream in flight" if made.options.get("small_batch") else f"batch {count}"


def _weights(made: Certificate) -> str:
    return "random weights" if made.weights == "random" else f"weights of {made.weights}"


def _arms(made: Certificate) -> list[str]:
    ms, base = made.latency_ms, made.baseline
    roof = f"{headline_roofline(made):.0%} of what {bandwidth(made.read_bytes_per_s)} allows"
    optimised = f"{ms.med:>8.4g} ms  p95 {ms.p95:>7.4g} {made.tokens_per_sec:>8.4g} tok/s"
    if base is None:
        return [f"  optimised {optimised}   {roof}", f"  baseline  none: {made.iters} steps alone", *_host(made)]
    base_tps = made.shape.batch * 1e3 / base.med  # versions before 6 do not state it
    baseline = f"{base.med:>8.4g} ms  p95 {base.p95:>7.4g} {base_tps:>8.4g} tok/s"
    faster = f"{f'{base.speedup:.2f}x':>8} ({words.interval_text(claimed_interval(made))})"
    return [
        f"  optimised {optimised}   {roof}",
        f"  baseline  {baseline}   eager PyTorch, SDPA",
        f"  speedup   {faster}     {made.iters} steps each, interleaved",
        *_host(made),
    ]


def _host(made: Certificate) -> list[str]:
    """Return the times that the host saw, in addition to the GPU's own."""
    if made.host_ms is None:
        return []
    other = "" if made.baseline_host_ms is None else f" and {made.baseline_host_ms:.4g}"
    both = f"{made.host_ms:.4g}{other} ms until the host has the tokens"
    return [f"  timed by {made.timed_by}; {both}"]


def _tokens(made: Certificate) -> list[str]:
    gaps, cost = made.itl_ms, made.cost
    first = "" if made.ttft_ms is None else f"first token {_whole(made.ttft_ms)} ms   "
    lines = [paragraph(f"  prompt {told}", hang="  ")] if (told := words.prompted(made)) else []
    lines.append(f"  {first}between tokens p50 {gaps.p50:.4g}  p90 {gaps.p90:.4g}  p99 {gaps.p99:.4g} ms")
    lines.append(
        f"  KV cache {bytes_text(made.kv_cache_bytes)}   peak memory {bytes_text(made.peak_memory_bytes)}   "
        f"peak {made.peak_tokens_per_sec:.4g}, sustained {made.sustained_tokens_per_sec:.4g} tok/s"
    )
    earned = []
    if cost.tokens_per_dollar is not None:
        earned.append(f"{cost.tokens_per_dollar:,.0f} tokens a dollar".replace(",", " "))
    if cost.tokens_per_watt_hour is not None:
        earned.append(f"{cost.tokens_per_watt_hour:,.0f} tokens a watt-hour".replace(",", " "))
    return [*lines, *([f"  {'   '.join(earned)}"] if earned else [])]


def shares(found: Audit) -> list[str]:
    """Return lines such as `gate_up 46 % down 22 % rest 6 %`. Ops below 2 % count as the rest.

    An op and its share stay on one line.
    """
    named = [(r.label, r.share) for r in found.rows if r.share >= 0.02]
    rest = max(0.0, 1 - sum(share for _, share in named))
    lines = ["share of the step "]
    for label, share in [*named, ("rest", rest)]:
        item = f"  {label} {100 * share:.0f} %"
        if len(lines[-1]) + len(item) > WIDTH:
            lines.append(" " * 18)
        lines[-1] += item
    return lines


TOLD = {"fused", "torch", "graph", "team", "packed"}  # the forms that make one call of several


def fusions(found: Audit) -> list[str]:
    """Return lines such as `norm_qkv: taken; with norm and projections apart the step takes +1.8 %`."""
    lines = []
    for a in found.attribution:
        if not TOLD & {a.taken, a.other}:
            continue  # neither has the fused op; only the JSON shows it
        change = a.step_over_taken - 1
        if a.taken in TOLD:
            told = f"{a.op}: taken; with {INSTEAD[a.other]} the step takes {change:+.1%}"
        else:
            told = f"{a.op}: left out for {INSTEAD[a.taken]}; with it the step takes {change:+.1%}"
        lines.append(paragraph(told, hang="  "))
    return lines


def where_line(made: Certificate, where: Path) -> str:
    signed = ", signed" if made.signer else ""
    verify = f"{settings.spelling()} verify"
    text = f"certificate {made.sequence} appended{signed}, sha256:{made.checksum[:12]}"
    return f"{text}\ncheck:  {verify} {where}\nagain:  {verify} --rerun {where}:{made.sequence}"


def changes_text(changes: Sequence[Change]) -> str:
    """Return a table with a row for each run that both reports contain; empty if there are none."""
    if not changes:
        return ""
    heads = ["against the earlier report", "tok/s then", "now", "speedup", "but"]
    shown = 5 if any(c.note for c in changes) else 4
    rows = []
    for c in changes:
        speedup = f"{c.speedup:.3g}x ({words.interval_text(c.interval)})"
        rows.append([c.what, f"{c.before:.4g}", f"{c.now:.4g}", speedup, c.note][:shown])
    return "\n" + table(heads[:shown], rows, right=(1, 2, 3), wrap=0)


def plan_text(found: Capacity) -> str:
    rate = f", reading {bandwidth(found.read_bytes_per_s)}" if found.read_bytes_per_s else ""
    lines = [
        f"{found.model} {found.dtype} on {found.device}: {bytes_text(found.memory_bytes)} free{rate}",
        f"weights {bytes_text(found.weights_bytes)}, KV cache {bytes_text(found.kv_bytes_per_token)} a token",
        "",
    ]
    rows = [
        [
            f"{fit.context:,}".replace(",", " "),
            bytes_text(fit.kv_bytes),
            f"{fit.batch:,}".replace(",", " ") if fit.batch else "none",
            bytes_text(fit.need_bytes),
            f"{fit.ceiling_tokens_per_s:.4g}" if fit.ceiling_tokens_per_s else "",
        ]
        for fit in found.fits
    ]
    heads = ("context", "KV a sequence", "largest batch", "memory then", "at most tok/s")
    lines.append(table(heads, rows, right=(0, 1, 2, 3, 4)))
    if any(not fit.batch for fit in found.fits):
        lines.append("none: not even one sequence fits; use fewer --layers or a smaller model")
    if found.read_bytes_per_s:
        lines.append("at most: the limit of read rate and arithmetic rate, without caches")
        if found.packs:
            lines.append("unpacked weights are counted; lossless packing takes three quarters of that")
    return "\n".join(lines)


def suite_text(found: Suite) -> str:
    """Return a table with a row for each configuration. A single model is named above it."""
    each = "one trial" if found.trials == 1 else f"median of {found.trials} trials"
    shorter = ", short answers" if found.level == "quick" else ""
    part = f"; stopped, {found.left} configurations not measured" if found.left else ""
    dtypes = ", ".join(dict.fromkeys(r.dtype for r in found.rows))
    models = list(dict.fromkeys(r.model for r in found.rows))
    alone = f" of {models[0]}" if len(models) == 1 else ""
    head = f"{found.level} suite{alone} on {found.device}, {dtypes}: {each} each{shorter}{part}"
    heads = ["model", "run", "in/out", "e2e", "tok/s", "p50 ms", "p95", "TTFT", "KV", "peak", "x", "95 %"]
    rows = [
        [
            r.model,
            r.configuration,
            f"{r.prompt}/{r.tokens}",
            f"{r.e2e_tokens_per_s:.3g}",
            f"{r.decode_tokens_per_s:.3g}",
            f"{r.p50_step_ms:.3g}",
            f"{r.p95_step_ms:.3g}",
            _whole(r.ttft_ms, 3),
            f"{r.cache_bytes / 2**20:.3g}M",
            f"{r.peak_memory_bytes / 2**30:.3g}G",
            f"{r.speedup:.2f}",
            f"{r.speedup_interval.lo:.2f} .. {r.speedup_interval.hi:.2f}" if r.speedup_interval else "none",
        ]
        for r in found.rows
    ]
    skip = 1 if alone else 0
    below = (
        "e2e: tokens per second with the prompt; tok/s: decoding only; TTFT: ms to the first token; x: over the "
        "eager baseline's steps"
    )
    shown = table(heads[skip:], [r[skip:] for r in rows], right=tuple(range(3 - skip, 12 - skip)), wrap=0)
    return "\n".join((paragraph(head, hang="  "), "", shown, paragraph(below), *note_lines(found.notes)))
