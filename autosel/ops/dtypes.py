"""The dtypes of contracts, and their roundings."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autosel.values import DTypeName

DTYPE: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
}
DTYPE_NAME: Mapping[torch.dtype, DTypeName] = {v: k for k, v in DTYPE.items()}  # type: ignore[misc]

# Unit roundoff u = 2^-p of each dtype (half a unit in the last place of 1).
UNIT: Mapping[str, float] = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp8_e4m3": 2.0**-4}
U32 = UNIT["fp32"]
# Smallest subnormal; and smallest normal, below which flush-to-zero is legal (vdpbf16ps and torch's linear flush).
TINY_SUBNORMAL: Mapping[str, float] = {"bf16": 2.0**-133, "fp16": 2.0**-24, "fp32": 2.0**-149, "fp8_e4m3": 2.0**-9}
TINY_NORMAL: Mapping[str, float] = {"bf16": 2.0**-126, "fp16": 2.0**-14, "fp32": 2.0**-126, "fp8_e4m3": 2.0**-6}
