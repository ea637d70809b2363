"""Serve vLLM's unquantised linears on a CPU with decided kernels, in its compiled mode too. Importing this needs vLLM.

When vLLM has loaded a weight, it packs it for oneDNN, and its layer calls `layer.cpu_linear` from then on
(`dispatch_cpu_unquantized_gemm`). For weights of a shape that this home has a decision for, `cpu_linear` becomes the
operator `torch.ops.autosel_engine.linear`, which a compiled graph calls as it is. It serves the faster of the decided
kernel and vLLM's own (trial.py). The plain weight is kept for it: these weights take twice the memory. Outside compiled
graphs, calls of other shapes are counted as misses.

vLLM stores compiled graphs under a hash of its configuration. That hash names the shapes served here, so that a process
with other decisions, or without the plug-in, does not load a graph with this operator in it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig
from vllm.model_executor.layers import utils

from autosel import devices, dispatch, settings
from autosel.integrations import engine_ops
from autosel.ops.contract import DTYPE_NAME
from autosel.version import __version__

Own = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Shape = tuple[int, int, str]  # N, K, dtype
_BUCKET = re.compile(r"linear/M\d+\.N(\d+)\.K(\d+)/(bf16|fp16|fp32)(?:\.bias=True)?")


class Linears:
    """The weights that are served, by their memory, and how vLLM multiplies by each."""

    def __init__(self, shapes: frozenset[Shape] | None) -> None:
        self.shapes = shapes  # None: all, so that a recording sees every linear
        self.own: dict[int, Own] = {}
        self.weights: dict[Shape, int] = {}

    def wants(self, weight: Tensor) -> bool:
        return weight.is_contiguous() and (self.shapes is None or _shape(weight) in self.shapes)

    def serve(self, weight: Tensor, own: Own) -> Own:
        """Return the layer's new `cpu_linear`; it keeps the weight."""
        self.own[weight.data_ptr()] = own
        self.weights[_shape(weight)] = self.weights.get(_shape(weight), 0) + 1
        return lambda x, _, bias: torch.ops.autosel_engine.linear(x, weight, bias)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        own = self.own[weight.data_ptr()]
        return engine_ops.linear(x, weight, bias, lambda: own(x, weight, bias), self.weights[_shape(weight)])


def described(weight: Any) -> bool:
    """Return True if a workload describes products by this weight, and vLLM lets them round by batch."""
    if envs.VLLM_BATCH_INVARIANT:  # a kernel decided for one batch may round differently from another's
        return False
    plain = isinstance(weight, Tensor) and weight.dim() == 2 and devices.on_host(weight.device.type)
    return plain and weight.dtype in DTYPE_NAME


def counted(weight: Tensor, own: Own) -> Own:
    """Return the layer's `cpu_linear` that also counts its calls outside compiled graphs. It does not keep the
    weight."""
    n, dtype = weight.shape[0], DTYPE_NAME[weight.dtype]

    def cpu_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        engine_ops.missed_linear(x, n, dtype, bias)
        return own(x, packed, bias)

    return cpu_linear


def _shape(weight: Tensor) -> Shape:
    return (weight.shape[0], weight.shape[1], DTYPE_NAME[weight.dtype])


def shapes_in(buckets: Iterable[str]) -> frozenset[Shape]:
    """Return the shapes of plain weights among the buckets of decisions."""
    found = (_BUCKET.fullmatch(bucket) for bucket in buckets)
    return frozenset((int(m[1]), int(m[2]), m[3]) for m in found if m)


# --- registration ----------------------------------------------------------------------------------------------------


def register() -> None:
    """Serve the linears whose shapes are decided here, for any number of threads: vLLM binds its threads later. Only
    count the calls of the others."""
    recording = settings.get("record") is not None
    shapes = None if recording else shapes_in(dispatch.board().decided("linear"))
    if hasattr(utils.dispatch_cpu_unquantized_gemm, "_autosel"):
        return
    linears = Linears(shapes)
    utils.dispatch_cpu_unquantized_gemm = _around(utils.dispatch_cpu_unquantized_gemm, linears)
    if shapes is None or shapes:
        _define(linears)
        VllmConfig.compute_hash = _hashed(VllmConfig.compute_hash, shapes)


def _define(linears: Linears) -> None:
    library = torch.library.Library("autosel_engine", "DEF")
    library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("linear", linears, "CPU")
    torch.library.register_fake("autosel_engine::linear", _fake, lib=library)
    _LIBRARIES.append(library)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LIBRARIES: list[torch.library.Library] = []  # the operator exists as long as its library


def _around(own: Callable[[Any, bool], None], linears: Linears) -> Callable[[Any, bool], None]:
    @functools.wraps(own)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight.detach()  # vLLM's function removes it from the layer
        own(layer, remove_weight)
        if described(weight) and callable(getattr(layer, "cpu_linear", None)):
            serve = linears.serve if linears.wants(weight) else counted
            layer.cpu_linear = serve(weight, layer.cpu_linear)

    dispatch_cpu_unquantized_gemm._autosel = True  # type: ignore[attr-defined]
    return dispatch_cpu_unquantized_gemm


def _hashed(own: Callable[[Any], str], shapes: frozenset[Shape] | None) -> Callable[[Any], str]:
    text = f"autosel {__version__} {'all' if shapes is None else sorted(shapes)}"
    served = sha256(text.encode()).hexdigest()[:10]

    @functools.wraps(own)
    def compute_hash(config: Any) -> str:
        return f"{own(config)}{served}"

    return compute_hash
