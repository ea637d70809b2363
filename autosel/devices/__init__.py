"""Devices that run kernels: the only package that knows how a CPU and a GPU differ.

    devices.named("cuda:1")     # the device of that name, of this machine
    devices.of(tensor)          # the device that holds a tensor
    devices.KINDS[fp.kind]      # any device of a kind, for questions about a stored fingerprint

A `Device` (device.py) answers these questions; cpu/ and cuda/ implement it:

    identity            kind, noun, ceiling; identified, take, unit
    presence            here, counted, usable, why_unused, why_absent; among several: current_name, unused, taking_along
    probes              read_windows, drifted, meter
    placement           shared; memory, resident, streamed, use, current, torch_device
    synchronisation     settle, drain
    timing              on_host; timed, timer, call_spans, held
    capture             captures; captured, capturing
    memory              free_bytes, own_free_bytes, peak_bytes, forget_peak
    what can run        languages, native, interpreted

`on_host` divides devices in two. On the host, kernels run on this process's threads: a call returns when its work is
done, and its time depends on the number of threads. Elsewhere kernels are enqueued, and the device's clock times them.

What follows from a fingerprint's facts is not asked here but of the fingerprint: a device with a compute capability
(`cc`) is a GPU of CUDA. A further kind of device is a folder next to cpu/ and cuda/, and a line in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from autosel.devices.cpu.device import Cpu
from autosel.devices.cpu.identity import former_id
from autosel.devices.cuda.device import Cuda
from autosel.devices.device import Device, Language
from autosel.errors import AutoselError, UnknownName
from autosel.values import Fingerprint

if TYPE_CHECKING:
    import torch

KINDS: dict[str, Device] = {"cpu": Cpu(), "cuda": Cuda()}  # each value: the first device of the kind
HOST = "cpu"  # name of the device that every machine has


# --- by name, tensor or kind -----------------------------------------------------------------------------------------


@cache
def named(name: str) -> Device:
    """Return the device `cpu`, `cuda` or `cuda:1`, which may be absent. Raises UnknownName for any other name."""
    kind, _, number = name.partition(":")
    if kind not in KINDS or not (number or "0").isdecimal() or int(number or 0) >= KINDS[kind].most:
        raise UnknownName("device", name, tuple(KINDS))
    return type(KINDS[kind])(int(number)) if number else KINDS[kind]


def of(tensor: Any) -> Device:
    """Return the device that holds a tensor. Raises UnknownName for a kind without kernels (`meta`)."""
    return of_torch(tensor.device)


def of_torch(device: torch.device) -> Device:
    return named(device.type if device.index is None else f"{device.type}:{device.index}")


def kind_of(place: str) -> str:
    return place.partition(":")[0]


def on_host(kind: str) -> bool:
    """Return True if kernels on devices of this kind run on the host's threads; False for an unknown kind."""
    return kind in KINDS and KINDS[kind].on_host


def accelerated(kind: str) -> bool:
    """Return True for a known kind of device other than the host."""
    return kind in KINDS and not KINDS[kind].on_host


def runs(kind: str, language: Language) -> bool:
    """Return True if kernels written in a language run on devices of this kind."""
    return kind in KINDS and language in KINDS[kind].languages


# --- devices of this machine -----------------------------------------------------------------------------------------


def places_here() -> tuple[str, ...]:
    """Return the host and each other device that PyTorch can use."""
    return tuple(name for device in KINDS.values() for name in device.here())


def current() -> str:
    """Return the device on which this thread works: its current GPU if PyTorch can use one, else the host."""
    return next(name for device in reversed(KINDS.values()) if (name := device.current_name()))


def unused() -> bool:
    """Return True if there are devices that this process has not used. Starts none of them."""
    return any(device.unused() for device in KINDS.values())


def taking_along() -> Callable[[], None]:
    """Return a function that makes this thread's current devices those of another thread."""
    takes = [device.taking_along() for device in KINDS.values()]

    def take() -> None:
        for one in takes:
            one()

    return take


# --- identities ------------------------------------------------------------------------------------------------------


def place_of(tensor: Any) -> str:
    """Return `cpu`, `cuda:1`, or the type of a device without decisions (`meta`)."""
    device = tensor.device
    return f"{device.type}:{device.index or 0}" if accelerated(device.type) else str(device.type)


@cache
def this_device() -> Fingerprint:
    """Return this host's CPU: the identity alone, in a few milliseconds, without measuring."""
    return named(HOST).identified()


@cache
def _identified(place: str) -> Fingerprint:
    return named(place).identified()


def ids_of(device: Fingerprint) -> tuple[str, ...]:
    """Return the hw_ids whose decisions serve on a device: its own, and for this CPU the id that earlier versions gave
    a process bound to some of its cores."""
    return (device.hw_id,) if device.hw_id != this_device().hw_id else tuple({device.hw_id: 0, former_id(): 0})


def device_at(place: str) -> tuple[Fingerprint, str]:
    """Return the identity of the device at a place; without one, the reason, and an identity that no decision
    matches. Two GPUs of a kind have one identity, and serve each other's decisions."""
    if place == HOST:
        return this_device(), ""
    kind, nobody = kind_of(place), _nobody(place)
    if not accelerated(kind):
        return nobody, f"the tensors are on {kind}, a device without decisions"
    try:
        return _identified(place), ""
    except AutoselError as error:
        return nobody, f"{place} cannot be identified: {'; '.join(str(error).splitlines())}"
    except Exception as error:  # a broken library: best() still has a baseline, and the caller cannot repair it
        return nobody, f"{place} cannot be identified: {type(error).__name__}: {error}"


def _nobody(place: str) -> Fingerprint:
    kind = KINDS.get(kind_of(place), KINDS[HOST]).kind
    return Fingerprint(kind=kind, name=place, identity={}, environment={}, rates={})


def is_nobody(hw_id: str) -> bool:
    """Return True for a device that could not be identified."""
    return hw_id in {_nobody(kind).hw_id for kind in KINDS}
