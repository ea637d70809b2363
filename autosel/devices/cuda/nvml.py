"""Read a GPU's properties: limits from the CUDA runtime's attributes, identity and state from NVML.

CUDA's device 0 depends on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; NVML's numbering ignores both. The two are
matched by PCI address, and within a MIG-partitioned device by UUID, never by number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from autosel import extras, settings
from autosel.devices.cuda import libcuda
from autosel.errors import UsageError

T = TypeVar("T")
DRIVER = Path("/sys/module/nvidia/version")
MEMORY_STEP_BYTES = 256 << 20  # driver versions reserve different amounts: identity rounds them away
# FLOP per clock and SM of dense bf16 with fp32 accumulation: NVIDIA's architecture whitepapers (A100, Ada, Hopper,
# Blackwell); consumer Blackwell by its rated figure over SMs and clock.
MATRIX_FLOP_PER_CLOCK = {
    (8, 0): 2048,
    (8, 6): 512,
    (8, 9): 1024,
    (9, 0): 4096,
    (10, 0): 8192,
    (10, 3): 8192,
    (12, 0): 512,
}
GEFORCE_MATRIX_FLOP_PER_CLOCK = {(8, 9): 512}  # only professional parts accumulate in fp32 at full rate
# CUDA C++ Programming Guide, arithmetic throughput: the same for all except Blackwell Ultra, which has twice as many.
SFU_PER_CLOCK, MORE_SFU_PER_CLOCK = 16, {(10, 3): 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Hold raw readings. `limits` by CUDA attribute; None if NVML does not report a value."""

    name: str
    cc: tuple[int, int]
    limits: Mapping[str, int]
    memory_bytes: int
    memory_bus_bits: int
    sm_clock_max_hz: float
    memory_clock_max_hz: float
    ecc: bool | None
    mig_profile: str | None
    power_limit_w: float | None
    driver: str
    uuid: str


def identity_of(r: Readings) -> dict[str, Any]:
    """Return the identity, which does not change with temperature, load, driver or slot."""
    per_clock = MATRIX_FLOP_PER_CLOCK.get(r.cc, 0)
    if "GeForce" in r.name:
        per_clock = GEFORCE_MATRIX_FLOP_PER_CLOCK.get(r.cc, per_clock)
    return {
        "vendor": "NVIDIA",
        "name": r.name,
        "cc": f"{r.cc[0]}.{r.cc[1]}",
        **r.limits,
        "memory_bytes": r.memory_bytes // MEMORY_STEP_BYTES * MEMORY_STEP_BYTES,
        "memory_bus_bits": r.memory_bus_bits,
        "sm_clock_max_hz": r.sm_clock_max_hz,
        "memory_clock_max_hz": r.memory_clock_max_hz,
        "ecc": r.ecc,
        "mig_profile": r.mig_profile,
        "sfu_per_clock_sm": MORE_SFU_PER_CLOCK.get(r.cc, SFU_PER_CLOCK),
        "matrix_flop_per_clock_sm": per_clock,
    }


def peak_read_bytes_per_s(r: Readings) -> float:
    """Return 2 x memory clock x bus: two transfers per clock. 0 for a slice of a device, whose share NVML does not
    report."""
    return 0.0 if r.mig_profile else 2 * r.memory_clock_max_hz * r.memory_bus_bits / 8


# --- reading ---------------------------------------------------------------------------------------------------------

NO_NVML = "check nvidia-smi and the driver; a container gets NVML with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
# Fixes for failures of NVML's start, by their names in nvml.h.
TODO = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "install the driver; a container gets its library with "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "NVML_ERROR_DRIVER_NOT_LOADED": "load the driver's kernel module (modprobe nvidia); nvidia-smi fails alike",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the driver was upgraded beneath a running system: restart the machine, or "
    "unload the nvidia modules and load them again",
    "NVML_ERROR_NO_PERMISSION": "let this user, or this container, open /dev/nvidiactl and /dev/nvidia0 ...",
}

# Name in the identity -> CUDA attribute.
LIMITS = {
    "sm_count": "cudaDevAttrMultiProcessorCount",
    "l2_bytes": "cudaDevAttrL2CacheSize",
    "regs_per_sm": "cudaDevAttrMaxRegistersPerMultiprocessor",
    "smem_per_sm_bytes": "cudaDevAttrMaxSharedMemoryPerMultiprocessor",
    "smem_per_cta_bytes": "cudaDevAttrMaxSharedMemoryPerBlockOptin",
    "threads_per_sm": "cudaDevAttrMaxThreadsPerMultiProcessor",
    "ctas_per_sm": "cudaDevAttrMaxBlocksPerMultiprocessor",
}


def read(ordinal: int) -> Readings:
    """Read CUDA's device `ordinal`. Raises UsageError, naming the missing part: driver, cupy, or the device."""
    runtime = _runtime_or_driver()
    count = _count(runtime)
    if not 0 <= ordinal < count:
        raise UsageError(
            f"no such device: cuda:{ordinal}",
            why=f"CUDA sees {count} device{'' if count == 1 else 's'}{_shown()}",
            todo="check CUDA_VISIBLE_DEVICES" if count else "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    limits = {name: int(runtime.deviceGetAttribute(getattr(runtime, a), ordinal)) for name, a in LIMITS.items()}
    told = runtime.getDeviceProperties(ordinal)  # cupy has no attribute for the compute capability
    cc = int(told["major"]), int(told["minor"])
    # Sixteen bytes, which cupy reads as a C string (the driver returns all): up to the first zero if it is beyond them.
    return _from_nvml(runtime.deviceGetPCIBusId(ordinal), told["uuid"][:16], cc, limits, told)


def _shown() -> str:
    """Return the visible devices. An unknown name hides itself and all that follow it."""
    shown = settings.visible_gpus()
    return "" if shown is None else f", with CUDA_VISIBLE_DEVICES={shown!r}"


def count() -> int:
    """Return how many devices CUDA sees; 0 without a driver or cupy."""
    try:
        return counted()
    except UsageError:
        return 0


def counted() -> int:
    """Return how many devices CUDA sees. Raises UsageError if it cannot be asked."""
    return _count(_runtime())


def _runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except Exception as error:  # a cupy for another CUDA may raise anything
        raise UsageError(
            "a GPU's fingerprint needs cupy", why=str(error), todo=f"install it:  {extras.gpu_command()}"
        ) from error
    return runtime


def _runtime_or_driver() -> Any:
    """Return cupy's runtime, or the driver without cupy: it knows a device's identity, but not its rates."""
    try:
        return _runtime()
    except UsageError as error:
        try:
            return libcuda.runtime()
        except (OSError, libcuda.CUDARuntimeError) as missing:
            why = f"{error.why}; nor does the driver answer: {missing}"
            raise UsageError(error.what, why=why, todo=error.todo) from error


def _count(runtime: Any) -> int:
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        raise UsageError("CUDA finds no device", why=str(error), todo="check nvidia-smi and the driver") from error


def _from_nvml(
    pci: str, uuid: bytes, cc: tuple[int, int], limits: Mapping[str, int], told: Mapping[str, Any]
) -> Readings:
    """Read NVML. `told`: CUDA's description of the device. NVML reports no memory for a chip that shares its host's."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        named = {getattr(nvml, name): todo for name, todo in TODO.items()}
        todo = named.get(error.value, NO_NVML)
        raise UsageError("NVML does not answer", why=str(error), todo=todo) from error
    try:
        board = nvml.nvmlDeviceGetHandleByPciBusId(pci.encode())
        slice_ = _mig_slice(nvml, board, uuid)
        return Readings(
            name=_text(nvml.nvmlDeviceGetName(board)),
            cc=cc,
            limits=limits,
            memory_bytes=int(
                _maybe(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(slice_ or board).total) or told["totalGlobalMem"]
            ),
            memory_bus_bits=int(_maybe(nvml, lambda: nvml.nvmlDeviceGetMemoryBusWidth(board)) or 0),
            sm_clock_max_hz=1e6 * nvml.nvmlDeviceGetMaxClockInfo(board, nvml.NVML_CLOCK_SM),
            memory_clock_max_hz=1e6
            * (_maybe(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(board, nvml.NVML_CLOCK_MEM)) or 0),
            ecc=_maybe(nvml, lambda: bool(nvml.nvmlDeviceGetEccMode(board)[0])),
            # 1g.18gb of `NVIDIA H200 MIG 1g.18gb`
            mig_profile=_text(nvml.nvmlDeviceGetName(slice_)).rpartition("MIG ")[2] if slice_ else None,
            power_limit_w=_maybe(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3),
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            uuid=_text(nvml.nvmlDeviceGetUUID(slice_ or board)),
        )
    except nvml.NVMLError as error:
        raise UsageError(f"NVML does not describe the device at {pci}", why=str(error)) from error
    finally:
        nvml.nvmlShutdown()


def _mig_slice(nvml: Any, board: Any, uuid: bytes) -> Any | None:
    """Return the MIG device of CUDA, by UUID (cupy cuts it at its first zero); None if the board is whole."""
    mode = _maybe(nvml, lambda: nvml.nvmlDeviceGetMigMode(board)[0])
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    slices = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(board)):
        found = _maybe(nvml, lambda index=index: nvml.nvmlDeviceGetMigDeviceHandleByIndex(board, index))
        if found is not None:
            slices.append(found)
    alike = [s for s in slices if plain_uuid(_text(nvml.nvmlDeviceGetUUID(s))).startswith(uuid.hex())]
    if len(alike) == 1:
        return alike[0]
    if len(slices) == 1:  # older drivers give CUDA the board's UUID
        return slices[0]
    raise UsageError(
        "this device is divided by MIG, and this process's slice cannot be identified",
        why=f"{len(slices)} slices, {len(alike)} with CUDA's UUID {uuid.hex()}",
        todo="name one slice in CUDA_VISIBLE_DEVICES (nvidia-smi -L)",
    )


def plain_uuid(text: str) -> str:
    """Return the hexadecimal digits of `MIG-5a2b...`, `GPU-5a2b-...`."""
    return text.partition("-")[2].replace("-", "").lower()


def _maybe(nvml: Any, ask: Any) -> Any:
    """Return None if this device or driver does not support the query, or does not permit it."""
    try:
        return ask()
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NotFound,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_NoPermission,
    ):
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def driver() -> str:
    """Return the version of the GPU's driver; "" without one. Read from the kernel module's file, because a library
    that was upgraded under a loaded module answers no query."""
    try:
        return DRIVER.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# --- state -----------------------------------------------------------------------------------------------------------


def slowdown(uuid: str) -> str:
    """Return why the device now runs slower than it could (heat, power brake), or "". Read around a measurement, which
    stays valid if NVML has no answer."""

    def reasons(nvml: Any, handle: Any) -> str:
        if uuid.startswith("MIG-"):  # a slice has no clock
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return reasons_of(_clock_events(nvml, handle))

    return _answer(uuid, reasons, "")


def _answer(uuid: str, ask: Callable[[Any, Any], T], unknown: T) -> T:
    """Return `ask(nvml, handle)` for a device; `unknown` if NVML has no answer."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        try:
            return ask(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return unknown


def _clock_events(nvml: Any, handle: Any) -> int:
    """Read the clock events; drivers before 535 have an older name for the query."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError_FunctionNotFound:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def is_shared(uuid: str) -> bool:
    """Return True if another process computes on the device, or if it is a slice next to others. False if NVML does not
    tell."""

    def others(nvml: Any, handle: Any) -> bool:
        return any(process.pid != os.getpid() for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle))

    return uuid.startswith("MIG-") or _answer(uuid, others, False)


def free_bytes(ordinal: int) -> int | None:
    """Return a device's free memory without creating a CUDA context; None if NVML does not know it."""
    return _answer(read(ordinal).uuid, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).free), None)


def energy_counter(uuid: str) -> Callable[[], int]:
    """Return a reader of the board's energy since its driver was loaded, in millijoules. Raises OSError if NVML does
    not report it, now or later: boards before Volta and slices have no counter."""
    import pynvml as nvml

    def read() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError as error:
            raise OSError(f"NVML's energy counter of {uuid}: {error}") from error

    if uuid.startswith("MIG-"):
        raise OSError("a slice of a GPU has no energy counter")
    try:
        nvml.nvmlInit()  # kept for the life of the process, because frequent readers should not pay for it
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except nvml.NVMLError as error:
        raise OSError(f"NVML does not answer: {error}") from error
    return read


# NVML's clock event reasons that spoil a measurement (nvml.h, nvmlClocksEventReasons). Power capping is a device's
# normal state under load and is not included.
SPOILING = {
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def reasons_of(bits: int) -> str:
    """Return each reason that spoils a measurement, with its bit: `thermal slowdown (0x20)`; "" without one."""
    return ", ".join(f"{text} (0x{bit:x})" for bit, text in SPOILING.items() if bits & bit)
