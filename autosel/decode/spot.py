"""Spot checks of a thread team's tasks: a few elements of a task's results are recomputed natively.

    checks = checks_of(step, fp)          # one for each task of the step, or None
    checks[i](seed)                       # largest |got - expected| / tolerance, right after task i

A task reads and writes the buffers of the list of calls that it came from, until a later layer reuses them. Its check
reads the same buffers, the list's own weights (a team's packed ones are copies) and the caches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from autosel import ops
from autosel.decode.program import PRODUCTS
from autosel.decode.step import Call, Step, StepPart
from autosel.decode.watch import Check
from autosel.errors import BuildError
from autosel.guard import spot
from autosel.guard.spot import Spot
from autosel.knobs.cpu.facts import facts
from autosel.native.compile import compile_source
from autosel.values import Fingerprint


def checks_of(step: Step, tasks: Sequence[StepPart], token: Tensor | None, fp: Fingerprint) -> tuple[Check | None, ...]:
    """Return each task's check; no checks if they cannot be compiled.

    `token` is where the last task writes the index of each row's largest logit.
    """
    weights, isa = step.decoder.weights, facts(fp).isa
    made = spot.recipe(weights.dtype, isa)
    try:
        compile_source(made.source, made.flags)
    except BuildError:
        return (None,) * len(tasks)
    natives = {name: found for name in NATIVES if (found := spot.find_named(name, weights.dtype, isa)) is not None}
    before = [None, *tasks[:-1]]
    return tuple(
        _check_of(step, task, earlier, natives, token if task is tasks[-1] else None)
        for earlier, task in zip(before, tasks, strict=True)
    )


NATIVES = (*PRODUCTS, "add_rmsnorm", "sample", "step_attend")


def _check_of(
    step: Step, task: StepPart, earlier: StepPart | None, natives: Mapping[str, Spot], token: Tensor | None
) -> Check | None:
    main = task.calls[0]
    if main.op == "glue":
        return partial(_embedded, step, main)
    if main.op == "attn":
        assert earlier is not None, "a projection precedes attention"
        return _attention(step, task, earlier.calls[0]["y"], natives["step_attend"])
    if main.op not in PRODUCTS or any(not isinstance(main[name], Tensor) for name in main.weights):
        return None  # a weight in a format has no check
    parts = [_product(step, task, natives)]
    parts += [_sandwich(call, natives["add_rmsnorm"]) for call in task.calls[1:] if call.op == "add_rmsnorm"]
    parts += [_largest(main, token, natives["sample"])] if token is not None else []
    return partial(_worst, parts)


def _worst(checks: Sequence[Check], seed: int) -> float:
    return max(check(seed) for check in checks)


def _embedded(step: Step, call: Call, seed: int) -> float:
    """Check one row of the embedding, bit by bit."""
    row = seed % len(call["tokens"])
    scale = torch.tensor(step.decoder.shape.embedding_scale, dtype=call["out"].dtype)
    expected = step.decoder.weights.look_up(call.weights["table"], call["tokens"][row : row + 1]) * scale
    return 0.0 if torch.equal(expected[0], call["out"][row]) else float("inf")


def _product(step: Step, task: StepPart, natives: Mapping[str, Spot]) -> Check:
    """Return the check of a projection; if a norm precedes it, whose result is not stored, of both together."""
    main = task.calls[0]
    norm = next((call for call in task.calls[1:] if call.op == "rmsnorm"), None)
    assert main.workload is not None
    contract = ops.find(main.op)
    args = [main[a.name] for a in contract.args]
    made = [main[spec.name] for spec in contract.outputs(main.workload)]
    if norm is None:
        return partial(natives[main.op], args, made)
    eps, offset = step.decoder.norm
    return partial(natives["norm_qkv"], [norm["x"], norm["weight"], main["w"], float(eps), float(offset)], made)


def _sandwich(call: Call, native: Spot) -> Check:
    args = [call[name] for name in ("x", "residual", "weight", "eps", "offset", "sandwich")]
    return partial(native, args, [None, call["new_residual"]])


def _largest(head: Call, token: Tensor, native: Spot) -> Check:
    """Check that the token has a largest logit, as the op `sample` gives at temperature 0."""
    greedy, unused = torch.zeros(len(token)), torch.ones(len(token))
    return partial(native, [head["logits"], unused, greedy, unused, unused, torch.ones(len(token)), unused], [token])


def _attention(step: Step, task: StepPart, qkv: Tensor, native: Spot) -> Check:
    """Return the check from qkv to attention's result, including the caches' new slot."""
    attn, by_site = task.calls[0], {call.site: call for call in task.calls}
    append = next(call for call in task.calls if call.op == "kv_append")
    q_norm, k_norm = (by_site[site]["weight"] if site in by_site else None for site in ("q norm", "k norm"))
    shape, (eps, offset) = step.decoder.shape, map(float, step.decoder.norm)
    window = shape.window if shape.layer_types[attn.layer] == "sliding" else 0
    place, rope = step.place, by_site["rope"]
    fixed = [rope["positions"], rope["inv_freq"], int(rope["style"]), append["positions"], place.lengths]
    caches = [append["k_cache"], append["v_cache"], float(attn["scale"]), window, float(attn["softcap"])]
    return partial(native, [qkv, q_norm, k_norm, eps, offset, *fixed, *caches], [attn["o"]])
