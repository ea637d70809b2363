"""Option `--device`: the names of this machine's devices, and the default one."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from autosel import settings
from autosel.errors import UnknownName, UsageError
from autosel.native import cuda

if TYPE_CHECKING:
    from autosel.cli.options import Option
    from autosel.values import Fingerprint


def default_device() -> str:
    """Return `cuda` if there is a GPU that PyTorch and the fingerprint can use; else `cpu`."""
    if not _has_cuda_driver():  # importing PyTorch takes a second
        return "cpu"
    import torch

    from autosel import fingerprint

    return "cuda" if torch.cuda.is_available() and len(fingerprint.present()) > 1 else "cpu"


def unused_gpu() -> str:
    """Return why a GPU of this machine is not the default device, or ""."""
    if not _has_cuda_driver() or default_device() != "cpu":
        return ""
    import torch

    from autosel.fingerprint import nvml

    try:
        count = nvml.counted()
    except UsageError as error:  # a container may have its host's driver library without a GPU
        return f"{error.what} ({error.why}): {error.todo}" if torch.cuda.is_available() else ""
    return _why_absent(0) if count else ""


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL(cuda.DRIVER)
    except OSError:
        return False
    return True


def device_option(help: str = "cpu, cuda or cuda:N  [default: the GPU, if there is one]") -> Option:
    return click.option("--device", default=default_device, metavar="DEVICE", help=help)


def told(device: str) -> str:
    """Return ` --device cpu` to append to a verb; empty for the default device."""
    return "" if device == default_device() else f" --device {device}"


def identity(device: str) -> Fingerprint:
    """Return the identity of a device of this machine without measuring. Raises UsageError, UnknownName."""
    from autosel.dispatch import devices

    refuse_absent(device)
    found, unknown = devices.device_at("cuda:0" if device == "cuda" else device)
    if unknown:
        todo = f"{settings.spelling()} fingerprint {device} shows details;  --device cpu always works"
        raise UsageError(f"{device} cannot be used", why=unknown, todo=todo)
    return found


def here() -> Iterator[tuple[str, Fingerprint]]:
    """Yield name and fingerprint of every device of this machine that can be identified; the CPU first."""
    from autosel.dispatch import devices

    for place in devices.places_here():
        found, unknown = devices.device_at(place)
        if not unknown:
            yield place, found


def refuse_absent(device: str) -> None:
    """Raise UsageError unless the device can be measured: this machine's CPU, or a GPU that is present."""
    from autosel.fingerprint import known

    if device == "cpu":
        return
    if device in known.names():
        why = f"a device of this machine is cpu, cuda or cuda:N; {device} is a name in fingerprints/"
    elif re.fullmatch(r"cuda(:\d+)?", device):
        why = _why_absent(int(device.partition(":")[2] or 0))
    else:
        raise UnknownName("device", device, ("cpu", "cuda", "cuda:1", *known.names()))
    if why:
        name = device if device in known.names() else "h200"
        todo = f"{settings.spelling()} knobs --fingerprint {name} shows what would run there; or use --device cpu"
        raise UsageError(f"{device} is not here", why=why, todo=todo)


def _why_absent(number: int) -> str:
    """Return why PyTorch does not have this GPU, or ""."""
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return "" if number < count else f"CUDA shows {count} device{'s' if count > 1 else ''} here, from cuda:0"
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) was built without CUDA"
    return "PyTorch finds no GPU: check nvidia-smi and CUDA_VISIBLE_DEVICES"
