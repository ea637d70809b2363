"""Account of a step: the candidate that served each op, each op's time and bytes, and the cost of Python."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from autosel import devices, dispatch, ops
from autosel.candidates import registry
from autosel.decode.graph import GraphStep
from autosel.decode.persistent import AnyStep
from autosel.decode.run import Choice, OpTime, Plan
from autosel.decode.step import Call, Step, WholeStep
from autosel.decode.torch_step import TorchStep
from autosel.dispatch.bound import make_bound
from autosel.dispatch.resolve import Resolution
from autosel.models import labels
from autosel.values import DTYPE_BYTES, SERVING, Decision, Workload

OP_ROUNDS = 11
OVERHEAD_ROUNDS = 51
AS_IT_WAS = "PyTorch takes the whole step"  # reason of a baseline without a decision


# --- bytes -----------------------------------------------------------------------------------------------------------


def saved_bytes(step: object) -> int:
    """Return how many bytes less than with plain weights the step reads, because of layouts (candidates.layouts)."""
    if isinstance(step, Step):
        return sum(_saved_by(call) for call in step.calls)
    return sum(saved_bytes_of(task) for task in getattr(step, "tasks", ()))


def _saved_by(call: Call) -> int:
    reader = getattr(call.function, "reader", None)
    return 0 if reader is None else reader.saved_bytes({a.name: call[a.name] for a in reader.op.args})


def saved_bytes_of(task: object) -> int:
    found: int = getattr(task, "saved_bytes", 0)
    return found


# --- candidates ------------------------------------------------------------------------------------------------------


def label(w: Workload, plan: Plan) -> str:
    """Return a workload's name in tables, at the context of the first timed step."""
    known = labels(plan.shape, batch=plan.batch, context=plan.seq, dtype=plan.dtype)
    return known.get(w.key, ops.find(w.op).label(w))


def choices_of(step: AnyStep, plan: Plan) -> tuple[Choice, ...]:
    """Return the candidates of a step in the order in which they run.

    They come from the callables of a list, from the tasks of a whole step, or, for PyTorch's step, are the baselines.
    """
    if isinstance(step, TorchStep):
        replaced = (
            _choice(w, len(calls), plan, registry.baseline(w.op).name, None, AS_IT_WAS)
            for w, calls in _with_workload(step.replaced)
        )
        return (*replaced, *_choices_of_list(step.last, plan))
    step = step.ops if isinstance(step, GraphStep) else step
    return _choices_of_list(step.calls, plan) if isinstance(step, Step) else _choices_of_whole(step, plan)


def _choices_of_list(calls: Sequence[Call], plan: Plan) -> tuple[Choice, ...]:
    """Return the choices for a list's calls; those of one workload share one callable."""
    made = []
    for w, same in _with_workload(calls):
        bound: Any = same[0].function
        made.append(_choice(w, len(same), plan, bound.candidate, bound.decision, bound.reason))
    return tuple(made)


def _choices_of_whole(step: WholeStep, plan: Plan) -> tuple[Choice, ...]:
    """Return the kernels of the tasks. One has a decision only if the decision chose that kernel."""
    made = []
    for w, calls in _with_workload([call for task in step.tasks for call in task.calls]):
        kernel, decision = step.kernels[w.op], getattr(calls[0].function, "decision", None)
        made.append(_choice(w, len(calls), plan, kernel, decision, f"a task of {step.candidate}"))
    return (*made, *_choices_of_list(step.rest, plan))


def _with_workload(calls: Sequence[Call]) -> Iterator[tuple[Workload, Sequence[Call]]]:
    """Yield each workload with its calls; glue has none."""
    for same in _by_workload(calls).values():
        if same[0].workload is not None:
            yield same[0].workload, same


def _by_workload(calls: Sequence[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(_key(call), []).append(call)
    return found


def _key(call: Call) -> str:
    return call.workload.key if call.workload else call.site


class UsesSince:
    """Calls since this object was made, by the callables' own counters, without those that were dropped."""

    def __init__(self) -> None:
        self.before = {key: count for key, (_, count) in _counts().items()}
        self.counted = dispatch.board().counted()
        self.mark()

    def mark(self) -> None:
        """Let `drop` leave out the calls from now on."""
        self.marked = {key: count for key, (_, count) in _counts().items()}, dispatch.board().counted()

    def drop(self) -> None:
        """Leave out the calls since the mark."""
        for key, (_, count) in _counts().items():
            self.before[key] = self.before.get(key, 0) + count - self.marked[0].get(key, 0)
        for use, calls in dispatch.board().counted().items():
            self.counted[use] = self.counted.get(use, 0) + calls - self.marked[1].get(use, 0)

    def served(self) -> Mapping[str, Mapping[str, int]]:
        """Return calls by workload key and candidate, which prove that these candidates ran."""
        found: dict[str, dict[str, int]] = {}
        for key, count in dispatch.board().counted().items():
            w, candidate, *_ = key
            calls = count - self.counted.get(key, 0)
            if calls and not isinstance(w, str):
                of = found.setdefault(w.key, {})
                of[candidate] = of.get(candidate, 0) + calls
        return found

    def choices(self, plan: Plan, steps: int) -> tuple[Choice, ...]:
        """Return the choices averaged over the steps; workloads in fewer than half of the steps are left out."""
        found = []
        for key, (r, count) in _counts().items():
            each = round((count - self.before.get(key, 0)) / steps)
            if each:
                found.append(_choice(r.workload, each, plan, r.candidate, r.decision, r.reason))
        return tuple(found)


def _counts() -> dict[str, tuple[Resolution, int]]:
    """Return how often each workload ran; layouts and cache lengths of one workload are counted together."""
    found: dict[str, tuple[Resolution, int]] = {}
    for op in ops.OPS:
        for resolution, count in dispatch.best(op).uses():
            key = resolution.workload.key
            found[key] = resolution, count + (found[key][1] if key in found else 0)
    return found


def proven(choices: Sequence[Choice], served: Mapping[str, Mapping[str, int]]) -> tuple[Choice, ...]:
    """Return each choice with the calls that its workload's counter shows."""
    return tuple(replace(c, served=tuple(sorted(served.get(c.workload_key, {}).items()))) for c in choices)


def _choice(w: Workload, count: int, plan: Plan, candidate: str, decision: Decision | None, reason: str) -> Choice:
    served = decision is not None and decision.state in SERVING and candidate == decision.arm.candidate
    return Choice(
        op=w.op,
        label=label(w, plan),
        workload_key=w.key,
        count_per_step=count,
        backend=registry.find(w.op, candidate).backend,
        candidate=candidate,
        decision_id=decision.id if decision is not None and served else None,
        state=decision.state if decision is not None and served else "baseline",
        reason=reason,
    )


# --- times -----------------------------------------------------------------------------------------------------------


def time_ops(step: AnyStep, plan: Plan, clock: Callable[[], int]) -> tuple[OpTime, ...]:
    """Return the median time of each op in whole steps; none for PyTorch's step.

    In a list a clock is around each op. Tasks are timed by the device's clock, from the end of the previous task to the
    end of this one, without the first, whose time includes the call itself. Their time includes the task's other work
    besides its named op (norms, rotation, append).
    """
    if isinstance(step, TorchStep):
        return ()
    step = step.ops if isinstance(step, GraphStep) else step
    if isinstance(step, Step):
        calls, saved = step.calls, [_saved_by(call) for call in step.calls]
    else:
        calls, saved = [t.calls[0] for t in step.tasks[1:]], [saved_bytes_of(t) for t in step.tasks[1:]]
    took: dict[str, list[int]] = {}
    for _ in range(OP_ROUNDS):
        spans = devices.of(step.logits).call_spans(calls, clock) if isinstance(step, Step) else pairwise(step.task_ns())
        for call, (begin, end) in zip(calls, spans, strict=True):
            took.setdefault(_key(call), []).append(end - begin)
    less: dict[str, list[int]] = {}
    for call, count in zip(calls, saved, strict=True):
        less.setdefault(_key(call), []).append(count)
    return tuple(
        _op_time(same, took[key], sum(less[key]) // len(same), plan) for key, same in _by_workload(calls).items()
    )


def _op_time(calls: Sequence[Call], took_ns: Sequence[int], saved: int, plan: Plan) -> OpTime:
    w, op = calls[0].workload, calls[0].op
    return OpTime(
        op=op,
        label=label(w, plan) if w is not None else calls[0].site,
        workload_key=w.key if w is not None else "",
        count_per_step=len(calls),
        median_us=statistics.median(took_ns) / 1000,
        bytes_moved=_bytes_moved(calls[0], plan) - saved,
        flops=ops.find(op).flops(w) if w is not None else 0,
    )


def _bytes_moved(call: Call, plan: Plan) -> int:
    """Return the bytes of one call with its current operands: sequences of a batch differ in length."""
    if call.workload is None:
        return _glue_bytes(call, plan)
    contract = ops.find(call.op)
    return contract.bytes_moved(call.workload, {a.name: call[a.name] for a in contract.args})


def _glue_bytes(call: Call, plan: Plan) -> int:
    """Return the bytes of embedding rows or a packed copy, written and read; for the greedy choice, the logits."""
    if call.site == "argmax":
        return int(call["logits"].numel()) * DTYPE_BYTES[plan.dtype]
    return 2 * int(call["out"].numel()) * DTYPE_BYTES[plan.dtype]


# --- cost of Python --------------------------------------------------------------------------------------------------


def overhead_ns(step: AnyStep, clock: Callable[[], int]) -> float | None:
    """Return the median time of a step's Python part, with no work done; None for PyTorch's step.

    For a list this goes through the cell of every op. For a whole step it is a call with no task. For a graph it is the
    call that starts the replay.
    """
    if isinstance(step, TorchStep):
        return None
    if isinstance(step, Step):
        flat = [(_idle(call), call.arguments) for call in step.calls]

        def idle() -> None:
            for function, arguments in flat:
                function(*arguments)

    elif isinstance(step, GraphStep):
        idle = step.replay
    else:
        idle = step.idle()
    times = []
    for _ in range(OVERHEAD_ROUNDS):
        begin = clock()
        idle()
        times.append(clock() - begin)
    step.settle()
    return statistics.median(times)


def _idle(call: Call) -> Callable[..., object]:
    def nothing(*arguments: object) -> None:
        return None

    if call.workload is None:
        return nothing
    resolution = Resolution(workload=call.workload, run=nothing, candidate="", decision=None, reason="")
    return make_bound(ops.find(call.op), resolution, nothing, nothing)[0]
