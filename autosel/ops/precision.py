"""How exactly this process multiplies fp32 matrices."""

from __future__ import annotations

import torch


def matmul_precision() -> str:
    """`highest`, `high` or `medium`; of a process that has set PyTorch's backends one by one, what each does
    (`cuda_tf32-mkldnn_ieee`): there the one word no longer exists, and asking for it raises."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        each = {
            "cuda": torch.backends.cuda.matmul.fp32_precision,
            "mkldnn": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]  # set at import
        }
        return "-".join(f"{name}_{'ieee' if found == 'none' else found}" for name, found in each.items())
