"""Find the device whose decisions serve a tensor: `cpu` for this host, `cuda:1` for that GPU.

`cuda:1` is torch's name in this process. The GPU's identity is read by CUDA's number (which already follows
CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER) and by PCI address from NVML. Two GPUs of a kind have one identity, and
serve each other's decisions.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from autosel.errors import AutoselError
from autosel.fingerprint import gpu, machine
from autosel.values import DeviceKind, Fingerprint, digest

CPU = "cpu"


def place_of(tensor: Any) -> str:
    """Return `cpu`, `cuda:1`, or the type of a device without decisions (`meta`)."""
    device = tensor.device
    if device.type == "cuda":
        return f"cuda:{0 if device.index is None else device.index}"
    return str(device.type)


def kind_of(place: str) -> str:
    return place.partition(":")[0]


@cache
def this_device() -> Fingerprint:
    """Return this host's CPU: the identity alone, in a few milliseconds, without measuring."""
    hardware, usable = machine.hardware(), machine.identity()["cpus"]
    fewer = usable if usable < hardware["cpus"] else 0
    return Fingerprint(kind="cpu", name=hardware["model"], identity=hardware, environment={}, rates={}, threads=fewer)


@cache
def _former_id() -> str:
    return digest({"kind": "cpu", **machine.identity()})


def ids_of(device: Fingerprint) -> tuple[str, ...]:
    """Return the hw_ids whose decisions serve on a device: its own, and for this CPU the id that earlier versions gave
    a process bound to some of its cores."""
    return (device.hw_id,) if device.hw_id != this_device().hw_id else tuple({device.hw_id: 0, _former_id(): 0})


def device_at(place: str) -> tuple[Fingerprint, str]:
    """Return the identity of the device at a place; without one, the reason, and an identity that no decision
    matches."""
    if place == CPU:
        return this_device(), ""
    kind, _, number = place.partition(":")
    nobody = _nobody(place)
    if kind != "cuda":
        return nobody, f"the tensors are on {kind}, a device without decisions"
    try:
        return _gpu(int(number)), ""
    except AutoselError as error:
        return nobody, f"{place} cannot be identified: {'; '.join(str(error).splitlines())}"
    except Exception as error:  # a broken library: best() still has a baseline, and the caller cannot repair it
        return nobody, f"{place} cannot be identified: {type(error).__name__}: {error}"


def _nobody(place: str) -> Fingerprint:
    kind: DeviceKind = "cuda" if kind_of(place) == "cuda" else "cpu"
    return Fingerprint(kind=kind, name=place, identity={}, environment={}, rates={})


def is_nobody(hw_id: str) -> bool:
    """Return True for a device that could not be identified."""
    return hw_id in {_nobody(place).hw_id for place in (CPU, "cuda")}


@cache
def _gpu(ordinal: int) -> Fingerprint:
    return gpu.identified(ordinal)


def places_here() -> tuple[str, ...]:
    """Return the CPU and each GPU that torch sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (CPU, *(f"cuda:{number}" for number in range(count)))


def gpus_unasked() -> bool:
    """Return True if there are GPUs that this process has not used. NVML counts them without starting CUDA, because a
    child forked after CUDA's start cannot use it."""
    import torch

    return not torch.cuda.is_initialized() and torch.cuda.device_count() > 0
