"""What a step is made of: which candidate served each op, what each op took, what it must move, what Python costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autosel import dispatch, ops
from autosel.candidates import registry
from autosel.decode.device import time_calls
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
AS_IT_WAS = "PyTorch takes the whole step"  # the reason of a baseline that no decision chose


# --- bytes -----------------------------------------------------------------------------------------------------------


def saved_bytes(step: object) -> int:
    """What the step reads less than its ops with plain weights would: of prepared weights (candidates.layouts)."""
    if isinstance(step, Step):
        return sum(_saved_by(call) for call in step.calls)
    return sum(saved_bytes_of(task) for task in getattr(step, "tasks", ()))


def _saved_by(call: Call) -> int:
    """Of one call: by the layout of the kernel that serves it."""
    reader = getattr(call.function, "reader", None)
    return 0 if reader is None else reader.saved_bytes({a.name: call[a.name] for a in reader.op.args})


def saved_bytes_of(task: object) -> int:
    found: int = getattr(task, "saved_bytes", 0)
    return found


# --- who served ------------------------------------------------------------------------------------------------------


def names(plan: Plan) -> Mapping[str, str]:
    """Workload key -> label, at the context of the first timed step."""
    return labels(plan.shape, batch=plan.batch, context=plan.seq, dtype=plan.dtype)


def choices_of(step: AnyStep, plan: Plan) -> tuple[Choice, ...]:
    """From the callables that the step is bound to, in the order a step runs them; of a whole step, from its tasks; the
    baselines of PyTorch's step."""
    if isinstance(step, TorchStep):
        replaced = _by_workload(step.replaced).values()
        return (*_choices_of_torch(replaced, plan), *_choices_of_list(step.last, plan))
    step = step.ops if isinstance(step, GraphStep) else step
    return _choices_of_list(step.calls, plan) if isinstance(step, Step) else _choices_of_whole(step, plan)


def _choices_of_list(calls: Sequence[Call], plan: Plan) -> tuple[Choice, ...]:
    return tuple(_choice_of(c, plan) for c in _by_workload(calls).values() if c[0].workload is not None)


def _choices_of_torch(groups: Iterable[Sequence[Call]], plan: Plan) -> Iterator[Choice]:
    for calls in groups:
        w = calls[0].workload
        if w is not None:
            yield _choice(w, len(calls), plan, registry.baseline(w.op).name, None, AS_IT_WAS)


def _choice_of(calls: Sequence[Call], plan: Plan) -> Choice:
    """Of a workload's calls in a step, all bound to one callable."""
    w, bound = calls[0].workload, calls[0].function
    assert w is not None
    return _choice(w, len(calls), plan, bound.candidate, bound.decision, bound.reason)  # type: ignore[attr-defined]


def _choices_of_whole(step: WholeStep, plan: Plan) -> tuple[Choice, ...]:
    """The kernels that the tasks are made of. A decision stands behind one where it chose that very kernel."""
    made = []
    for calls in _by_workload([call for task in step.tasks for call in task.calls]).values():
        w, function = calls[0].workload, calls[0].function
        if w is not None:
            kernel, decision = step.kernels[w.op], getattr(function, "decision", None)
            made.append(_choice(w, len(calls), plan, kernel, decision, f"a task of {step.candidate}"))
    rest = _by_workload(step.rest).values()
    return (*made, *(_choice_of(calls, plan) for calls in rest if calls[0].workload is not None))


def _by_workload(calls: Sequence[Call]) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    for call in calls:
        found.setdefault(call.workload.key if call.workload else call.site, []).append(call)
    return found


class Uses:
    """What ran from here on, by the counters in the callables themselves."""

    def __init__(self) -> None:
        self.before = {key: count for key, (_, count) in _counts().items()}
        self.counted = dispatch.board().counted()

    def served(self) -> Mapping[str, Mapping[str, int]]:
        """Workload key -> candidate -> calls: proof of use, whatever bound the callables."""
        found: dict[str, dict[str, int]] = {}
        for key, count in dispatch.board().counted().items():
            w, candidate, *_ = key
            calls = count - self.counted.get(key, 0)
            if calls and not isinstance(w, str):
                of = found.setdefault(w.key, {})
                of[candidate] = of.get(candidate, 0) + calls
        return found

    def choices(self, plan: Plan, steps: int) -> tuple[Choice, ...]:
        """Averaged over so many steps; a workload run less than every other step is left out."""
        found = []
        for key, (r, count) in _counts().items():
            each = round((count - self.before.get(key, 0)) / steps)
            if each:
                found.append(_choice(r.workload, each, plan, r.candidate, r.decision, r.reason))
        return tuple(found)


def _counts() -> dict[str, tuple[Resolution, int]]:
    """How often each workload ran; one that came in several layouts or cache lengths is counted once."""
    found: dict[str, tuple[Resolution, int]] = {}
    for op in ops.OPS:
        for resolution, count in dispatch.best(op).uses():
            key = resolution.workload.key
            found[key] = resolution, count + (found[key][1] if key in found else 0)
    return found


def proven(choices: Sequence[Choice], served: Mapping[str, Mapping[str, int]]) -> tuple[Choice, ...]:
    """Each with what its workload's counter says."""
    return tuple(replace(c, served=tuple(sorted(served.get(c.workload_key, {}).items()))) for c in choices)


def _choice(w: Workload, count: int, plan: Plan, candidate: str, decision: Decision | None, reason: str) -> Choice:
    served = decision is not None and decision.state in SERVING and candidate == decision.arm.candidate
    return Choice(
        op=w.op,
        label=names(plan).get(w.key, ops.find(w.op).label(w)),
        workload_key=w.key,
        count_per_step=count,
        backend=registry.find(w.op, candidate).backend,
        candidate=candidate,
        decision_id=decision.id if decision is not None and served else None,
        state=decision.state if decision is not None and served else "baseline",
        reason=reason,
    )


# --- how long each took ----------------------------------------------------------------------------------------------


def time_ops(step: AnyStep, plan: Plan, clock: Callable[[], int]) -> tuple[OpTime, ...]:
    """Medians over every call of each op in whole steps with a clock around each op; none of PyTorch's step."""
    if isinstance(step, TorchStep):
        return ()
    step = step.ops if isinstance(step, GraphStep) else step
    if not isinstance(step, Step):
        return _time_tasks(step, plan)
    samples: list[list[int]] = [[] for _ in step.calls]
    for _ in range(OP_ROUNDS):
        for took, ns in zip(samples, time_calls(step, clock), strict=True):
            took.append(ns)
    by_key: dict[str, list[int]] = {}
    for took, call in zip(samples, step.calls, strict=True):
        by_key.setdefault(call.workload.key if call.workload else call.site, []).extend(took)
    groups = _by_workload(step.calls)
    times = {key: _op_time(calls, by_key[key], plan) for key, calls in groups.items()}
    saved = {key: sum(map(_saved_by, calls)) // len(calls) for key, calls in groups.items()}
    return tuple(replace(t, bytes_moved=t.bytes_moved - saved[key]) for key, t in times.items())


def _time_tasks(step: WholeStep, plan: Plan) -> tuple[OpTime, ...]:
    """As the device's own clock saw them: from the end of the task before to the end of this one. What a task does
    besides the op that it is named after (norms, rotation, append) is in its time."""
    main = [task.calls[0] for task in step.tasks]
    saved: dict[str, list[int]] = {}
    for task in step.tasks[1:]:
        call = task.calls[0]
        saved.setdefault(call.workload.key if call.workload else call.site, []).append(saved_bytes_of(task))
    took: dict[str, list[int]] = {}
    for _ in range(OP_ROUNDS):
        ends = step.task_ns()
        for call, begin, end in zip(main[1:], ends, ends[1:], strict=False):  # the first begins with the call itself
            took.setdefault(call.workload.key if call.workload else call.site, []).append(end - begin)
    groups = _by_workload(main[1:])
    times = {key: _op_time(calls, took[key], plan) for key, calls in groups.items()}
    return tuple(replace(t, bytes_moved=t.bytes_moved - sum(saved[key]) // len(saved[key])) for key, t in times.items())


def _op_time(calls: Sequence[Call], took_ns: Sequence[int], plan: Plan) -> OpTime:
    w, op = calls[0].workload, calls[0].op
    contract = ops.find(op) if w is not None else None
    return OpTime(
        op=op,
        label=names(plan).get(w.key, contract.label(w)) if w is not None and contract is not None else calls[0].site,
        workload_key=w.key if w is not None else "",
        count_per_step=len(calls),
        median_us=statistics.median(took_ns) / 1000,
        bytes_moved=_bytes_moved(calls[0], plan),
        flops=contract.flops(w) if w is not None and contract is not None else 0,
    )


def _bytes_moved(call: Call, plan: Plan) -> int:
    """What one call moves, by the operands that it has now: sequences of a batch differ in length."""
    if call.workload is None:
        return _glue_bytes(call, plan)
    contract = ops.find(call.op)
    return contract.bytes_moved(call.workload, {a.name: call[a.name] for a in contract.args})


def _glue_bytes(call: Call, plan: Plan) -> int:
    """Embedding rows or a packed copy: what is written, and as much read. Of the greedy choice, the logits."""
    if call.site == "argmax":
        return int(call["logits"].numel()) * DTYPE_BYTES[plan.dtype]
    return 2 * int(call["out"].numel()) * DTYPE_BYTES[plan.dtype]


# --- what Python costs -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nothing:
    """A list like a step's, every op bound in the same way to a kernel that does nothing."""

    flat: list[tuple[Callable[..., object], list[object]]]

    def run(self) -> None:
        for function, arguments in self.flat:
            function(*arguments)


def overhead_ns(step: AnyStep, clock: Callable[[], int]) -> float | None:
    """Median time to go through the step's list, through the cell behind every op, with no work done; of a whole step,
    to call it with nothing to do; of a graph, until the call that replays it has returned. None of PyTorch's step."""
    if isinstance(step, TorchStep):
        return None
    if isinstance(step, Step):
        idle = _Nothing(flat=[(_idle(call), call.arguments) for call in step.calls]).run
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
