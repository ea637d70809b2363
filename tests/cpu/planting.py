"""Make proofs of planted kernels: candidates from functions of planted.py and of planted.cpp."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from autosel import settings
from autosel.candidates.base import Candidate
from autosel.ops import OPS
from autosel.parity.check import Proof
from autosel.values import Accepted, Fingerprint, Knobs, Parity, PythonRecipe, Support, Workload

Kernel = TypeVar("Kernel")
HERE = Path(__file__).parent
RMSNORM = OPS["rmsnorm"].workload("bf16", {"M": 3, "d": 512})
RMSNORM_FP32 = OPS["rmsnorm"].workload("fp32", {"M": 3, "d": 512})
LINEAR = OPS["linear"].workload("bf16", {"M": 2, "N": 320, "K": 1100})
WIDE = OPS["linear"].workload("bf16", {"M": 1, "N": 6000, "K": 8192})
HEADS = OPS["attn"].workload("bf16", {"B": 1, "Hq": 48, "Hkv": 48, "S": 1, "D": 64, "L": 2048})
ATTN = OPS["attn"].workload("bf16", {"B": 1, "Hq": 4, "Hkv": 2, "S": 1, "D": 64, "L": 16384})

# Short forms of ops in the names of kernels.
SHORT = {"paged": "paged_attn", "prefill": "prefill_attn", "append": "kv_append", "added": "add_rmsnorm",
         "norm": "norm_qkv", "gate": "gate_up", "head": "lm_head"}  # fmt: skip


def kernels_of(module: ModuleType) -> list[tuple[str, str]]:
    """Return op and name of each kernel of a module; a name begins with the op, or with a short form of it."""
    names = [name for name, kernel in vars(module).items() if isfunction(kernel) and not name.startswith("_")]
    return [(SHORT.get(first := name.partition("_")[0], first), name) for name in names]


def in_two(prove: Callable[[list[Kernel]], list[Parity]], kernels: list[Kernel]) -> list[tuple[Kernel, Parity]]:
    """Prove kernels in two series at once; return each with its verdict, one series after the other."""
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(prove, (kernels[::2], kernels[1::2]))
    return list(zip(kernels[::2] + kernels[1::2], one + other, strict=True))


@cache
def built(module: str) -> str:
    """Return a folder with `module`.py and the library built from `module`.cpp; built once, kept between runs."""
    sources = [HERE / f"{module}.py", HERE / f"{module}.cpp", *sorted(HERE.glob("faults.*"))]
    digest = hashlib.sha256(b"\0".join(s.read_bytes() for s in sources)).hexdigest()[:16]
    folder = settings.home() / "planted" / digest
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(dir=folder.parent))
        shutil.copy(sources[0], making)
        flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["g++", *flags, str(sources[1]), "-o", str(making / f"lib{module}.so")], check=True)
        try:
            making.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(making)
    return str(folder)


class Planted(Candidate):
    backend = "USER"

    def __init__(
        self, op: str, function: str, *, writes_out: bool = True, deterministic: bool = True, module: str = "planted"
    ) -> None:
        self.op, self.name, self.function, self.module = op, f"user:{function}", function, module
        self.writes_out, self.deterministic = writes_out, deterministic

    def supports(self, w: Workload, fp: Fingerprint) -> Support:
        return Accepted()

    def recipe(self, w: Workload, fp: Fingerprint | None, knobs: Knobs) -> PythonRecipe:
        path = built(self.module) if self.module == "planted" else str(HERE)
        return PythonRecipe(target=f"{self.module}:{self.function}", path=path)


def proof(
    function: str,
    workload: Workload = RMSNORM,
    *,
    writes_out: bool = True,
    deterministic: bool = True,
    module: str = "planted",
) -> Proof:
    candidate = Planted(workload.op, function, writes_out=writes_out, deterministic=deterministic, module=module)
    recipe = candidate.recipe(workload, None, Knobs())
    return Proof(candidate=candidate, recipe=recipe, digest=function, knobs=Knobs(), workload=workload)


def functional(function: str, workload: Workload = RMSNORM) -> Proof:
    """Wrap a kernel so that it allocates its result."""
    return proof(function, workload, writes_out=False)
