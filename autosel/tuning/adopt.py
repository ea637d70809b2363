"""Adopt a decision of another host: build the same arm on this host, prove it, and only then let it serve.

The recipe must equal the one that this autosel derives for the candidate and knobs, and the build must have the digest
that the other host measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autosel.candidates import registry
from autosel.candidates.base import support_of
from autosel.errors import AutoselError, BuildError, UnknownName
from autosel.fingerprint import unit
from autosel.ledger.commands import Adopt
from autosel.ledger.key import current_mode
from autosel.ledger.store import Ledger
from autosel.native.compile import compile_source
from autosel.parity.check import check
from autosel.tuning.job import Buildable, TuneListener
from autosel.tuning.prove import knobs_of, proof_of
from autosel.tuning.shortlist import way_of
from autosel.values import Accepted, Decision, Failed, Fingerprint, NativeRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """Result for a decision that was offered to this host. `reason`: why it does not serve; empty if it does."""

    decision: Decision
    reason: str


def adopt(ledger: Ledger, fp: Fingerprint, listener: TuneListener, *, device: str = "cpu") -> Iterator[Adoption]:
    """Prove the decisions of other hosts for this kind of device, in this process's mode, each separately.

    Raises LedgerError if another process measures on the device.
    """
    with ledger.lock(fp.hw_id, unit(device)):
        offered = ledger.offered(fp.hw_id, current_mode())
        for done, decision in enumerate(offered):
            listener.stage("parity", decision.arm.candidate, done, len(offered))
            try:
                reason = _adopt(ledger, fp, decision, device)
            except BuildError as error:
                reason = f"{decision.arm.candidate} does not build here: {error.what}"
            yield Adoption(decision=decision, reason=reason)


def _adopt(ledger: Ledger, fp: Fingerprint, decision: Decision, device: str) -> str:
    """Adopt one decision; return the reason if it does not serve here, else "". Raises BuildError."""
    try:
        way = _same_way(fp, decision)
    except AutoselError as error:
        return error.what
    if way.build_digest in (held := ledger.quarantined(fp.hw_id, decision.op)) or way.arm.digest in held:
        return f"{decision.arm.candidate} is in quarantine"
    if isinstance(way.recipe, NativeRecipe):
        compile_source(way.recipe.source, way.recipe.flags)
    with ledger.trial(fp.hw_id, decision.op, way.arm):
        parity = check(proof_of(way, decision.workload), fp=fp, device=device)
    if ledger.write(Adopt(decision_id=decision.id, parity=parity)):
        return ""
    return f"parity: {parity.check}: {parity.reason}" if isinstance(parity, Failed) else "the decision no longer serves"


def _same_way(fp: Fingerprint, decision: Decision) -> Buildable:
    """Return the decision's arm as this host builds it. Raises AutoselError if it differs from the decision's."""
    w, theirs = decision.workload, decision.arm
    try:
        candidate = registry.find(w.op, theirs.candidate)
    except UnknownName as error:
        raise AutoselError(f"candidate {theirs.candidate} does not exist here") from error
    support = support_of(candidate, w, fp)
    if not isinstance(support, Accepted):
        raise AutoselError(f"{theirs.candidate} cannot run here: {support.reason}")
    way = way_of(candidate, w, fp, knobs_of(theirs))
    if (way.recipe, way.arm.build, way.arm.digest) != (theirs.recipe, theirs.build, theirs.digest):
        raise AutoselError(f"{theirs.candidate} is another build here (sources, compiler or libraries differ)")
    baseline = way_of(registry.baseline(w.op), w, fp)
    if baseline.arm.digest != decision.baseline.digest:
        raise AutoselError(f"the decision compares with another version of {decision.baseline.candidate}")
    return way
