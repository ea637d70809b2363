"""Common base of candidates for GPUs of CUDA: their dtypes, device and operands."""

from __future__ import annotations

from autosel import devices
from autosel.candidates.base import Checked
from autosel.values import Fingerprint, Workload

MOST_ELEMENTS = 2**31 - 1  # per dimension: kernels index within one in 32 bits
SCALED_HEADS = (  # operands of attention over a cache in codes with a scale per head
    "q", "k.codes", "v.codes", "k.scales", "v.scales", "lengths", "max_len", "scale", "window", "softcap",
)  # fmt: skip


class GpuCandidate(Checked):
    """A candidate for some dtypes on GPUs. `noun` (`a CUDA kernel`) names it in the reason of a rejection."""

    dtypes: tuple[str, ...]
    noun: str

    def why_not(self, w: Workload, fp: Fingerprint) -> str:
        if w.dtype not in self.dtypes:
            return f"supports {', '.join(self.dtypes)}; the workload is {w.dtype}"
        return "" if devices.runs(fp.kind, "CUDA") else f"{self.noun}; the device is a CPU"


def too_long(w: Workload) -> str:
    """Return why autosel's kernels cannot index a dimension, or ""."""
    return next((f"{name} = {size} is above 2^31 - 1" for name, size in w.dims if size > MOST_ELEMENTS), "")


def capability(fp: Fingerprint) -> tuple[int, int]:
    """Return a GPU's compute capability."""
    major, _, minor = str(fp.identity["cc"]).partition(".")
    return int(major), int(minor or 0)
