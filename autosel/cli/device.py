"""Option `--device`: the names of this machine's devices, and the default one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from autosel import devices, settings
from autosel.errors import UnknownName, UsageError
from autosel.fingerprint import known

if TYPE_CHECKING:
    from autosel.cli.options import Option
    from autosel.values import Fingerprint


def default_device() -> str:
    """Return `cuda` if there is a GPU that PyTorch and the fingerprint can use; else `cpu`."""
    return next(kind for kind, device in reversed(devices.KINDS.items()) if device.usable())


def unused_gpu() -> str:
    """Return why a GPU of this machine is not the default device, or ""."""
    return next(filter(None, (device.why_unused() for device in devices.KINDS.values())), "")


def device_option(help: str = "cpu, cuda or cuda:N  [default: the GPU, if there is one]") -> Option:
    return click.option("--device", default=default_device, metavar="DEVICE", help=help)


def told(device: str) -> str:
    """Return ` --device cpu` to append to a verb; empty for the default device."""
    return "" if device == default_device() else f" --device {device}"


def identity(device: str) -> Fingerprint:
    """Return the identity of a device of this machine without measuring. Raises UsageError, UnknownName."""
    refuse_absent(device)
    found, unknown = devices.device_at(device)
    if unknown:
        todo = f"{settings.spelling()} fingerprint {device} shows details;  --device cpu always works"
        raise UsageError(f"{device} cannot be used", why=unknown, todo=todo)
    return found


def here() -> Iterator[tuple[str, Fingerprint]]:
    """Yield name and fingerprint of every device of this machine that can be identified; the CPU first."""
    for place in devices.places_here():
        found, unknown = devices.device_at(place)
        if not unknown:
            yield place, found


def ids_here() -> dict[str, str]:
    """Return the identities of this machine's devices, with the kind of each. Equal devices have one identity."""
    return {hw_id: fp.kind for _, fp in here() for hw_id in devices.ids_of(fp)}


def refuse_absent(device: str) -> None:
    """Raise UsageError unless the device can be measured: this machine's CPU, or a GPU that is present."""
    if device == devices.HOST:
        return
    kind, colon, number = device.partition(":")
    if device in known.names():
        why = f"a device of this machine is cpu, cuda or cuda:N; {device} is a name in fingerprints/"
    elif devices.accelerated(kind) and (number.isdecimal() or not colon):
        why = devices.named(device).why_absent()
    else:
        raise UnknownName("device", device, ("cpu", "cuda", "cuda:1", *known.names()))
    if why:
        name = device if device in known.names() else "h200"
        todo = f"{settings.spelling()} knobs --fingerprint {name} shows what would run there; or use --device cpu"
        raise UsageError(f"{device} is not here", why=why, todo=todo)
