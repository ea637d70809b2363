"""The kernels behind PyTorch's SDPA, each forced: by default SDPA uses the first eligible one, not the fastest.

Which ones exist depends on PyTorch's build, the driver and cuDNN: each is tried once with a small call, in a child
process with a time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autosel.candidates.gpu import GpuCandidate, capability
from autosel.candidates.libraries.base import narrow_heads
from autosel.candidates.probe import device, fault
from autosel.devices.cuda import nvml
from autosel.values import Backend, Fingerprint, Knobs, PythonRecipe, Recipe, Workload

if TYPE_CHECKING:
    from torch import Tensor

KERNELS_OF_SDPA = {
    "cudnn": ("CUDNN_ATTENTION", (8, 0)),
    "flash": ("FLASH_ATTENTION", (8, 0)),
    "efficient": ("EFFICIENT_ATTENTION", (5, 0)),
}


class Forced(GpuCandidate):
    """`sdpa:<kernel>`, for attention over a cache that is read completely: flash accepts no mask."""

    backend: Backend = "TORCH"
    dtypes = ("bf16", "fp16")
    noun = "a CUDA kernel of PyTorch's"

    def __init__(self, op: str, what: str) -> None:
        self.op, self.what, self.name = op, what, f"sdpa:{what}"

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if why := super().why_not(w, fp):
            return why
        cc = capability(fp)
        least = KERNELS_OF_SDPA[self.what][1]
        if cc < least:
            return f"needs compute capability {least[0]}.{least[1]}; the device has {cc[0]}.{cc[1]}"
        if w.trait("softcap", 0.0):
            return "SDPA has no softcap"
        if self.what == "efficient" and w["Hq"] != w["Hkv"]:
            return "its kernel has no grouped heads"
        if self.op == "attn" and (w.trait("ragged", default=False) or w["S"] != 1):
            return "without a mask it supports one position a sequence, all of equal length"
        if self.op == "prefill_attn" and 0 < int(w.trait("window", 0)) < w["S"]:
            return "without a mask it supports no window"
        keys = w["L"] if self.op == "attn" else w["S"]
        why = _no_cudnn(w, keys, cc) if self.what == "cudnn" else ""
        return why or unusable(self.what, fp)

    def recipe(self, w: Workload, fp: Fingerprint, knobs: Knobs) -> Recipe:
        return PythonRecipe(target=f"{__name__}:{self.op}_{self.what}")


def unusable(what: str, fp: Fingerprint) -> str:
    """Return why a small call of this kernel does not give the right result on this device, or ""."""
    about = (fp.hw_id, nvml.driver())
    why = fault(f"{__name__}:called", what, fp.kind, str(fp.identity.get("cc", "")), about=about)
    return why and f"PyTorch's {what} kernel does not run here: {why}"


def called(what: str, kind: str, cc: str) -> None:
    """Run in the child: one position of four heads over 256 keys.

    Raises PyTorch's error, or ValueError for a result whose error exceeds the roundings of the probabilities and of the
    result to fp16.
    """
    import torch

    q, k, v = (torch.randn(1, 4, n, 64, generator=torch.Generator().manual_seed(n)).half() for n in (1, 256, 257))
    v = v[:, :, :256]
    scores = (q.double() @ k.double().mT) * 64**-0.5
    expected = scores.softmax(-1) @ v.double()
    place = device(kind, cc)
    got = _forced(what, q.to(place), k.to(place), v.to(place), 0.0, causal=False).cpu().double()
    worst = float((got - expected).abs().max())
    allowed = 4 * 2.0**-11 * float(v.abs().max())
    if not worst <= allowed:
        raise ValueError(f"a small call has an error of {worst:.3g}; {allowed:.3g} is allowed")


def _no_cudnn(w: Workload, keys: int, cc: tuple[int, int]) -> str:
    """Return why PyTorch would not use cuDNN's kernel, by its own checks, or ""."""
    widest = 256 if cc == (9, 0) else 128
    return narrow_heads(w, widest) or ("its kernel needs more than one key" if keys == 1 else "")


def _attn(kernel: str) -> Callable[..., Any]:
    def attn(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lengths: Tensor | None,
        max_len: int,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        first = max(0, max_len - window) if window else 0
        return _forced(kernel, q, k[:, :, first:max_len], v[:, :, first:max_len], scale, causal=False)

    return attn


def _prefill(kernel: str) -> Callable[..., Any]:
    def prefill_attn(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float) -> Tensor:
        return _forced(kernel, q, k, v, scale, causal=True)

    return prefill_attn


def _forced(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> Tensor:
    """Call SDPA with one kernel. Raises PyTorch's error if the kernel does not accept these operands."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    with sdpa_kernel(getattr(SDPBackend, KERNELS_OF_SDPA[kernel][0])):
        gqa = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale or None, enable_gqa=gqa)


attn_cudnn, attn_flash, attn_efficient = map(_attn, KERNELS_OF_SDPA)
prefill_attn_cudnn, prefill_attn_flash, prefill_attn_efficient = map(_prefill, KERNELS_OF_SDPA)

KERNELS = tuple(Forced(op, what) for op in ("attn", "prefill_attn") for what in KERNELS_OF_SDPA)
