"""What a GPU says of itself: limits from the CUDA runtime's attributes, identity and state from NVML.

Which device CUDA calls 0 depends on CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; NVML's numbering knows neither. The two
are matched by PCI address, and within a MIG-partitioned device by UUID, never by number.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosel import extras, settings
from autosel.errors import UsageError
from autosel.fingerprint import libcuda

DRIVER = Path("/sys/module/nvidia/version")
MEMORY_STEP_BYTES = 256 << 20  # driver versions reserve differing amounts: identity rounds them away
# FLOP a clock and SM of dense bf16 with fp32 accumulation: NVIDIA's architecture whitepapers (A100, Ada, Hopper,
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
GEFORCE_MATRIX_FLOP_PER_CLOCK = {(8, 9): 512}  # full-rate accumulation in fp32 is the professional parts'
# CUDA C++ Programming Guide, arithmetic throughput: the same for all but Blackwell Ultra, which has twice as many.
SFU_PER_CLOCK, MORE_SFU_PER_CLOCK = 16, {(10, 3): 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """What was read, before anything is made of it. `limits` by CUDA attribute; None where NVML does not say."""

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
    """Who this device is: nothing in it changes with temperature, load, driver or slot."""
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
    """2 x memory clock x bus: two transfers a clock. 0 for a slice of a device, whose share NVML does not say."""
    return 0.0 if r.mig_profile else 2 * r.memory_clock_max_hz * r.memory_bus_bits / 8


# --- reading ---------------------------------------------------------------------------------------------------------

NO_NVML = "check nvidia-smi and the driver; a container gets NVML with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
# What to do about why NVML does not begin, by its name in nvml.h.
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
    """Read CUDA's device `ordinal`. Raises UsageError saying what is missing: driver, cupy, or the device."""
    runtime = _runtime_or_driver()
    count = _count(runtime)
    if not 0 <= ordinal < count:
        raise UsageError(
            f"there is no device cuda:{ordinal}",
            why=f"CUDA sees {count} device{'' if count == 1 else 's'}{_shown()}",
            todo="check CUDA_VISIBLE_DEVICES" if count else "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    limits = {name: int(runtime.deviceGetAttribute(getattr(runtime, a), ordinal)) for name, a in LIMITS.items()}
    told = runtime.getDeviceProperties(ordinal)  # cupy has no attribute for the compute capability
    cc = int(told["major"]), int(told["minor"])
    # Sixteen bytes, which cupy reads as a C string (the driver gives all): up to the first zero, were it beyond them.
    return _from_nvml(runtime.deviceGetPCIBusId(ordinal), told["uuid"][:16], cc, limits, told)


def _shown() -> str:
    """A name there that is not known hides itself and all that follow it."""
    shown = settings.visible_gpus()
    return "" if shown is None else f", with CUDA_VISIBLE_DEVICES={shown!r}"


def count() -> int:
    """How many devices CUDA sees; 0 where there is no driver, or no cupy to ask it."""
    try:
        return counted()
    except UsageError:
        return 0


def counted() -> int:
    """How many devices CUDA sees. Raises UsageError where it cannot be asked."""
    return _count(_runtime())


def _runtime() -> Any:
    try:
        from cupy.cuda import runtime
    except Exception as error:  # a cupy of another CUDA may raise anything
        raise UsageError(
            "a GPU's fingerprint needs cupy", why=str(error), todo=f"install it:  {extras.gpu_command()}"
        ) from error
    return runtime


def _runtime_or_driver() -> Any:
    """Without cupy the driver is asked: it knows who a device is, if not how fast."""
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
    """`told`: what CUDA says of the device. NVML knows no memory of a chip that shares its host's."""
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
            mig_profile=_profile(_text(nvml.nvmlDeviceGetName(slice_))) if slice_ else None,
            power_limit_w=_maybe(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3),
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            uuid=_text(nvml.nvmlDeviceGetUUID(slice_ or board)),
        )
    except nvml.NVMLError as error:
        raise UsageError(f"NVML does not describe the device at {pci}", why=str(error)) from error
    finally:
        nvml.nvmlShutdown()


def _mig_slice(nvml: Any, board: Any, uuid: bytes) -> Any | None:
    """The MIG device that CUDA was given, by UUID (cupy cuts it at its first zero); None where the board is whole."""
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
        "this device is cut by MIG, and which slice is ours cannot be told",
        why=f"{len(slices)} slices, {len(alike)} with CUDA's UUID {uuid.hex()}",
        todo="name one slice in CUDA_VISIBLE_DEVICES (nvidia-smi -L)",
    )


def plain_uuid(text: str) -> str:
    """`MIG-5a2b...`, `GPU-5a2b-...` -> hexadecimal digits alone."""
    return text.partition("-")[2].replace("-", "").lower()


def _profile(name: str) -> str:
    """`NVIDIA H200 MIG 1g.18gb` -> `1g.18gb`."""
    return name.rpartition("MIG ")[2]


def _maybe(nvml: Any, ask: Any) -> Any:
    """None where this device or driver does not support the question, or does not let us ask it."""
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
    """The version of the GPU's driver; "" where there is none. Read from what the kernel module says of itself: a
    library that was upgraded beneath a loaded module answers no question at all."""
    try:
        return DRIVER.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# --- state -----------------------------------------------------------------------------------------------------------


def slowdown(uuid: str) -> str:
    """Why the device runs slower than it could right now (heat, power brake), or "". Asked around a measurement, which
    is not lost where NVML has no answer."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return ""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        if uuid.startswith("MIG-"):  # a slice has no clock of its own
            handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return reasons_of(_clock_events(nvml, handle))
    except nvml.NVMLError:
        return ""
    finally:
        nvml.nvmlShutdown()


def _clock_events(nvml: Any, handle: Any) -> int:
    """Drivers before 535 know the question by its older name."""
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError_FunctionNotFound:
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def is_shared(uuid: str) -> bool:
    """Does another process compute on the device, or is it a slice beside others? False where NVML does not say."""
    import pynvml as nvml

    if uuid.startswith("MIG-"):
        return True
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return False
    try:
        computing = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByUUID(uuid.encode()))
        return any(process.pid != os.getpid() for process in computing)
    except nvml.NVMLError:
        return False
    finally:
        nvml.nvmlShutdown()


def free_bytes(ordinal: int) -> int | None:
    """What is free of a device's memory, no context of CUDA's made to ask; None where NVML does not know."""
    import pynvml as nvml

    uuid = read(ordinal).uuid
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid.encode())).free)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def energy_counter(uuid: str) -> Callable[[], int]:
    """Reads what the board has taken since its driver was loaded, in millijoules. Raises OSError where NVML does not
    say, now or when it is read: boards before Volta and slices have no counter."""
    import pynvml as nvml

    def read() -> int:
        try:
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError as error:
            raise OSError(f"NVML's energy counter of {uuid}: {error}") from error

    if uuid.startswith("MIG-"):
        raise OSError("a slice of a GPU has no energy counter of its own")
    try:
        nvml.nvmlInit()  # for as long as the process lives: who reads often should not pay for it
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    except nvml.NVMLError as error:
        raise OSError(f"NVML does not answer: {error}") from error
    return read


# NVML's clock event reasons that spoil a measurement (nvml.h, nvmlClocksEventReasons): power capping is a device's
# normal state under load and is not among them.
SPOILING = {
    0x8: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}


def reasons_of(bits: int) -> str:
    """`thermal slowdown (0x20)`: each reason that spoils a measurement, with its bit; "" where there is none."""
    return ", ".join(f"{text} (0x{bit:x})" for bit, text in SPOILING.items() if bits & bit)
