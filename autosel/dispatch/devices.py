"""Whose decisions serve tensors of which device: `cpu` those of this host, `cuda:1` those of that GPU.

`cuda:1` is what torch calls so in this process. Its identity is read by CUDA's own number (which already follows
CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER) and by PCI address from NVML; two GPUs of a kind have one identity, and
serve each other's decisions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from autosel.errors import AutoselError
from autosel.fingerprint import gpu, machine
from autosel.values import DeviceKind, Fingerprint

CPU = "cpu"


def place_of(tensor: Any) -> str:
    """`cpu`, `cuda:1`, or the type of a device nobody decides for (`meta`)."""
    device = tensor.device
    if device.type == "cuda":
        return f"cuda:{0 if device.index is None else device.index}"
    return str(device.type)


def kind_of(place: str) -> str:
    return place.partition(":")[0]


@cache
def this_device() -> Fingerprint:
    """This host's CPU. Identity alone: a few milliseconds, nothing measured."""
    identity = machine.identity()
    return Fingerprint(kind="cpu", name=identity["model"], identity=identity, environment={}, rates={})


def device_at(place: str) -> tuple[Fingerprint, str]:
    """The identity of what is at a place, and why it has none: then it is one that no decision was made for."""
    if place == CPU:
        return this_device(), ""
    kind, _, number = place.partition(":")
    nobody = _nobody(place)
    if kind != "cuda":
        return nobody, f"the tensors are on {kind}, for which nothing is decided"
    try:
        return _gpu(int(number)), ""
    except AutoselError as error:
        return nobody, f"{place} cannot be identified: {'; '.join(str(error).splitlines())}"
    except Exception as error:  # a broken library: best() has a baseline, and its caller nothing to mend
        return nobody, f"{place} cannot be identified: {type(error).__name__}: {error}"


def _nobody(place: str) -> Fingerprint:
    kind: DeviceKind = "cuda" if kind_of(place) == "cuda" else "cpu"
    return Fingerprint(kind=kind, name=place, identity={}, environment={}, rates={})


def is_nobody(hw_id: str) -> bool:
    """Of a device that could not be identified."""
    return hw_id in {_nobody(place).hw_id for place in (CPU, "cuda")}


@cache
def _gpu(ordinal: int) -> Fingerprint:
    return gpu.identified(ordinal)


def places_here() -> tuple[str, ...]:
    """The CPU and each GPU that torch sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (CPU, *(f"cuda:{number}" for number in range(count)))


def gpus_unasked() -> bool:
    """Are there GPUs on which this process has not begun to work? Counted by NVML, which leaves CUDA as it was: a child
    that is forked after CUDA was asked cannot use it."""
    import torch

    return not torch.cuda.is_initialized() and torch.cuda.device_count() > 0
