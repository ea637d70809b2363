"""PyTorch's code for each op: the baseline that every promotion must beat, and other formulations.

The functions are in autosel/ops/eager.py and eager_stored.py; this module does not import torch. Tried on a CPU and
left out, because none beats the baseline by more than noise at M = 1 (4096 x 4096 and 4096 x 14336; median of 15
interleaved rounds, 2 cores, AVX-512-BF16, torch 2.13): `mv` (bf16 0.57x, others 1.0x), `mm(w, x.T)` (1.0x), `bmm` over
row blocks (0.54x in bf16).
"""

from __future__ import annotations

from collections.abc import Callable

from autosel.candidates.base import Checked
from autosel.formats import CACHE_FORMATS, WEIGHT_FORMATS
from autosel.values import Backend, Fingerprint, Knobs, PythonRecipe, Recipe, Workload

EAGER, EAGER_STORED = "autosel.ops.eager", "autosel.ops.eager_stored"
WEIGHTS = ("linear", "norm_qkv", "gate_up", "lm_head")  # ops of eager_stored.py for weights in any format
CACHES = ("attn",)  # and for keys and values
OPS = (
    "linear", "attn", "paged_attn", "prefill_attn", "kv_append", "rmsnorm", "add_rmsnorm", "rope", "swiglu", "geglu",
    "norm_qkv", "gate_up", "lm_head", "sample",
)  # fmt: skip

Limits = Callable[[Workload], str]


class TorchWay(Checked):
    """`torch:<what>`: a function of autosel/ops/eager.py, or of eager_stored.py for an operand in a format.

    `limits(w)` returns why it cannot run w, or "".
    """

    backend: Backend = "TORCH"

    def __init__(self, op: str, what: str, function: str, limits: Limits = lambda w: "") -> None:
        self.op, self.name, self.function, self.limits = op, f"torch:{what}", function, limits
        if function in WEIGHTS:
            self.formats = frozenset(WEIGHT_FORMATS)
        if function in CACHES:
            self.cache_formats = frozenset(CACHE_FORMATS)

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if w.dtype == "fp8_e4m3":
            return "PyTorch computes in bf16, fp16 and fp32; the workload is fp8_e4m3"
        return self.limits(w)

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        plain = w.weight_format.plain and w.cache_format.plain
        return PythonRecipe(target=f"{EAGER if plain else EAGER_STORED}:{self.function}")


def _one_position(w: Workload) -> str:
    """Refuse several positions: packed query heads are rows of one product, so the positions would share a mask."""
    return "" if w["S"] == 1 else f"packs query heads into the positions; the workload has S = {w['S']}"


BASELINES = tuple(TorchWay(op, {"attn": "sdpa"}.get(op, op), op) for op in OPS)
TORCH = (*BASELINES, TorchWay("attn", "packed", "attn_packed", _one_position))
