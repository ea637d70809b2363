"""Precision of this process's fp32 matrix products."""

from __future__ import annotations

import torch


def matmul_precision() -> str:
    """Return `highest`, `high` or `medium`.

    If a process has set PyTorch's backends separately, return each setting (`cuda_tf32-mkldnn_ieee`): no single word
    exists then, and querying it raises.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        each = {
            "cuda": torch.backends.cuda.matmul.fp32_precision,
            "mkldnn": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]  # set at import
        }
        return "-".join(f"{name}_{'ieee' if found == 'none' else found}" for name, found in each.items())
