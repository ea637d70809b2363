"""Read a device's properties from CUDA's driver, under the names of cupy's runtime.

Rates need cupy, but the driver suffices for the identity, so serving decisions on a GPU does not require cupy.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from autosel.native.cuda import DRIVER

# cuda.h, CUdevice_attribute: the numbers of the runtime's cudaDeviceAttr.
ATTRIBUTES = {
    "cudaDevAttrMultiProcessorCount": 16,
    "cudaDevAttrL2CacheSize": 38,
    "cudaDevAttrMaxThreadsPerMultiProcessor": 39,
    "cudaDevAttrMaxSharedMemoryPerMultiprocessor": 81,
    "cudaDevAttrMaxRegistersPerMultiprocessor": 82,
    "cudaDevAttrMaxSharedMemoryPerBlockOptin": 97,
    "cudaDevAttrMaxBlocksPerMultiprocessor": 106,
}
MAJOR, MINOR = 75, 76  # of the compute capability
PCI_CHARACTERS = 64  # `0000:0a:00.0`, with space for a longer domain


class CUDARuntimeError(Exception):
    """Raised if the driver returns an error; cupy's name for it."""


def runtime() -> Any:
    """Provide the part of cupy's runtime that reads an identity. Raises OSError without a driver, CUDARuntimeError."""
    library = ctypes.CDLL(DRIVER)
    _ask(library, "cuInit", ctypes.c_uint(0))
    return SimpleNamespace(
        **ATTRIBUTES,
        CUDARuntimeError=CUDARuntimeError,
        getDeviceCount=lambda: _number(library, "cuDeviceGetCount"),
        deviceGetAttribute=lambda number, ordinal: _attribute(library, number, ordinal),
        deviceGetPCIBusId=lambda ordinal: _pci(library, ordinal),
        getDeviceProperties=lambda ordinal: _properties(library, ordinal),
    )


def _attribute(library: ctypes.CDLL, number: int, ordinal: int) -> int:
    return _number(library, "cuDeviceGetAttribute", ctypes.c_int(number), _device(library, ordinal))


def _pci(library: ctypes.CDLL, ordinal: int) -> str:
    text = ctypes.create_string_buffer(PCI_CHARACTERS)
    _ask(library, "cuDeviceGetPCIBusId", text, ctypes.c_int(PCI_CHARACTERS), _device(library, ordinal))
    return text.value.decode()


def _properties(library: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device, uuid, total = _device(library, ordinal), (ctypes.c_ubyte * 16)(), ctypes.c_size_t()
    _ask(
        library, "cuDeviceGetUuid_v2", uuid, device
    )  # of a slice if MIG divides the board; the first version: the board's
    _ask(library, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    return {
        "major": _attribute(library, MAJOR, ordinal),
        "minor": _attribute(library, MINOR, ordinal),
        "uuid": bytes(uuid),
        "totalGlobalMem": total.value,
    }


def _device(library: ctypes.CDLL, ordinal: int) -> ctypes.c_int:
    return ctypes.c_int(_number(library, "cuDeviceGet", ctypes.c_int(ordinal)))


def _number(library: ctypes.CDLL, function: str, *given: Any) -> int:
    found = ctypes.c_int()
    _ask(library, function, ctypes.byref(found), *given)
    return found.value


def _ask(library: ctypes.CDLL, function: str, *given: Any) -> None:
    try:
        code = getattr(library, function)(*given)
    except AttributeError as error:  # a driver before CUDA 11.4
        raise CUDARuntimeError(f"this driver has no {function}") from error
    if code:
        said = ctypes.c_char_p()
        library.cuGetErrorString(ctypes.c_int(code), ctypes.byref(said))
        raise CUDARuntimeError(f"{function}: {(said.value or b'error').decode()} ({code})")
