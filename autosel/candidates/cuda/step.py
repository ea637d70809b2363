"""The whole decode step as one CUDA launch (kernels/cuda/step.cu): its build, and its list of tasks.

    build = StepBuild.of(attn, projection, fp)        # raises UsageError with the reason if it is impossible
    program = Program(build)
    program.embed(...); program.project(...); program.rotate(...); program.attend(...)   # in the step's order
    entries = compiled(build)                         # nvcc, half a minute, once
    room(entries, build, like)                        # CTAs that can be resident at once, or Rejected
    step = program.bound(entries.step, entries.check, like)   # checked, and copied to the device
    step.run()                                        # on the current stream; can be captured in a graph
    step.stopped()                                    # 0, or 1 + the task in which a wait exceeded the limit

knobs.gpu.persistent decides if a step should use it. Tensors are borrowed: `Bound.kept` holds them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autosel import devices
from autosel.errors import UsageError
from autosel.knobs.gpu import persistent
from autosel.knobs.gpu.facts import facts
from autosel.native import cuda
from autosel.native.compile import NO_COMPILER, compile_source, find_compiler
from autosel.native.load import load_entry
from autosel.values import Accepted, DTypeName, Fingerprint, Knobs, NativeRecipe, Rejected, Support, Workload

if TYPE_CHECKING:
    from torch import Tensor

CANDIDATE = "cuda:step"
SOURCE, ENTRY, CHECK, RESIDENT = "cuda/step.cu", "step", "step_check", "step_resident"
LIMIT_US = 2_000_000  # limit of one wait: a step takes milliseconds
TASK_WORDS, STATE_WORDS = 32, 3  # step.cu: kTaskWords, kCounters
EMBED, PROJECT, ROTATE, ATTEND, NORM = range(5)  # step.cu: Kind
HEAD = 3  # words before a task's own
WARPS = persistent.THREADS // 32
LOG2_E = struct.unpack("<f", struct.pack("<f", 1.4426950408889634))[0]  # the kernels' fp32 value

Word = int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuild:
    """The compiled settings, and the device."""

    dtype: DTypeName
    knobs: Knobs
    recipe: NativeRecipe

    @staticmethod
    def of(attn: Workload, projection: Workload, fp: Fingerprint) -> StepBuild:
        """Return the build for the step with this attention and smallest projection. Raises UsageError."""
        support = supports(attn, fp)
        if isinstance(support, Rejected):
            raise UsageError("no whole-step kernel", why=support.reason)
        f = facts(fp)
        knobs = persistent.persistent(attn, projection, f)
        return StepBuild(dtype=attn.dtype, knobs=knobs, recipe=recipe(attn.dtype, knobs, cuda.target_flags(f.cc)))


def supports(attn: Workload, fp: Fingerprint) -> Support:
    """Return whether a step with this attention can be one launch on the device."""
    if not devices.runs(fp.kind, "CUDA"):
        return Rejected(reason="a CUDA kernel; the device is a CPU")
    if attn.dtype not in ("bf16", "fp16", "fp32"):
        return Rejected(reason=f"supports bf16, fp16, fp32; the workload is {attn.dtype}")
    if attn.op != "attn" or attn["S"] != 1:
        return Rejected(reason="supports one position per sequence, over a contiguous cache")
    f = facts(fp)
    why = persistent.fits(attn["B"], attn["D"], attn.dtype) or cuda.why_not(f.cc) or persistent.crowded(attn, f)
    if not why and find_compiler() is None:
        why = NO_COMPILER
    return Rejected(reason=why) if why else Accepted()


def recipe(dtype: DTypeName, knobs: Knobs, target: tuple[str, ...]) -> NativeRecipe:
    macros = {"rows": "M", "head_rows": "HEAD_ROWS", "lanes": "LANES", "unroll": "UNROLL", "rows_per_warp": "ROWS"}
    defined = (f"-DAUTOSEL_{macro}={knobs[name]}" for name, macro in macros.items())
    return NativeRecipe(source=SOURCE, entry=ENTRY, flags=(*target, f"-DAUTOSEL_{dtype.upper()}", *defined))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The functions of a compiled build. `digest` names the artefact."""

    step: Callable[..., Any]
    check: Callable[..., Any]
    resident: Callable[..., Any]
    digest: str = ""


def compiled(build: StepBuild) -> Entries:
    """Compile on first use, and load. Raises BuildError."""
    digest = compile_source(build.recipe.source, build.recipe.flags).digest
    step, check, resident = (load_entry(digest, name) for name in (ENTRY, CHECK, RESIDENT))
    return Entries(step=step, check=check, resident=resident, digest=digest)


def room(entries: Entries, build: StepBuild, like: Tensor) -> int | Rejected:
    """Return how many CTAs the device of `like` can hold at once, as it reports: all CTAs of a launch wait for each
    other.
    """
    import torch

    found = torch.zeros(1, dtype=torch.int64)
    try:
        entries.resident(like, int(build.knobs["slots"]), found)
    except (ValueError, RuntimeError) as error:
        return Rejected(reason=str(error))
    if not int(found):
        return Rejected(reason="no CTA of the whole-step kernel fits on an SM of this device")
    return int(found)


@dataclass(slots=True, kw_only=True)
class BoundStep:
    """A step ready to run. `state` is on the device: why it stopped, number of steps, counters."""

    entry: Callable[..., Any]
    program: Tensor
    state: Tensor
    like: Tensor
    grid: int  # 0: as many CTAs as can be resident
    slots: int
    limit_us: int
    kept: list[Any]

    def run(self, times: Tensor | None = None) -> None:
        """Enqueue one step. Raises ValueError if its CTAs cannot all be resident.

        `times` int64 [tasks] on the device receives when the last CTA finished each task, by the device's clock in ns.
        """
        self.entry(self.program, self.state, times, self.like, self.grid, self.slots, self.limit_us)

    def stopped(self) -> int:
        """Wait for the device; return 0, or 1 + the task in which a wait exceeded the limit."""
        return int(self.state[0])


@dataclass(slots=True)
class StepProgram:
    """Tasks in the order of the step; each sees the results of earlier ones. Rows x are [B, n] with last stride 1."""

    build: StepBuild
    tasks: list[bytes] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    splits: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)  # sums and counters by size

    def embed(self, tokens: Tensor, table: Tensor, out: Tensor, *, scale: float = 1.0) -> None:
        """Add out[B,d] = table[tokens] * scale; tokens int64[B]. A token outside the table gives zeros."""
        rows, d = out.shape
        self._add(EMBED, rows, self._at(tokens), self._at(table), table.stride(0), len(table), rows, d, float(scale),
                  self._at(out))  # fmt: skip

    def project(
        self,
        x: Tensor,
        w: Tensor,
        y: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        offset: float = 0.0,
        up: Tensor | None = None,
        activation: int = 0,
        residual: Tensor | None = None,
        split: int = 0,
    ) -> None:
        """Add y = (rmsnorm(x) or x) @ w^T, plus `residual` (may be y); with `up`: act(that) * (rmsnorm(x) @ up^T).

        `split` is the number of warps that share a row; 0 means the knob's.
        """
        split = split or int(self.build.knobs["split_k"])
        (n, k), per_warp = w.shape, int(self.build.knobs["rows_per_warp"])
        units = math.ceil(math.ceil(n / per_warp) / (WARPS // split))
        self._add(PROJECT, units, len(x), n, k, split, self._at(x), x.stride(0), self._at(norm), float(eps),
                  float(offset), self._at(w), w.stride(0), self._at(up), _row(up), activation, self._at(y), y.stride(0),
                  self._at(residual), _row(residual))  # fmt: skip

    def rotate(
        self,
        qkv: Tensor,
        positions: Tensor,
        inv_freq: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        interleaved: bool = False,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
        offset: float = 0.0,
    ) -> None:
        """Add the rotation of q and k in qkv[B, (Hq + 2 Hkv) D], each normed first if a weight is given.

        q is written to q[B, Hq D]; k and the unchanged v to positions[B] (int64) of the caches [B,Hkv,L,D], but not
        beyond a cache's end.
        """
        rows, heads, width = len(qkv), k_cache.shape[1], k_cache.shape[3]
        q_heads = q.shape[1] // width
        caches = (k_cache, v_cache)
        self._add(ROTATE, math.ceil(rows * (q_heads + 2 * heads) / WARPS), self._at(qkv), qkv.stride(0), rows, q_heads,
                  heads, width, len(inv_freq), int(interleaved), self._at(inv_freq), self._at(positions),
                  self._at(q_norm), self._at(k_norm), float(eps), float(offset), self._at(q), q.stride(0),
                  *(self._at(c) for c in caches), *(c.stride(i) for i in range(3) for c in caches),
                  min(c.shape[2] for c in caches))  # fmt: skip

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor,
        o: Tensor,
        *,
        max_len: int,
        scale: float = 0.0,
        window: int = 0,
        softcap: float = 0.0,
        chunk: int = 0,
    ) -> None:
        """Add o[B, Hq D] = attention of q[B, Hq D] over the caches [B,Hkv,L,D], lengths int32[B], none above max_len.

        `chunk` is the number of keys per CTA; 0 means all.
        """
        import torch

        rows, heads, width = len(q), k.shape[1], k.shape[3]
        group = q.shape[1] // width // heads
        window = 0 if window >= max_len else window
        span = min(max_len, window) if window else max_len
        chunk = chunk or span
        splits, head_rows = math.ceil(span / chunk), int(self.build.knobs["head_rows"])
        tiles = heads * math.ceil(group / head_rows)
        by = scale or 1 / math.sqrt(width)
        size = (rows * tiles * splits * head_rows * (width + 2), rows * tiles)
        if size not in self.splits:  # shared by layers: the previous one has finished with its own
            sums = torch.empty(size[0], dtype=torch.float32, device=q.device)
            self.splits[size] = sums, torch.zeros(size[1], dtype=torch.int32, device=q.device)
        sums, counters = self.splits[size]
        self._add(ATTEND, splits * tiles * rows, rows, self._at(q), q.stride(0), width, self._at(o), o.stride(0), width,
                  self._at(k), self._at(v), *(k.stride(i) for i in range(3)), *(v.stride(i) for i in range(3)),
                  self._at(lengths), max_len, heads, group, width, window,
                  by / softcap if softcap else by * LOG2_E, softcap * LOG2_E, chunk, splits, self._at(sums),
                  self._at(counters))  # fmt: skip

    def norm(
        self, x: Tensor, weight: Tensor, out: Tensor, *, eps: float, offset: float = 0.0, residual: Tensor | None = None
    ) -> None:
        """Add out = rmsnorm(x), plus `residual` if given."""
        rows, d = x.shape
        self._add(NORM, rows, rows, d, self._at(x), x.stride(0), self._at(weight), float(eps), float(offset),
                  self._at(residual), _row(residual), self._at(out), out.stride(0))  # fmt: skip

    def words(self) -> Tensor:
        """Return int64 [tasks, 32], on the host."""
        import torch

        return torch.frombuffer(bytearray(b"".join(self.tasks)), dtype=torch.int64).view(len(self.tasks), TASK_WORDS)

    def bound(
        self,
        entry: Callable[..., Any],
        check: Callable[..., Any],
        like: Tensor,
        *,
        grid: int = 0,
        limit_us: int = LIMIT_US,
    ) -> BoundStep:
        """Check the program and copy it to the device.

        `entry` and `check` are the build's `step` and `step_check`; `like` is any tensor of the step's dtype and
        device. Raises ValueError for a task that the build cannot do.
        """
        import torch

        words = self.words()
        check(words, like)
        state = torch.zeros(STATE_WORDS + len(self.tasks), dtype=torch.int32, device=like.device)
        return BoundStep(
            entry=entry,
            program=words.to(like.device),
            state=state,
            like=like,
            grid=grid,
            slots=int(self.build.knobs["slots"]),
            limit_us=limit_us,
            kept=[*self.kept, words],
        )

    def _add(self, kind: int, units: int, *words: Word) -> None:
        count = HEAD + len(words)
        spelled = [struct.pack("<d" if isinstance(w, float) else "<q", w) for w in (kind, count, units, *words)]
        self.tasks.append(b"".join(spelled).ljust(8 * TASK_WORDS, b"\0"))

    def _at(self, t: Tensor | None) -> int:
        if t is None:
            return 0
        self.kept.append(t)
        return int(t.data_ptr())


def _row(t: Tensor | None) -> int:
    return 0 if t is None else int(t.stride(0))
