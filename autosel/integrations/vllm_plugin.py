"""vLLM's plug-in: what was decided serves in vLLM, and files exported for it are found. Entry point of autosel.

Loaded by each vLLM process by itself (`vllm.general_plugins`). It registers

- `--attention-backend CUSTOM`: vLLM's Triton backend, whose decode steps run what was decided for `paged_attn`;
- RMSNorm, GemmaRMSNorm, SiluAndMul and GeluAndMul with decided kernels, where vLLM does not compile the model
  (`--enforce-eager`, or `--compilation-config '{"mode": 0}'`): what it compiles is its own, whatever `custom_ops` says;
- the folder AUTOSEL_ENGINE_FILES names, before vLLM's own tiles.

Where nothing was decided vLLM's own code runs. A vLLM whose interface is another is left as it is, with a warning.
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
    """Does nothing the second time, nor under AUTOSEL_DISABLE. Never raises: a server shall start without us."""
    if settings.get("disable"):
        return
    try:
        for part in _parts():
            part()
    except Exception as error:
        plugged.leave("vLLM", WRITTEN_FOR, error)


def _parts() -> tuple[Any, ...]:
    """What there is to register. All that could be missing is looked up before anything is changed."""
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
                continue  # ours, or another plug-in's, which stays
            flag = replaced.name
            replaced.register_oot(ours)
            ours.name = flag  # what custom_ops calls it: vLLM would have it under the class's name

    def files() -> None:
        from autosel.integrations.engine_ops import handed_over

        def name(n: int, k: int, block_n: int, block_k: int) -> str:
            device = re.sub(r"[\s/]+", "_", named())
            return f"N={n},K={k},device_name={device},dtype=fp8_w8a8,block_shape=[{block_n},{block_k}].json"

        if settings.get("engine_files") and not getattr(own, "_autosel", False):
            fp8_utils.get_w8a8_block_fp8_configs = handed_over(own, name)

    return attention, operators, files
