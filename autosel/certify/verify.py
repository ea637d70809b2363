"""Check a certificate file: bytes, chain, schema, model, device, arithmetic, physics, signatures. Nothing is measured.

bytes each line is the one RFC 8785 spelling of its content, and matches its checksum chain line n states that it is
line n, and names the checksum of line n - 1 model bytes, FLOPs, weights, cache and calls are those of the model and the
layers that ran device the identity gives name, hw_id and cache; no rate is above what such a device reaches arithmetic
every figure that follows from others is computed again physics neither arm, nor its prompt, is faster than the memory
measured in the run, or the device's arithmetic signature of every line that names a signer; with a given key, of every
line by that key

Before version 6 a certificate does not describe a model other than a preset. Such a certificate is neither proven nor
refuted: the rest is checked, and `Verified.unchecked` names it. In strict mode it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from autosel.certify import device, model, sign
from autosel.certify.audit import FUSED_OPS, INSTEAD
from autosel.certify.certificate import MOST_STEPS, SINCE, Certificate, decode, is_checksum, model_name, values
from autosel.certify.derive import NS_PER_MS, derive, lossy, physics, saved, stored_format, weight_format
from autosel.certify.limits import beyond, measured
from autosel.certify.store import BadCertificate, lines
from autosel.decode.run import FormatQuality, Quality
from autosel.errors import AutoselError
from autosel.values import from_json

# Tolerance of a step's time by CUDA events over the host's time: two clocks, and the resolution of events.
LATER, TICK_NS = 1.01, 10_000
SHOWN = 8  # certificates that a message lists
AHEAD = timedelta(minutes=10)  # tolerance for another machine's clock being ahead


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """A certificate that is not checkable: `fields` cannot be derived, because it does not describe `model`."""

    line: int
    model: str
    version: int
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A file without errors; it is proven only if `unchecked` is empty.

    `signed` counts its certificates with a signature; all signatures match.
    """

    certificates: int
    signed: int
    head: str
    last: Certificate
    unchecked: tuple[Unchecked, ...] = ()


class NotCheckable(AutoselError):
    """A certificate that is neither proven nor refuted, because it does not describe its model."""

    exit_code = 5


def verify(
    path: Path,
    *,
    signer: str = "",
    head: str = "",
    keep: int = 0,
    strict: bool = False,
    clock: Callable[[], datetime] = utc_now,
) -> Verified:
    """Check the whole file; `last` is the certificate on line `keep` (0: the last line).

    `signer` (public key, hex) must have signed every line. `head` must be the checksum of the last line, which reveals
    missing lines at the end. `strict` refuses certificates that are not checkable. `clock` gives the time that
    timestamps may not exceed. Raises BadCertificate that names line and field.
    """
    kept, count, signed, previous, unchecked = None, 0, 0, "", []
    for number, made in read(path, signer=signer, strict=strict, clock=clock):
        if made.previous != previous:
            raise _refused(path, number, "previous", "it does not name the checksum of the line before")
        count, previous, signed = number, made.checksum, signed + bool(made.signer)
        if fields := model.underived(made):
            unchecked.append(Unchecked(line=number, model=made.model, version=made.version, fields=fields))
        if keep in (0, number):
            kept = made
    if count == 0:
        raise BadCertificate(f"{path} holds no certificate")
    if head and previous != head:
        why = f"its last line has checksum {previous}"
        raise BadCertificate(f"{path} does not end with {head[:12]}...", why=why, todo="lines are missing or replaced")
    if kept is None:
        raise BadCertificate(f"{path} has no line {keep}", why=f"it has {count}")
    return Verified(certificates=count, signed=signed, head=previous, last=kept, unchecked=tuple(unchecked))


def not_checkable(path: Path, found: Verified) -> NotCheckable | None:
    """Return an error if certificates of the file are neither proven nor refuted."""
    if not found.unchecked:
        return None
    told = [f"line {u.line}, {u.model:.60}, version {u.version}: {', '.join(u.fields)}" for u in found.unchecked]
    more = [f"and {len(told) - SHOWN} more"] if len(told) > SHOWN else []
    count = f"{len(told)} of {found.certificates} certificate{'s' if found.certificates > 1 else ''}"
    head = "the certificates do not describe these models, so these fields cannot be derived:"
    why = "\n".join([head, *told[:SHOWN], *more])
    return NotCheckable(f"{path}: {count} not checkable", why=why, todo="certify those runs again")


def read(
    path: Path, *, signer: str = "", strict: bool = False, clock: Callable[[], datetime] = utc_now
) -> Iterator[tuple[int, Certificate]]:
    """Yield each line's certificate after its checks. Raises BadCertificate that names line and field."""
    for number, line in lines(path):
        try:
            made = decode(line)
        except ValueError as error:
            raise BadCertificate(f"{path}:{number} cannot be trusted", why=str(error)) from error
        if made.sequence != number:
            raise _refused(path, number, "sequence", f"it is {made.sequence}: lines were removed or added")
        try:
            trouble = wrong(made, clock()) or (model.silence(made) if strict else "") or sign.trouble(made)
        except AutoselError as error:
            raise BadCertificate(f"{path}:{number} cannot be checked", why=error.what, todo=error.todo) from error
        if not trouble and signer and made.signer != signer:
            trouble = f"signer: it is {f'signed by {made.signer[:12]}...' if made.signer else 'not signed'}"
        if trouble:
            raise BadCertificate(f"{path}:{number} cannot be trusted", why=trouble)
        yield number, made


def _refused(path: Path, number: int, field: str, why: str) -> BadCertificate:
    return BadCertificate(f"{path}:{number} cannot be trusted", why=f"{field}: {why}")


def wrong(made: Certificate, now: datetime | None = None) -> str:
    """Return the first field whose figure cannot be right, and why; "" if all can."""
    found = _sampleless(made) or _shapeless(made) or _untimely(made, now or utc_now()) or _unprompted(made)
    found = found or _unserved(made) or _unjudged(made) or _beyond_limit(made)
    found = found or model.trouble(made) or device.trouble(made)
    return found or _miscalculated(made) or _impossible(made)


def _untimely(made: Certificate, now: datetime) -> str:
    try:
        began = datetime.fromisoformat(made.timestamp)
    except ValueError:
        return f"timestamp: {made.timestamp!r:.40} is not a time"
    if began.utcoffset() != timedelta(0):
        return f"timestamp: {made.timestamp!r:.40} is not in UTC"
    if began > now + AHEAD:
        return f"timestamp: {made.timestamp} is in the future; now it is {now.isoformat(timespec='seconds')}"
    return ""


def _sampleless(made: Certificate) -> str:
    """Check the samples for counts and times that no run gives."""
    s, alone = made.samples, made.verification.against == "passes"
    if alone != (made.options.get("baseline") is False) or (alone and made.baseline_ttft_ms is not None):
        return "verification: against: the options and times do not tell the same of a baseline"
    counts = {len(s.optimised_ns), *(() if alone else (len(s.baseline_ns), len(s.first)))}
    if alone and (s.baseline_ns or s.first or s.baseline_host_ns):
        return "samples: steps of a baseline, which did not run"
    if counts != {made.iters} or not 1 <= made.iters <= MOST_STEPS:
        return f"samples: {len(s.optimised_ns)}, {len(s.baseline_ns)} and {len(s.first)} for {made.iters!r:.40} iters"
    if min(*s.optimised_ns, *s.baseline_ns, 1) < 1 or set(s.first) - {"0", "1"}:
        return "samples: a time below 1 ns, or a coin that is neither 0 nor 1"
    if s.kept and (len(s.kept) != made.iters or min(s.kept) < 1 or not made.options.get("speculate")):
        drafted = made.options.get("speculate")
        return f"samples: {len(s.kept)} counts of kept tokens, with {drafted!r:.20} drafted a step"
    host = {len(s.optimised_host_ns), *(() if alone else (len(s.baseline_host_ns),))}
    if made.timed_by not in ("host", "CUDA events") or host != {0 if made.timed_by == "host" else made.iters}:
        return f"timed_by, samples: by {made.timed_by!r:.20}, with {sorted(host)} times of the host"
    if made.timed_by == "host":
        return ""
    pairs = zip((*s.optimised_ns, *s.baseline_ns), (*s.optimised_host_ns, *s.baseline_host_ns), strict=True)
    if any(ns > LATER * host_ns + TICK_NS for ns, host_ns in pairs):
        return "samples: a step took longer by CUDA events than until its tokens were on the host"
    return ""


def _shapeless(made: Certificate) -> str:
    """Check for values that no run can have, and for those that would break the arithmetic."""
    if not 0 <= 3 * saved(made) <= made.bytes_per_step:
        return "options: saved_bytes is more than packed weights save"
    if made.shape.batch < 1 or made.bytes_per_step < 1 or not made.tokens_per_step > 0 or made.cache_bytes < 0:
        return "shape, bytes_per_step, tokens_per_step or cache_bytes: below what a run can have"
    if not made.read_probes or any(not p > 0 for p in made.read_probes):
        return "read_probes: none, or a rate that is not above 0"
    if made.read_bytes_per_s < max(made.read_probes):
        return "read_bytes_per_s: below a probe of its own run"
    if any(ms is not None and not ms * NS_PER_MS >= 1 for ms in (made.ttft_ms, made.baseline_ttft_ms)):
        return "ttft_ms, baseline_ttft_ms: a time below 1 ns"
    if made.cost.price_per_hour is not None and not made.cost.price_per_hour > 0:
        return "cost: a price that is not above 0"
    if not 1 <= made.layers.run <= made.layers.of:
        return f"layers: {made.layers.run} of {made.layers.of}"
    if made.model != model_name(model.PART.sub("", made.model), made.layers):
        return f"model: {made.model!r:.60} does not name {made.layers.run} of {made.layers.of} layers"
    taken = [w.half for w in made.ways if w.taken]
    if sorted(taken) != sorted({w.half for w in made.ways}) or set(taken) - set(FUSED_OPS):
        return "ways: not exactly one form is taken for each half of a layer"
    if any(not w.step_us > 0 or w.form not in INSTEAD for w in made.ways):
        return "ways: a time that is not above 0, or an unknown form"
    if set(made.autosel) != set(made.per_op) or set(made.knobs) != set(made.per_op):
        return "autosel, knobs, per_op: they do not name the same ops"
    return ""


def _unprompted(made: Certificate) -> str:
    """Check the prompt's digests: present for a prompt that ran, absent for a cache without one."""
    asked = made.options.get("prompt")
    if asked == "synthetic" or made.version < SINCE["prompt"]:
        return "" if made.prompt is None else "prompt: digests, but no prompt ran"
    if made.prompt is None or not is_checksum(made.prompt.tokens_sha256):
        return "prompt: no sha256 of the tokens that ran"
    named, of_file = asked != "random", made.prompt.file_sha256
    if named and not is_checksum(of_file):
        return f"prompt: no sha256 of the file {asked!r:.60}"
    if of_file and not named:
        return "prompt: a file's sha256, but no file is named"
    return ""


def _unserved(made: Certificate) -> str:
    """Check the counted calls: each op has some, the named candidate served, and the steps make as many.

    A demotion during the run leaves two candidates: both count.
    """
    o, eager = made.options, made.mode.startswith("eager.")  # else a graph or a team makes all calls of a step at once
    listed = eager and o.get("prealloc") is True and not o.get("speculate")
    for label, op in made.per_op.items():
        counts, expected = op.served.values(), op.calls * made.iters
        if any(n < 1 for n in counts):
            return f"per_op: {label!r:.60} served: a candidate with fewer than one call"
        if not counts:
            if eager:
                return f"per_op: {label!r:.60} served: no call of it was counted"
            continue
        if op.candidate not in op.served:
            return f"per_op: {label!r:.60} served: {op.candidate!r:.60} is named, but served no call"
        if listed and (sum(counts) > expected or (sum(counts) < expected and not o.get("advance"))):
            return f"per_op: {label!r:.60} served: {sum(counts)} calls counted, {expected} made by {made.iters} steps"
    return ""


def _unjudged(made: Certificate) -> str:
    """Check the scored text: figures that a scoring can give, and a text for a lossy run."""
    if made.quality is None:
        lost = lossy(made.dtype, weight_format(made), made.weights, stored_format(made))
        return f"quality: {lost} is lossy, but no text was scored" if lost else ""
    stated = dict(made.quality)
    flagged = stated.pop("suspect", None)
    try:
        q: Quality = from_json(Quality, stated)
    except ValueError as error:
        return f"quality: {error!s:.200}"
    if trouble := _impossible_scores(q, q.reference_perplexity):
        return f"quality: {trouble}"
    if flagged is not q.suspect:
        return f"quality: suspect is {flagged!r:.20}; by its own figures it is {q.suspect}"
    return ""


def _impossible_scores(q: Quality | FormatQuality, other_perplexity: float) -> str:
    """Return which score no scoring against this other perplexity can give; "" if all are possible."""
    figures = (q.perplexity, other_perplexity, q.mean_divergence, q.max_divergence)
    if not all(map(math.isfinite, figures)) or min(figures[:2]) < 1 or q.tokens < 1 or q.difference_error < 0:
        return "a perplexity below 1, no tokens, or a negative error"
    if not 0 <= q.mean_divergence <= q.max_divergence or not 0 <= q.same_first <= 1:
        return "a divergence below 0 or above its largest, or a share beyond 1"
    if not math.isclose(math.log(q.perplexity / other_perplexity), q.difference, rel_tol=1e-6, abs_tol=1e-9):
        return "difference: it does not follow from the perplexities"
    return ""


def _beyond_limit(made: Certificate) -> str:
    """Check the scores against the original: figures that a scoring can give, and within the limits unless accepted."""
    stated = made.format_quality
    if stated is None:
        return ""
    try:
        q = measured(stated)
    except ValueError as error:
        return f"format_quality: {error!s:.200}"
    if trouble := _impossible_scores(q, q.original_perplexity):
        return f"format_quality: {trouble}"
    if not 0 <= q.p999_divergence <= q.max_divergence or not isinstance(stated.get("accepted"), bool):
        return "format_quality: a divergence below 0 or above its largest, or accepted is neither true nor false"
    over = "" if stated["accepted"] else beyond(weight_format(made), q)
    return f"format_quality: beyond its limit, but not accepted: {over.replace(chr(10), '; ')}" if over else ""


def _miscalculated(made: Certificate) -> str:
    try:
        found = derive(made)
    except (ArithmeticError, AutoselError) as error:
        return f"a figure cannot be computed again: {error!s:.200}"
    for name, value in values(found).items():
        if SINCE.get(name, 0) <= made.version and not _same(getattr(made, name), value):
            return f"{name}: it does not follow from the rest of the certificate"
    return ""


def _same(stated: Any, computed: Any) -> bool:
    """Compare, except the last bits of floats: another machine's libm may round a sum differently."""
    if isinstance(stated, float) and isinstance(computed, (int, float)):
        return math.isclose(stated, computed, rel_tol=1e-12)
    if hasattr(stated, "__dataclass_fields__") and type(stated) is type(computed):
        return all(_same(getattr(stated, n), getattr(computed, n)) for n in stated.__dataclass_fields__)
    if isinstance(stated, tuple) and isinstance(computed, tuple):
        return len(stated) == len(computed) and all(map(_same, stated, computed))
    return bool(stated == computed)


def _impossible(made: Certificate) -> str:
    for name, found in physics(made).items():
        if not found.possible:
            needed, most = found.needed_bytes_per_s / 1e9, found.allowed_bytes_per_s / 1e9
            return f"latency_ms: {name} would read {needed:.3g} GB/s of at most {most:.3g} GB/s: impossible"
    steps_ms = [made.latency_ms.med, *([made.baseline.med] if made.baseline else [])]
    flops, most = made.flops_per_step / min(steps_ms) * 1e3, device.ceiling(made).flops
    if flops > most:
        return f"latency_ms: a step would take {flops:.3g} FLOP/s of at most {most:.3g}: impossible"
    return ""
