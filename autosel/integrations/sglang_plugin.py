"""Plug into SGLang: serve decided kernels, and provide exported tiles.

Each SGLang process loads this (`sglang.srt.plugins`). It registers

- `--attention-backend autosel`: SGLang's own backend, whose decode steps run decided kernels for `paged_attn`;
- SGLang's own hooks around RMSNorm, GemmaRMSNorm, SiluAndMul and GeluAndMul;
- a hook around its lookup of tiles, where AUTOSEL_ENGINE_FILES names a folder.

SGLang's own code runs in all other cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autosel import settings
from autosel.integrations import plugged

WRITTEN_FOR = "0.5.23"
ATTENTION = "autosel"
NORMS = "sglang.srt.layers.layernorm"
GATES = "sglang.srt.layers.activation"
TILES = "sglang.kernels.ops.gemm.fp8_kernel"
METHODS = ("forward_cuda", "forward_cpu")


def register() -> None:
    """Register once; no effect under AUTOSEL_DISABLE. Never raises, because a server must start without autosel too."""
    if settings.get("disable"):
        return
    try:
        registry, kind, hooks = _hooks()
        register_attention = _attention()
        for target, hook in hooks.items():
            if not any(getattr(there, "_autosel", False) for _, there, _ in registry._hooks.get(target, ())):
                hook._autosel = True  # type: ignore[attr-defined]
                registry.register(target, hook, kind)
        register_attention()
        plugged.announce("SGLang", __name__)
    except Exception as error:
        plugged.leave("SGLang", WRITTEN_FOR, error)


def _hooks() -> tuple[Any, Any, dict[str, Callable[..., Any]]]:
    """Return what to register. All imports that may fail happen before anything is changed."""
    from sglang.srt.batch_invariant_ops import is_batch_invariant_mode_enabled as alike
    from sglang.srt.layers import activation, layernorm
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {}
    found: tuple[tuple[str, type, Callable[[], Callable[..., Any]]], ...] = (
        (NORMS, layernorm.RMSNorm, lambda: _norm(0.0, alike)),
        (NORMS, layernorm.GemmaRMSNorm, lambda: _norm(1.0, alike)),
        (GATES, activation.SiluAndMul, lambda: _gate("swiglu", alike)),
        (GATES, activation.GeluAndMul, lambda: _gate("geglu", alike)),
    )
    for module, layer, hook in found:
        for method in METHODS:
            if method in vars(layer):
                hooks[f"{module}.{layer.__name__}.{method}"] = hook()
    if settings.get("engine_files"):
        from sglang.kernels.ops.gemm import fp8_kernel

        hooks[f"{TILES}.get_w8a8_block_fp8_configs"] = _tiles(fp8_kernel.get_device_name)
    return HookRegistry, HookType.AROUND, hooks


def _attention() -> Callable[[], None]:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    def create(runner: Any) -> Any:
        from autosel.integrations import sglang_attention

        return sglang_attention.create(runner)

    def register() -> None:
        if ATTENTION not in ATTENTION_BACKENDS:
            register_attention_backend(ATTENTION)(create)
        if ATTENTION not in ATTENTION_BACKEND_CHOICES:
            ATTENTION_BACKEND_CHOICES.append(ATTENTION)

    return register


# `alike`: SGLang promises equal results for a row in any batch. A kernel decided for one batch may round differently
# from another's.


def _norm(offset: float, alike: Callable[[], bool]) -> Callable[..., Any]:
    def around(own: Callable[..., Any], layer: Any, x: Any, residual: Any = None, *more: Any, **named: Any) -> Any:
        from autosel.integrations import engine_ops

        odd = any(m is not None for m in (*more, *named.values())) or any(
            getattr(layer, n, None) for n in ("variance_size_override", "cast_x_before_out_mul", "fp32_residual")
        )
        if odd or getattr(layer, "_quant_linear", None) is not None:
            (engine_ops.NORM if residual is None else engine_ops.ADD_NORM).leave("another norm than the op")
        elif alike():
            (engine_ops.NORM if residual is None else engine_ops.ADD_NORM).leave(engine_ops.INVARIANT)
        else:
            made = engine_ops.norm(x, layer.weight.data, layer.variance_epsilon, offset, residual)
            if made is not None:
                return made
        return own(layer, x, residual, *more, **named)

    return around


def _gate(op: str, alike: Callable[[], bool]) -> Callable[..., Any]:
    def around(own: Callable[..., Any], layer: Any, x: Any, *more: Any, **named: Any) -> Any:
        from autosel.integrations import engine_ops

        if alike():
            engine_ops.GATED[op].leave(engine_ops.INVARIANT)
        elif more or named:
            engine_ops.GATED[op].leave("another gate than the op")
        else:
            extra = (int(getattr(layer, "approximate", "tanh") == "tanh"),) if op == "geglu" else ()
            made = engine_ops.gated(op, x, *extra)
            if made is not None:
                return made
        return own(layer, x, *more, **named)

    return around


def _tiles(device: Callable[[], str | None]) -> Callable[..., Any]:
    from autosel.integrations.engine_ops import handed_over

    def name(n: int, k: int, block_n: int, block_k: int) -> str:
        own = str(device()).replace(" ", "_")
        return f"N={n},K={k},device_name={own},dtype=fp8_w8a8,block_shape=[{block_n}, {block_k}].json"

    held: dict[Any, Any] = {}

    def around(own: Callable[..., Any], n: int, k: int, block_n: int, block_k: int) -> Any:
        if own not in held:
            held[own] = handed_over(own, name)
        return held[own](n, k, block_n, block_k)

    return around
