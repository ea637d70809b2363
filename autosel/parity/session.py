"""One worker with one build in it, and the operations of every check: load, call, inspect the results."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from autosel import devices
from autosel.candidates.base import Candidate
from autosel.native.compile import compile_source
from autosel.ops import OPS
from autosel.ops.contract import Op
from autosel.parity.stage import Placed
from autosel.values import Fingerprint, Knobs, NativeRecipe, Recipe, Workload, to_json
from autosel.workers import Arena, Exit, Worker
from autosel.workers.arena import Ref
from autosel.workers.nursery import Nursery
from autosel.workers.registers import threads_of

T = TypeVar("T")
START_S, LOAD_S = 120.0, 120.0
CALL_S = 60.0  # ample for a microsecond's work; a call that compiles first may need most of it
PROOF_S = 600.0  # a candidate that needs longer would lose every race
SCRATCH_BYTES = 96 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The claim of a proof: this build with these knobs is correct at this workload and at smaller ones like it."""

    candidate: Candidate
    recipe: Recipe
    digest: str
    knobs: Knobs
    workload: Workload


def built(candidate: Candidate, w: Workload, fp: Fingerprint) -> Proof:
    """Return the proof of a candidate at a workload, compiled if necessary. Raises BuildError."""
    knobs = candidate.knobs(w, fp)
    recipe = candidate.recipe(w, fp, knobs)
    digest = compile_source(recipe.source, recipe.flags).digest if isinstance(recipe, NativeRecipe) else ""
    return Proof(candidate=candidate, recipe=recipe, digest=digest, knobs=knobs, workload=w)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of a result, as the worker reports it.

    `is_argument`: position of the passed tensor with which it shares memory.
    """

    type: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    device: str = ""
    is_argument: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """The worker's reply to a call."""

    results: tuple[Form, ...]
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledAtOnce:
    """The worker's reply to calls of several threads: the forms of each thread's results, in the order of its calls."""

    results: tuple[tuple[tuple[Form, ...], ...], ...]


class RefusedError(Exception):
    """A check failed."""

    def __init__(self, check: str, case: str, reason: str, evidence: Mapping[str, Any]) -> None:
        super().__init__(reason)
        self.check, self.case, self.reason, self.evidence = check, case, reason, evidence


def nursery() -> Nursery:
    """Return a process from which workers for proofs are forked."""
    return Nursery("autosel.parity.child")


class Session:
    """A worker and the requests to it. The worker starts at once, so that it imports while the parent draws inputs."""

    def __init__(
        self,
        call_deadline_s: float,
        threads: int = 0,
        device: str = devices.HOST,
        nursery: Nursery | None = None,
    ) -> None:
        """Start the worker. `threads`: torch's in the worker; 0 its default. `device`: where candidates run. `nursery`:
        the process that forks a worker on the CPU."""
        self.call_deadline_s, self.device, self.on_host = call_deadline_s, device, devices.named(device).on_host
        self.until = math.inf  # deadline of the current proof, on the monotonic clock
        self.worker = Worker(
            "autosel.parity.child:serve",
            threads=threads,
            start_deadline_s=START_S,
            nursery=nursery if self.on_host else None,
        )
        self.scratch = (Arena(SCRATCH_BYTES), Arena(SCRATCH_BYTES))
        self.case = "load"  # the worker's current task, for the record of a crash
        self.state: Mapping[str, str] | None = None
        self.threads: Mapping[str, str] = {}
        self._loaded: dict[str, Op] = {}
        self._attached: set[str] = set()
        self._called: set[str] = set()
        self.last_call_ns = 0

    def begin(self, proof_deadline_s: float) -> None:
        """Wait for the worker's imports; the proof's time starts now."""
        self.case = "load"
        self.worker.wait_ready()
        self.until = time.monotonic() + proof_deadline_s

    def ask(self, request: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        """Send a request, with its own deadline and the proof's; return the reply."""
        return self.worker.request(request, min(deadline_s, self.until - time.monotonic()))

    def told(self, kind: type[T], request: Mapping[str, Any], deadline_s: float) -> T:
        """Send a request; return its reply as a value of `kind`."""
        return self.worker.told(kind, request, min(deadline_s, self.until - time.monotonic()))

    def close(self) -> Exit:
        """End the worker; return how it ended."""
        ended = self.worker.close()
        for arena in self.scratch:
            arena.close()
        return ended

    # --- loading ----------------------------------------------------------------------------------------------------

    def load(self, proof: Proof) -> str:
        """Load the build; return the worker's name for this build with these knobs."""
        op = OPS[proof.candidate.op]
        name = f"{op.name} {proof.digest} {sorted(proof.knobs.values.items())}"
        if name not in self._loaded:
            if self.state is None:
                self.state, self.threads = self.look(), self._threads()
            request = {
                "do": "load",
                "name": name,
                "op": op.name,
                "recipe": to_json(proof.recipe),
                "digest": proof.digest,
                "knobs": proof.knobs.values,
                "device": self.device,
            }
            self.ask(request, LOAD_S)
            self._loaded[name] = op
        return name

    def look(self) -> Mapping[str, str]:
        """Return the worker's process-wide state."""
        return self.ask({"do": "state"}, self.call_deadline_s)

    def changed(self) -> dict[str, list[str]]:
        """Return the parts of the state that differ from before the first load, with both values."""
        if self.state is None:
            return {}
        before, after = self.state, self.look()
        found = {n: [before[n], after.get(n, "")] for n in before if before[n] != after.get(n)}
        strays = {words: who for words, who in self._threads().items() if words not in self.threads}
        for words, who in strays.items():
            found[f"thread {who}"] = [" or ".join(self.threads), words]
        return found

    def _threads(self) -> Mapping[str, str]:
        """Return the modes that threads of a CPU's worker have set; {} for a GPU, whose driver starts other threads."""
        return threads_of(self.worker.pid) if self.on_host else {}

    def attach(self, arena: Arena) -> None:
        if arena.name not in self._attached:
            self.worker.attach(arena)
            self._attached.add(arena.name)

    def detach(self, arena: Arena) -> None:
        if arena.name in self._attached:
            self.worker.detach(arena)
            self._attached.discard(arena.name)

    # --- calling ----------------------------------------------------------------------------------------------------

    def call(
        self,
        name: str,
        proof: Proof,
        placed: Placed,
        case: str,
        *,
        hold: str = "",
        skip: Sequence[str] = (),
        way: str = "",
    ) -> tuple[Tensor, ...]:
        """Call on operands in place; return copies of the outputs. `way`: one of ways.py.

        Refuses wrong forms and any damage (to inputs other than those in `skip`).
        """
        self.case = case
        self.attach(placed.arena)
        request = self._request("call", name, proof, placed) | {"hold": hold, "way": way}
        first_s = 0.0 if name in self._called else proof.candidate.first_call_s
        self._called.add(name)
        reply = self.told(Called, request, max(self.call_deadline_s, first_s))
        self.last_call_ns = reply.ns
        return self._judged(proof, placed, case, reply.results, skip)

    def call_at_once(
        self, name: str, proof: Proof, placed: Sequence[Placed], case: str, passes: int
    ) -> list[tuple[Tensor, ...]]:
        """Call on each of these operands from two threads at the same time, several times; like `call`.

        Each call of each pass writes separate outputs; if one pass differs, its result is returned.
        """
        self.case = case
        calls = [self._request("call", name, proof, one) for one in placed]
        for call, one in zip(calls, placed, strict=True):
            call["into"] = self._into(proof, one, one.places(), outputs=True)
        request = {"do": "at_once", "name": name, "queues": [calls[::2], calls[1::2]], "passes": passes}
        reply = self.told(CalledAtOnce, request, self.call_deadline_s)
        forms = [form for pair in zip_longest(*reply.results) for form in pair if form is not None]
        return [self._judged(proof, one, case, form, ()) for one, form in zip(placed, forms, strict=True)]

    def _judged(
        self, proof: Proof, placed: Placed, case: str, forms: Sequence[Form], skip: Sequence[str]
    ) -> tuple[Tensor, ...]:
        self._judge_forms(proof, placed, case, forms)
        damage = placed.damage(skip=skip)
        if damage is not None:
            raise RefusedError(damage.check, case, damage.reason, damage.evidence)
        return placed.results()

    def use_threads(self, count: int = 0, *, served: bool = False) -> None:
        """Set the worker's number of threads, 0: the initial number; `served`: C++ kernels run on PyTorch's."""
        self.ask({"do": "threads", "count": count, "served": served}, self.call_deadline_s)

    def private_bytes(self) -> int:
        """Return the worker's private memory, as the kernel counts it."""
        status = Path(f"/proc/{self.worker.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024

    def open_files(self) -> int:
        """Return the number of file descriptors that the worker has open."""
        return sum(1 for _ in Path(f"/proc/{self.worker.pid}/fd").iterdir())

    def loop(self, name: str, proof: Proof, placed: Placed, times: int, deadline_s: float, kept: Sequence[Ref]) -> None:
        """Call many times on the same operands. `kept`: memory in scratch for the results of each output, by call."""
        self.attach(self.scratch[1])
        into = [to_json(ref) for ref in kept]
        self.ask(self._request("loop", name, proof, placed) | {"times": times, "into": into}, deadline_s)

    def dump(self, hold: str, proof: Proof, placed: Placed, *, overwritten: bool = False) -> tuple[Tensor, ...]:
        """Return the results of an earlier call now; `overwritten`: after each is filled with its number."""
        do = "overwrite" if overwritten else "dump"
        into = self._into(proof, placed, placed.places())
        self.ask({"do": do, "hold": hold, "into": into}, self.call_deadline_s)
        return placed.results()

    def _request(self, do: str, name: str, proof: Proof, placed: Placed) -> dict[str, Any]:
        places = placed.places()
        outputs = places if proof.candidate.writes_out else [None] * len(places)
        into = self._into(proof, placed, places)
        return {"do": do, "name": name, "arguments": placed.arguments(), "outputs": outputs, "into": into}

    def _into(self, proof: Proof, placed: Placed, places: Sequence[Any], *, outputs: bool = False) -> list[Any]:
        """Return the memory into which the child copies allocated results, in the op's order of outputs.

        `outputs`: also for results that are written into given memory.
        """
        inout = {a.name for a in placed.op.args if a.role == "inout"}
        left = list(places)
        if proof.candidate.writes_out and not outputs:
            return [None] * len(placed.op.output_names)
        return [None if name in inout else left.pop(0) for name in placed.op.output_names]

    def _judge_forms(self, proof: Proof, placed: Placed, case: str, forms: Sequence[Form]) -> None:
        """Check type, dtype, shape and layout of the results; results written into outputs must be those outputs."""
        specs = placed.op.outputs(placed.workload)
        if len(forms) != len(specs):
            reason = f"the candidate returned {len(forms)} results; {placed.op.name} has {len(specs)}"
            raise RefusedError("result", case, reason, {"returned": len(forms), "expected": len(specs)})
        position = len(placed.op.args)
        inout = {a.name: i for i, a in enumerate(placed.op.args) if a.role == "inout"}
        for spec, form in zip(specs, forms, strict=True):
            expected: dict[str, Any] = {
                "type": "torch.Tensor",
                "dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(spec.dtype, spec.dtype),
                "shape": tuple(spec.shape),
                "device": self.device.partition(":")[0],
            }
            if spec.name in inout:
                # The capacity of a cache is not a dimension of the workload.
                expected["shape"] = tuple(placed.inputs[spec.name].shape)
                expected["is_argument"] = inout[spec.name]
            elif proof.candidate.writes_out:
                expected["is_argument"] = position
                position += 1
            for what, value in expected.items():
                got = getattr(form, what)
                if got != value:
                    words = {"is_argument": "memory"}.get(what, what)
                    evidence = {"output": spec.name, "got": _spelled(got), "expected": _spelled(value)}
                    told = f"{evidence['got']}, not {evidence['expected']}"
                    told = "not the one passed in" if what == "is_argument" else told
                    raise RefusedError("result", case, f"{spec.name}: the {words} is {told}", evidence)
            if spec.shape and spec.shape[-1] > 1 and form.strides[-1:] != (1,):
                seen = {"output": spec.name, "strides": list(form.strides)}
                raise RefusedError("result", case, f"{spec.name}: the last dimension is not contiguous", seen)


def _spelled(value: Any) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
