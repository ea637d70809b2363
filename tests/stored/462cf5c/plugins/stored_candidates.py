"""Three candidates of a user: two that compute with fp8 operands on a CPU, and one that crashes while it is raced."""

from __future__ import annotations

from autosel.candidates.user import UserCandidate

CANDIDATES = (
    UserCandidate("gemv_fp8", "stored_kernels:gemv_fp8", "", name="gemv_fp8"),
    UserCandidate("attn_decode_fp8", "stored_kernels:attn_decode_fp8", "", name="attn_decode_fp8"),
    UserCandidate("swiglu", "stored_kernels:swiglu", "", name="crashes"),
)
