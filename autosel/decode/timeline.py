"""Timeline of one step, for traces: which thread ran which op when.

A list of ops has one lane, on a CPU the thread that calls them, on a GPU its stream. A thread team has a lane for each
thread; in its gaps the thread waits for the others. A GPU that runs the whole step in one launch has one lane, in which
a task ends when its last thread block does. The ops of a CUDA graph are timed one by one, outside the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autosel import devices
from autosel.decode.account import label
from autosel.decode.graph import GraphStep
from autosel.decode.persistent import AnyStep
from autosel.decode.run import Plan, Span
from autosel.decode.step import Call, Step, WholeStep
from autosel.decode.torch_step import TorchStep

ROUNDS = 3  # steps that are timed, of which the one of median length is kept

Lanes = dict[str, list[tuple[int, int]]]  # lane -> begin and end of each call or task, in ns since the step began


def timeline(step: AnyStep, plan: Plan, clock: Callable[[], int]) -> tuple[Span, ...]:
    """Return the spans of a step of median length, by lane and in order; none for PyTorch's own step."""
    if isinstance(step, TorchStep):
        return ()
    step = step.ops if isinstance(step, GraphStep) else step
    rounds = sorted((_lanes(step, clock) for _ in range(ROUNDS)), key=_length)
    parts = [(call,) for call in step.calls] if isinstance(step, Step) else [task.calls for task in step.tasks]
    shown = [_named(calls, step, plan) for calls in parts]
    return tuple(
        Span(lane=lane, begin_ns=begin, end_ns=end, **about)
        for lane, spans in rounds[ROUNDS // 2].items()
        for about, (begin, end) in zip(shown, spans, strict=True)
        if end > begin
    )


def _lanes(step: Step | WholeStep, clock: Callable[[], int]) -> Lanes:
    if not isinstance(step, Step):
        return step.shares_ns()
    device = devices.of(step.logits)
    return {"calling thread" if device.on_host else "stream": device.call_spans(step.calls, clock)}


def _length(lanes: Lanes) -> int:
    return max(spans[-1][1] for spans in lanes.values())


def _named(calls: Sequence[Call], step: Step | WholeStep, plan: Plan) -> dict[str, str]:
    """Return the name of a call, or of a task by the slowest of its calls, and its kernel."""
    first = calls[0]
    named = first.site if first.workload is None else label(first.workload, plan)
    kernels = {} if isinstance(step, Step) else step.kernels
    candidate = str(kernels.get(first.op) or getattr(first.function, "candidate", ""))
    also = ", ".join(call.site for call in calls[1:])
    return {"label": named, "site": first.site, "also": also, "candidate": candidate}
