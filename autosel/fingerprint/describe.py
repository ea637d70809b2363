"""Describe a fingerprint: rows for a table and one line for a headline. Any kind, measured or from a datasheet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosel import devices
from autosel.native.isa import best_isa
from autosel.values import Fingerprint, Rate

Row = tuple[str, str, str, str]  # field, value, spread, source

ISA_WORDS = {"avx512bf16": "AVX-512-BF16", "avx512": "AVX-512", "avx2": "AVX2", "portable": "no AVX2"}

# Fields of a CPU's identity, in the order of display: label, key.
CPU_FIELDS = (
    ("model", "model"),
    ("vendor", "vendor"),
    ("family.model.stepping", "family"),
    ("cores usable", "cpus"),
    ("cores", "cores"),
    ("slower cores, unused", "slow_cores"),
    ("threads per core", "threads_per_core"),
    ("quota (CPUs)", "quota_cpus"),
    ("L1 data", "l1d_bytes"),
    ("L2", "l2_bytes"),
    ("L3", "l3_bytes"),
    ("usable cores per L3", "l3_cpus"),
    ("L3 domains", "l3_domains"),
    ("NUMA nodes", "numa_nodes"),
    ("memory", "memory_bytes"),
    ("instruction sets", "isa"),
)


def describe(fp: Fingerprint) -> list[Row]:
    """Return identity, environment, then rates: (field, value, spread, source). Only a measured rate has a spread."""
    rows = [_fact(label, key, fp.identity[key], _origin(fp)) for label, key in _fields(fp) if key in fp.identity]
    rows += [("usable by this process", str(fp.threads), "", _origin(fp))] if fp.threads else []
    rows += [(name, _plain(value), "", "") for name, value in fp.environment.items()]
    rows += [(name.replace("_", " "), f"{value:g}", "", "rates hold for this") for name, value in fp.validity.items()]
    return rows + [(rate_label(name), quantity(r), _spread(r), r.source) for name, r in fp.rates.items()]


def headline(fp: Fingerprint) -> str:
    """Return `AMD EPYC 9R45 2 cores AVX-512-BF16 read 46.1 GB/s L3 32 MiB`."""
    if not devices.on_host(fp.kind):
        read = next((r for n, r in fp.rates.items() if n.startswith(("read_bytes_per_s", "bw_read"))), None)
        return fp.name + (f"   read {quantity(read)}" if read else "")
    cpus = int(fp.identity["cpus"])
    read = fp.rates.get(f"read_bytes_per_s@{fp.cpus}")
    usable = f"{fp.threads} of " if fp.threads else ""
    parts = [f"{fp.name} {usable}{cpus} core{'s' if cpus > 1 else ''} {isa_word(fp)}"]
    parts += [f"read {quantity(read)}"] if read else []
    parts += [f"L3 {binary(fp.identity['l3_bytes'])}"] if fp.identity["l3_bytes"] else []
    parts += ["contended"] if fp.contended else []
    return parts[0] + "   " + "  ".join(parts[1:]) if parts[1:] else parts[0]


def remarks(fp: Fingerprint) -> tuple[str, ...]:
    """Return notes from the measurement of a GPU's rates about throttling, for readers of knobs, decisions or figures
    that follow from the rates. A CPU has none; `contended` describes it."""
    return () if devices.on_host(fp.kind) else fp.notes


def isa_word(fp: Fingerprint) -> str:
    flags = fp.identity["isa"]
    if "asimd" in flags:
        return "SVE" if "sve" in flags else "NEON"
    return ISA_WORDS[best_isa(flags)] + ("+AMX" if "amx_bf16" in flags else "")


def quantity(rate: Rate) -> str:
    """Return three significant digits with a fitting prefix: `46.1 GB/s`, `118 GFLOP/s`, `0.40 us`."""
    if rate.unit == "s":
        steps = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
        scale, unit = next((s for s in steps if rate.value >= s[0]), steps[-1])
        return f"{_digits(rate.value / scale)} {unit}"
    prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    scale, prefix = next((p for p in prefixes if rate.value >= p[0]), prefixes[-1])
    unit = f"{prefix}{rate.unit}" if rate.unit != "1/s" else f"{prefix}/s"
    return f"{_digits(rate.value / scale)} {unit}"


def rate_label(name: str) -> str:
    """Return `read_bytes_per_s@2` as `read, 2 threads`."""
    base, _, threads = name.partition("@")
    for ending in ("_bytes_per_s", "_per_s", "_s"):
        base = base.removesuffix(ending)
    words = base.replace("_", " ")
    return words + (f", {threads} thread{'s' if threads != '1' else ''}" if threads else "")


def binary(size: int) -> str:
    """Return bytes with a binary prefix: `32 MiB`, `23.5 GiB`."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):.4g} {unit}"
    return f"{size} B"


def _fields(fp: Fingerprint) -> tuple[tuple[str, str], ...]:
    return CPU_FIELDS if devices.on_host(fp.kind) else tuple((key.replace("_", " "), key) for key in fp.identity)


def _origin(fp: Fingerprint) -> str:
    return "/proc, /sys" if fp.source == "measured" and devices.on_host(fp.kind) else fp.source


def _fact(label: str, key: str, value: Any, origin: str) -> Row:
    text = binary(value) if key.endswith("_bytes") and isinstance(value, int) else _plain(value)
    return label, text, "", origin


def _spread(rate: Rate) -> str:
    return f"±{50 * rate.spread:.0f} %" if rate.spread else ""


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items())
    return " ".join(str(v) for v in value) if isinstance(value, (list, tuple)) else str(value)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
