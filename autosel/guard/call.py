"""One checked call: both arms on the same inputs, with separate outputs, so that either result can be served.

Memory that an op writes in place is copied first, and restored between the arms. Small operands are copied too, so that
a candidate that writes into its inputs does not spoil them for the baseline.

Arms are compared by the clock of their race: on a GPU by events around each arm, on a stream that is held while they
are enqueued. The host's launch overhead does not count, as in a graph and in the race.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autosel import devices
from autosel.devices.device import Device
from autosel.ops.contract import Mismatch, Op, Rows, Written
from autosel.values import Workload

Kernel = Callable[..., Any]
Clock = Callable[[], int]
KEPT_BYTES = 16 << 20  # operands are copied if they are smaller than this together; weights and caches are not copied


@dataclass(slots=True, kw_only=True)
class Result:
    """Result of an arm: `outputs` to judge, or the error that it raised."""

    arm: Kernel
    outputs: tuple[Any, ...] = ()
    error: Exception | None = None
    ns: int = 0  # cost of a call for its caller: on a GPU the longer of host time and device time
    raced_ns: int = 0  # by the clock of its race: on a GPU only the device's
    spoilt: str = ""  # an input that it changed
    own: bool = False  # the error came from the arm, not from the check around it
    broke: bool = False  # the device answered before the arm ran, and not afterwards


@dataclass(slots=True)
class CheckedCall:
    """A call to check. Raises BadArguments for arguments outside the op's contract."""

    op: Op
    args: Sequence[Any]
    outs: Sequence[Any]
    clock: Clock = time.perf_counter_ns
    inputs: dict[str, Any] = field(init=False)
    workload: Workload = field(init=False)
    written: Written | None = field(init=False)
    kept: dict[str, Tensor] = field(init=False)
    last: Result | None = None  # the result whose in-place writes the operands hold now

    def __post_init__(self) -> None:
        self.inputs = {a.name: value for a, value in zip(self.op.args, self.args, strict=True)}
        self.workload = self.op.workload_of(self.inputs)
        self.written = self.op.written(self.workload, self.inputs)
        self.kept = _keep(self.op, self.inputs)

    # --- running ----------------------------------------------------------------------------------------------------

    def run(self, arm: Kernel) -> Result:
        """Run an arm without raising: on a device that an arm has broken, even reading its inputs raises, which must
        not hide the cause.
        """
        result = Result(arm=arm)
        try:
            if self.written is not None and self.last is not None:
                self.written.restore()
            outs = tuple(_alike(out) for out in self.outs)
            _settle(self.args)
            marks = _held(self.args)
        except Exception as error:
            result.error = error
        else:
            self._time(result, outs, marks)
        try:
            result.spoilt = self._mend()
        except Exception as error:
            result.error = result.error or error
        self.last = result
        return result

    def _time(self, result: Result, outs: Sequence[Any], marks: Any) -> None:
        start = self.clock()
        returned = None
        try:
            returned = result.arm(*self.args, *outs)
        except Exception as error:
            result.error, result.own = error, True
        launched_ns = self.clock() - start
        try:
            if marks is not None:
                marks.end()
            _settle(self.args)
        except Exception as error:
            result.error, result.own, result.broke = result.error or error, True, True
        if result.error is not None:
            return
        result.raced_ns = self.clock() - start if marks is None else marks.ns()
        result.ns = max(launched_ns, result.raced_ns)
        try:
            result.outputs = self._outputs(returned, outs)
        except Exception as error:
            result.error = error

    def taken(self, arm: Kernel, returned: Any) -> Result:
        """Return the result of a finished run, after which this call was made. Its in-place writes are its own."""
        result = Result(arm=arm, outputs=self._outputs(returned, self.outs))
        self.last = result
        return result

    def _outputs(self, returned: Any, outs: Sequence[Any]) -> tuple[Any, ...]:
        if self.written is not None:
            return self.written.pick(tuple(self.inputs[name] for name in self.op.output_names))
        made = returned if isinstance(returned, tuple) else (returned,)
        if len(made) != len(outs):
            return made
        return tuple(m if out is None else out for m, out in zip(made, outs, strict=True))

    def _mend(self) -> str:
        """Restore all inputs, and return the first one that had changed."""
        spoilt = ""
        for name, before in self.kept.items():
            if not torch.equal(_bits(before), _bits(self.inputs[name])):
                with torch.no_grad():
                    self.inputs[name].copy_(before)
                spoilt = spoilt or name
        return spoilt

    # --- serving ----------------------------------------------------------------------------------------------------

    def serve(self, result: Result) -> Any:
        """Return this result to the caller, in the caller's own outputs. Raises its error."""
        if result.error is not None:
            raise result.error
        if self.written is not None:
            if self.last is None or not _same(result.outputs, self.last.outputs):
                again = self.run(result.arm)
                if again.error is not None:
                    raise again.error
            returned = tuple(self.inputs[name] for name in self.op.output_names)
        else:
            returned = tuple(_into(out, made) for out, made in zip(self.outs, result.outputs, strict=True))
        return returned if len(returned) > 1 else returned[0]

    # --- rows -------------------------------------------------------------------------------------------------------

    def rows(self, count: int, seed: int) -> Rows:
        """Return a part to check in float64: what an in-place op writes, or some rows of other ops."""
        if self.written is not None:
            return self.whole()
        return self.op.rows(self.workload, self.inputs, count, seed)

    def whole(self) -> Rows:
        """Return everything that was kept of the outputs."""
        inputs = self.inputs if self.written is None else self.written.inputs
        return Rows(inputs=inputs, pick=tuple)

    def same_form(self, outputs: Sequence[Any], as_these: Sequence[Any]) -> Mismatch | None:
        told = [_told(o) for o in outputs]
        wanted = [_told(o) for o in as_these]
        if told == wanted:
            return None
        reason = f"gave {', '.join(told)}; expected {', '.join(wanted)}"
        return Mismatch(check="result", reason=reason, evidence={"got": told, "expected": wanted})


def _keep(op: Op, inputs: dict[str, Any]) -> dict[str, Tensor]:
    resident = {a.name: inputs[a.name] for a in op.args if a.role == "resident"}
    tensors = {name: t for name, t in resident.items() if isinstance(t, Tensor)}
    if sum(t.nbytes for t in tensors.values()) > KEPT_BYTES:
        return {}
    return {name: t.clone() for name, t in tensors.items()}


def _alike(out: Any) -> Any:
    if not isinstance(out, Tensor):
        return out
    return torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device=out.device)


def _into(out: Any, made: Any) -> Any:
    return out.copy_(made) if isinstance(out, Tensor) else made


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).view(torch.uint8)


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device.type}"


def _settle(values: Sequence[Any]) -> None:
    """Wait until the device has finished, so that times are of work, not of launches."""
    device = _elsewhere(values)
    if device is not None:
        device.drain()


def _held(values: Sequence[Any]) -> Any:
    device = _elsewhere(values)
    return device.held() if device is not None else None


def _elsewhere(values: Sequence[Any]) -> Device | None:
    """Return the device of the first tensor that is not on the host."""
    found = (v for v in values if isinstance(v, Tensor) and devices.accelerated(v.device.type))
    return next(map(devices.of, found), None)


def captured(values: Sequence[Any]) -> bool:
    """Return True during a capture in a graph, in which nothing can be awaited or compared."""
    device = _elsewhere(values)
    return device is not None and device.capturing()
