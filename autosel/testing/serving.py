"""Make a home in which given candidates serve given workloads without a race, for tests of serving."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autosel.candidates import arms, registry
from autosel.dispatch.board import this_device
from autosel.ledger import snapshot
from autosel.ledger.key import current_mode, serving_key
from autosel.native.compile import compile_source
from autosel.values import Arm, Decision, Fingerprint, Knobs, NativeRecipe, Workload, to_json


def arm_of(w: Workload, name: str, device: Fingerprint | None = None) -> Arm:
    """Return the candidate's arm; compile it if needed (artefacts are kept between runs)."""
    candidate, device = registry.find(w.op, name), device or this_device()
    knobs = candidate.knobs(w, device)
    recipe = candidate.recipe(w, device, knobs)
    built = compile_source(recipe.source, recipe.flags).digest if isinstance(recipe, NativeRecipe) else ""
    return arms.arm(candidate, w, device, built, knobs)


def pinned(w: Workload, name: str, number: int = 1, device: Fingerprint | None = None) -> Decision:
    device = device or this_device()
    return Decision(
        id=number,
        state="pinned",
        hw_id=device.hw_id,
        op=w.op,
        bucket=w.bucket,
        mode=current_mode(),
        workload=w,
        arm=arm_of(w, name, device),
        baseline=arms.arm(registry.baseline(w.op), w, device, "", Knobs()),
        verdict=None,
        reason="for the test",
        created_at="2026-01-01T00:00:00Z",
    )


def publish(home: Path, decisions: Iterable[Decision]) -> Path:
    """Return the home, after publishing a snapshot of these decisions."""
    rows = [
        {"key": serving_key(d.hw_id, d.mode, d.bucket, d.length_range), "epoch": 1, "decision": to_json(d)}
        for d in decisions
    ]
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    snapshot.publish(home / snapshot.FILE, snapshot.document(1, rows))
    return home


def serve(home: Path, chosen: Iterable[tuple[Workload, str]], device: Fingerprint | None = None) -> Path:
    """Pin one decision for each bucket of the workloads, on this CPU or another device."""
    by_bucket = {w.bucket: (w, name) for w, name in chosen}
    return publish(home, (pinned(w, name, i + 1, device) for i, (w, name) in enumerate(by_bucket.values())))
