"""Plug into vLLM (an entry point): serve decided kernels, and provide exported files.

Each vLLM process loads this (`vllm.general_plugins`). It registers

- `--attention-backend CUSTOM`: vLLM's Triton backend, whose decode steps run decided kernels for `paged_attn`;
- RMSNorm, GemmaRMSNorm, SiluAndMul and GeluAndMul with decided kernels, unless vLLM compiles the model
  (set `--enforce-eager`, or `--compilation-config '{"mode": 0}'`, regardless of `custom_ops`);
- on a CPU, the linears of shapes that are decided, compiled or not (vllm_linear.py);
- the folder of AUTOSEL_ENGINE_FILES, before vLLM's own tiles.

vLLM's own code runs in all other cases. A vLLM with another interface is not changed, and a warning is printed.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from autosel import settings
from autosel.integrations import plugged

log = logging.getLogger(__name__)

WRITTEN_FOR = "0.33.0"
BACKEND = "autosel.integrations.vllm_attention.AutoselAttentionBackend"


def register() -> None:
    """Register once; no effect under AUTOSEL_DISABLE. Never raises, because a server must start without autosel too."""
    if settings.get("disable"):
        return
    try:
        for part in _parts():
            part()
        plugged.announce("vLLM", "vllm.autosel")  # a child of vLLM's logger, which shows INFO
    except Exception as error:
        plugged.leave("vLLM", WRITTEN_FOR, error)


def _parts() -> tuple[Any, ...]:
    """Return what to register. All imports that may fail happen before anything is changed."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.quantization.utils import fp8_utils
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from autosel.integrations.vllm_ops import REPLACED

    named, own = fp8_utils.get_device_name_as_file_name, fp8_utils.get_w8a8_block_fp8_configs
    custom = AttentionBackendEnum.CUSTOM

    def attention() -> None:
        if not custom.is_overridden():
            register_backend(custom, BACKEND)
        elif custom.get_path() != BACKEND:
            log.warning("autosel's attention is not registered: CUSTOM is %s", custom.get_path())

    def operators() -> None:
        for replaced, ours in REPLACED.items():
            if replaced.__name__ in op_registry_oot:
                continue  # autosel's, or another plug-in's, which stays
            flag = replaced.name
            replaced.register_oot(ours)
            ours.name = flag  # the name for custom_ops; vLLM would use the class's name

    def files() -> None:
        from autosel.integrations.engine_ops import handed_over

        def name(n: int, k: int, block_n: int, block_k: int) -> str:
            device = re.sub(r"[\s/]+", "_", named())
            return f"N={n},K={k},device_name={device},dtype=fp8_w8a8,block_shape=[{block_n},{block_k}].json"

        if settings.get("engine_files") and not getattr(own, "_autosel", False):
            fp8_utils.get_w8a8_block_fp8_configs = handed_over(own, name)

    def linears() -> None:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            from autosel.integrations import vllm_linear

            vllm_linear.register()

    return attention, operators, linears, files
