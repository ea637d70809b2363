"""Define the scope of a run: the device, the models, and how much is measured."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosel.errors import UnknownName, UsageError
from autosel.native.cuda import LEAST_CC
from autosel.values import DTypeName

if TYPE_CHECKING:
    from autosel.models.workloads import Named

CPU_OPS = ("rmsnorm", "swiglu", "rope")  # tuned by a dry run in seconds each
OURS = ("cpp", "cuda", "cutlass", "triton")  # backends whose faults are autosel's; other backends' faults are findings
SMALL_MODEL = "llama-1b"
MODELS = ("llama-8b", "llama-1b", "qwen3-1.7b", "gemma3-1b")  # of the certified runs
OTHER_MODEL = "gemma3-1b"  # for ops that llama-8b lacks (GeGLU) and for the shapes of variants (variants.py)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """All settings of a stage other than device and sources, as plain JSON.

    `out` is the results folder and not part of the results' key.
    """

    device: str
    out: str
    model: str
    ops: tuple[str, ...]  # empty: all
    dtypes: tuple[DTypeName, ...]  # of parity and the sanitizer; other stages use the model's own
    batches: tuple[int, ...]
    wide: tuple[int, ...]  # rows of x for additional projections, in the range of the large products
    seq: int
    layers: int  # of the decode run; 0: all
    iters: int
    tuned_ops: tuple[str, ...]  # empty: all
    effort: str  # full: torch.compile too
    cell_seconds: float  # of the bench and of a regret cell
    models: tuple[str, ...]  # of the decode runs
    contexts: str  # of a sweep, A:B
    batch_range: str
    batch_context: int  # context of the sweep over batches
    sweep_budget: str  # of the sweep's tuning; "": no tuning

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def small_model(self) -> str:
        """Return the model for checks that slow a kernel by a factor of 100."""
        return SMALL_MODEL if SMALL_MODEL in self.models else self.model

    @property
    def text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def plain(self) -> dict[str, Any]:
        """Return the part of the scope that belongs to the results' key."""
        return {name: value for name, value in json.loads(self.text).items() if name != "out"}

    @staticmethod
    def from_text(text: str) -> Scope:
        plain = json.loads(text)
        return Scope(**{name: tuple(v) if isinstance(v, list) else v for name, v in plain.items()})

    def workloads(self, *, batches: tuple[int, ...] | None = None, dtype: DTypeName | None = None) -> tuple[Named, ...]:
        """Return the workloads of a decode step and of prefill at each batch, without duplicates."""
        from autosel import models
        from autosel.formats import FORMER_OPS
        from autosel.models.workloads import ASKED_OPS, STEP_OPS, step

        model, found = models.load(self.model), {}
        for batch in batches or self.batches:
            for named in step(
                model, batch=batch, context=self.seq, dtype=dtype, ops=(*STEP_OPS, *ASKED_OPS, *FORMER_OPS)
            ):
                if not self.ops or named.workload.op in self.ops:
                    found.setdefault(named.workload.key, named)
        return tuple(found.values())

    def everything(self, *, dtype: DTypeName | None = None) -> tuple[Named, ...]:
        """Return `workloads`, the projections of `wide`, and another model's workloads of ops that this model lacks."""
        from autosel import models
        from autosel.models.workloads import ASKED_OPS, STEP_OPS, step

        found = {named.workload.key: named for named in self.workloads(dtype=dtype)}
        asked = [op for op in (*STEP_OPS, *ASKED_OPS) if not self.ops or op in self.ops]
        if "linear" in asked:
            for rows in self.wide:
                for named in step(models.load(self.model), batch=rows, context=self.seq, dtype=dtype, ops=("linear",)):
                    found.setdefault(named.workload.key, named)
        there = {named.workload.op for named in found.values()}
        missing = tuple(op for op in asked if op not in there)
        if missing:
            for named in step(models.load(OTHER_MODEL), batch=1, context=self.seq, dtype=dtype, ops=missing):
                found.setdefault(named.workload.key, named)
        return tuple(found.values())


def is_ours(candidate: str) -> bool:
    """Return True for `cuda:gemv`, False for `torch:linear` and `flashinfer:attn`."""
    return candidate.partition(":")[0] in OURS


def scope_of(options: argparse.Namespace) -> Scope:
    """Return the full scope on a GPU, or a small one on the CPU that runs every line. Raises UnknownName for an op."""
    from autosel.candidates.registry import op_name

    dry, ops = options.device == "cpu", tuple(dict.fromkeys(op_name(name) for name in options.op))
    return Scope(
        device=options.device,
        out=str(Path(options.out or f"gpu-{options.device.replace(':', '')}").absolute()),
        model=options.model or ("llama-1b" if dry else "llama-8b"),
        ops=ops,
        dtypes=tuple(options.dtype) or (("bf16",) if dry else ("bf16", "fp16", "fp32")),
        batches=(1,) if dry else (1, 8, 64),
        wide=() if dry else (256, 2048),
        seq=options.seq or (1024 if dry else 8192),
        layers=options.layers or (2 if dry else 0),
        iters=5 if dry else 100,
        tuned_ops=ops or (CPU_OPS if dry else ()),
        effort="quick" if dry else "full",
        cell_seconds=1.5 if dry else 4.0,
        models=(options.model,) if options.model else ("llama-1b",) if dry else MODELS,
        contexts=options.contexts or ("64:128" if dry else "256:131072"),
        batch_range=options.batches or ("1:2" if dry else "1:512"),
        batch_context=128 if dry else 1024,
        sweep_budget="" if dry else "30m",
    )


def refuse_absent_device(device: str) -> None:
    """Raise UsageError for a missing or unsupported GPU, and UnknownName for another kind of device."""
    if device == "cpu":
        return
    if not re.fullmatch(r"cuda(:\d+)?", device):
        raise UnknownName("device", device, ("cuda", "cuda:N", "cpu"))
    import torch

    dry = "./run gpu --device cpu runs every stage on the CPU instead"
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__}" + ("" if torch.version.cuda else ", a build without CUDA")
        raise UsageError("no GPU found", why=f"no CUDA device answers ({built})", todo=dry)
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise UsageError(f"no GPU {number}", why=f"CUDA shows {torch.cuda.device_count()}", todo="--device cuda:0")
    cc = torch.cuda.get_device_capability(number)
    if cc < LEAST_CC:
        why = f"{torch.cuda.get_device_name(number)} has compute capability {cc[0]}.{cc[1]}"
        least = f"the kernels need {LEAST_CC[0]}.{LEAST_CC[1]} (Ampere) or later"
        raise UsageError(f"no kernel supports GPU {number}", why=f"{why}; {least}", todo=dry)
