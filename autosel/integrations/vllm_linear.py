"""Serve vLLM's linears on a CPU with decided kernels, in its compiled mode too. Importing this needs vLLM.

When vLLM has loaded a weight, it packs it for oneDNN, and its layer calls `layer.cpu_linear` from then on
(`dispatch_cpu_unquantized_gemm`). For weights of a shape that this home has a decision for, `cpu_linear` becomes the
operator `torch.ops.autosel_engine.linear`, which a compiled graph calls as it is. It serves the faster of the decided
kernel and vLLM's own (trial.py). The plain weight is kept for it: these weights take twice the memory. Outside compiled
graphs, calls of other shapes are counted as misses.

Codes are served in the same way, by `torch.ops.autosel_engine.linear_codes` (vllm_codes.py).

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
from autosel.formats import PLAIN
from autosel.integrations import engine_ops, vllm_codes
from autosel.ops.contract import DTYPE_NAME
from autosel.ops.weight import Matrix, Weight
from autosel.version import __version__

Own = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Shape = tuple[int, int, str, str]  # N, K, dtype, format
_BUCKET = re.compile(r"linear/M\d+\.N(\d+)\.K(\d+)/(bf16|fp16|fp32)(?:\.bias=True)?(?:\.weight=([\w-]+))?")


class Linears:
    """The weights that are served, by their memory, and how vLLM multiplies by each."""

    def __init__(self, shapes: frozenset[Shape] | None) -> None:
        self.shapes = shapes  # None: all, so that a recording sees every linear
        self.own: dict[int, Own] = {}
        self.coded: dict[int, Weight] = {}
        self.weights: dict[Shape, int] = {}

    def wants(self, weight: Matrix, dtype: torch.dtype) -> bool:
        """Return True if a product by this weight is decided, for an x of this dtype."""
        whole = isinstance(weight, Weight) or weight.is_contiguous()
        return whole and (self.shapes is None or _shape(weight, dtype) in self.shapes)

    def serve(self, weight: Tensor, own: Own) -> Own:
        """Return the layer's new `cpu_linear`; it keeps the weight."""
        self.own[weight.data_ptr()] = own
        self._count(weight, weight.dtype)
        return lambda x, _, bias: torch.ops.autosel_engine.linear(x, weight, bias)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        own = self.own[weight.data_ptr()]
        return engine_ops.linear(x, weight, bias, lambda: own(x, weight, bias), self.weights[_shape(weight, x.dtype)])

    def serve_codes(self, weight: Weight, dtype: torch.dtype, own: Own) -> Callable[[Tensor, Tensor | None], Tensor]:
        """Return the product of an x of this dtype by a weight in codes; it keeps them."""
        codes, scales = weight.codes, weight.scales
        self.own[codes.data_ptr()], self.coded[codes.data_ptr()] = own, weight
        self._count(weight, dtype)
        return lambda x, bias: torch.ops.autosel_engine.linear_codes(x, codes, scales, bias)

    def by_codes(self, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
        own, weight = self.own[codes.data_ptr()], self.coded[codes.data_ptr()]
        return engine_ops.linear(x, weight, bias, lambda: own(x, codes, bias), self.weights[_shape(weight, x.dtype)])

    def _count(self, weight: Matrix, dtype: torch.dtype) -> None:
        shape = _shape(weight, dtype)
        self.weights[shape] = self.weights.get(shape, 0) + 1


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


def _shape(weight: Matrix, dtype: torch.dtype) -> Shape:
    n, k = weight.shape
    return (n, k, DTYPE_NAME[dtype], weight.format.name if isinstance(weight, Weight) else PLAIN)


def shapes_in(buckets: Iterable[str]) -> frozenset[Shape]:
    """Return the shapes of weights among the buckets of decisions."""
    found = (_BUCKET.fullmatch(bucket) for bucket in buckets)
    return frozenset((int(m[1]), int(m[2]), m[3], m[4] or PLAIN) for m in found if m)


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
    _define(linears)
    vllm_codes.register(linears)
    if shapes is None or shapes:
        VllmConfig.compute_hash = _hashed(VllmConfig.compute_hash, shapes)


def _define(linears: Linears) -> None:
    library = torch.library.Library("autosel_engine", "DEF")
    library.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    library.impl("linear", linears, "CPU")
    library.define("linear_codes(Tensor x, Tensor codes, Tensor scales, Tensor? bias) -> Tensor")
    library.impl("linear_codes", linears.by_codes, "CPU")
    torch.library.register_fake("autosel_engine::linear", _fake, lib=library)
    torch.library.register_fake("autosel_engine::linear_codes", _fake, lib=library)
    _LIBRARIES.append(library)


def _fake(x: Tensor, rows: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows.shape[0]))


_LIBRARIES: list[torch.library.Library] = []  # the operator exists as long as its library


def _around(own: Callable[[Any, bool], None], linears: Linears) -> Callable[[Any, bool], None]:
    @functools.wraps(own)
    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight.detach()  # vLLM's function removes it from the layer
        own(layer, remove_weight)
        if described(weight) and callable(getattr(layer, "cpu_linear", None)):
            serve = linears.serve if linears.wants(weight, weight.dtype) else counted
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
