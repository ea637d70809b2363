"""Check a certificate's figures against its device's identity and the limits of its class.

A person who rewrites a certificate can also rewrite the read rate that limits its steps. So read rate, arithmetic and
cache are compared with limits of the device class. The limits are generous: above every device of the class, but below
a figure multiplied by ten.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosel import devices
from autosel.certify.certificate import SINCE, Certificate
from autosel.devices.device import Ceiling
from autosel.fingerprint import known
from autosel.native.isa import best_isa
from autosel.values import digest

Identity = Mapping[str, Any]

# Limits of one logical CPU. Reads: single cores of today's fastest CPUs are measured at 0.1 TB/s. Arithmetic: FLOP per
# clock of the widest unit (AMX bf16 2048, two AVX-512 bf16 dot products 256, two AVX2 FMAs 32) at 8 GHz.
CPU_READ_BYTES_PER_S = 2e11
CPU_FLOPS = {"amx": 1.6e13, "avx512bf16": 2e12, "avx512": 2e12, "avx2": 2.6e11, "portable": 2e12}
# Factors over a datasheet: a probe's error; boost clocks, and twice the rate of GeForce parts that sum in fp16.
OVER_READ, OVER_FLOPS = 1.1, 2.2


def instruction_set(identity: Identity) -> str:
    """Return `sm_90` for a GPU, `avx512bf16` for a CPU."""
    if devices.on_host(identity["kind"]):
        return best_isa(identity["isa"])
    return "sm_" + str(identity["cc"]).replace(".", "")


def cache_bytes(identity: Identity) -> int:
    """Return the bytes of all last-level caches that the usable cores or SMs reach."""
    if devices.on_host(identity["kind"]):
        return _count(identity, "l3_bytes") * _count(identity, "l3_domains")
    return _count(identity, "l2_bytes")


def _count(identity: Identity, name: str) -> int:
    """Return a whole number of the identity. Raises ValueError for anything else."""
    value = identity[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53 or value % 1:
        raise ValueError(f"{name} is {value!r:.40}, not a count")
    return int(value)


def ceiling(made: Certificate) -> Ceiling:
    kind = "cuda" if made.sm.startswith("sm_") else devices.HOST
    most = devices.KINDS[kind].ceiling
    read, flops = most.read_bytes_per_s, most.flops
    if devices.accelerated(kind):
        read, flops = _datasheet(made.device) or (read, flops)
    elif made.identity is not None:
        cpus = _count(made.identity, "cpus")
        best = "amx" if any(str(flag).startswith("amx") for flag in made.identity["isa"]) else made.sm
        read, flops = min(read, cpus * CPU_READ_BYTES_PER_S), min(flops, cpus * CPU_FLOPS[best])
    return Ceiling(read_bytes_per_s=read, flops=flops, cache_bytes=most.cache_bytes)


def _datasheet(name: str) -> tuple[float, float] | None:
    """Return a known GPU's (bytes/s, FLOP/s)."""
    rates = next((one.rates for one in map(known.load, known.names()) if one.name == name), None)
    if rates is None:
        return None
    return OVER_READ * rates["peak_read_bytes_per_s"].value, OVER_FLOPS * rates["peak_bf16_flops"].value


def trouble(made: Certificate) -> str:
    """Return the first field that does not follow from the device's identity, and why; "" if all do."""
    try:
        return _other_device(made) or _beyond(made)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        return f"identity: it does not describe a device: {type(error).__name__}: {error!s:.100}"


def _other_device(made: Certificate) -> str:
    identity = made.identity
    if identity is None:
        return f"identity: none, in version {made.version}" if made.version >= SINCE["identity"] else ""
    if identity["kind"] not in devices.KINDS:
        return f"identity: a device of kind {identity['kind']!r:.20}"
    follows = {
        "device": identity["model" if devices.on_host(identity["kind"]) else "name"],
        "sm": instruction_set(identity),
        "hw_id": digest(identity),
        "env_id": digest({"hw_id": made.hw_id, **made.environment}),
        "cache_bytes": cache_bytes(identity),
    }
    for name, value in follows.items():
        if getattr(made, name) != value:
            return f"{name}: {getattr(made, name)!r:.40} does not follow from identity, which gives {value!r:.40}"
    return ""


def _beyond(made: Certificate) -> str:
    most = ceiling(made)
    if max(made.read_bytes_per_s, *made.read_probes) > most.read_bytes_per_s:
        found = max(made.read_bytes_per_s, *made.read_probes) / 1e9
        return f"read_bytes_per_s: {found:.3g} GB/s; no such device reads {most.read_bytes_per_s / 1e9:.4g} GB/s"
    if made.peak_flops > most.flops:
        return f"peak_flops: {made.peak_flops:.3g} FLOP/s; no such device reaches {most.flops:.3g}"
    if made.cache_bytes > most.cache_bytes:
        return f"cache_bytes: {made.cache_bytes}; no such device has {most.cache_bytes}"
    return ""
