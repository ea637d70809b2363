"""Identify the CPU from procfs, sysfs and the cgroups, for hw_id: only properties that do not change.

It uses no library: py-cpuinfo needs a second and reports the L3 of another level. Every reader takes the root of a file
tree, so that tests can read trees of other machines; a missing file has a documented fallback.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path("/")
MEMORY_GRAIN = 256 << 20  # the kernel reserves a little more or less at each boot

# The flags that a choice of kernel can depend on, by their Linux names (x86 `flags`, Arm `Features`).
X86_FLAGS = """avx avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl avx512cd avx512vbmi avx512_vnni avx512_bf16
avx512_fp16 avx_vnni avx10 amx_tile amx_bf16 amx_int8 amx_fp16"""
ARM_FLAGS = "asimd asimdhp asimddp fphp bf16 i8mm sve sve2 svebf16 svei8mm sme sme2"
RELEVANT_FLAGS = frozenset(f"{X86_FLAGS} {ARM_FLAGS}".split())
ARM_VENDORS = {
    "0x41": "ARM",
    "0x43": "Cavium",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}
# MIDR part numbers, from the Arm Technical Reference Manuals ("MIDR_EL1, PartNum").
ARM_PARTS = {
    "0xd03": "Cortex-A53",
    "0xd08": "Cortex-A72",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd40": "Neoverse-V1",
    "0xd49": "Neoverse-N2",
    "0xd4f": "Neoverse-V2",
    "0xd84": "Neoverse-V3",
    "0xd8e": "Neoverse-N3",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuCache:
    """Describe one cache as one CPU sees it, and the CPUs that share it."""

    bytes: int
    cpus: frozenset[int]


def identity(root: Path = ROOT, affinity: frozenset[int] | None = None) -> dict[str, Any]:
    """Return the identity of the CPU under `root`, for a process that may run on `affinity` (default: this one's, or
    all online).

    `cpus` is the number of threads worth starting: physical cores of the fastest kind within the affinity, one thread
    each, and no more than the quota's whole CPUs (a second thread on half a CPU would be stopped half of the time).
    """
    info = _cpuinfo(root)
    cores, usable = _cores(root, info, affinity)
    fast = _fastest(root, usable)
    quota = cpu_quota(root)
    return {
        "vendor": _vendor(info),
        "model": _model(root, info),
        "family": _family(info),
        "isa": _isa(info, fast),
        "cpus": min(len(fast), max(1, int(quota))) if quota else len(fast),
        "threads_per_core": max(len(s) for s in cores.values()),
        "cores": len(cores),
        "slow_cores": len(usable) - len(fast),
        "quota_cpus": quota,
        **_caches(root, fast),
        "numa_nodes": _numa_nodes(root, fast),
        "memory_bytes": _memory_bytes(root),
    }


def hardware(root: Path = ROOT, affinity: frozenset[int] | None = None) -> dict[str, Any]:
    """Return the identity that decisions hold for: `identity` with all cores of the kind that this process uses,
    whichever of them it is bound to."""
    info = _cpuinfo(root)
    online = _online(root, info)
    allowed = (_affinity(root) if affinity is None else affinity) & online or online
    if allowed == online:
        return identity(root, online)
    used = usable_cpus(root, allowed)[0]
    alike = used in _fastest(root, sorted({used, *usable_cpus(root, online)}))
    return identity(root, online if alike else allowed)


def usable_cpus(root: Path = ROOT, affinity: frozenset[int] | None = None) -> list[int]:
    """Return one CPU of each core of the fastest kind that affinity leaves."""
    return _fastest(root, _cores(root, _cpuinfo(root), affinity)[1])


def _cores(
    root: Path, info: list[dict[str, str]], affinity: frozenset[int] | None
) -> tuple[dict[int, frozenset[int]], list[int]]:
    """(each core's CPUs by the first, the first CPU that may be used of each core)."""
    online = _online(root, info)
    allowed = (_affinity(root) if affinity is None else affinity) & online or online
    siblings = {cpu: _siblings(root, cpu, info) & online | {cpu} for cpu in online}
    cores = {min(s): s for s in siblings.values()}
    return cores, sorted(min(s & allowed) for s in cores.values() if s & allowed)


# --- files -----------------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def cpu_list(text: str) -> frozenset[int]:
    """Return `0-3,8` as a set; unreadable parts are skipped."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match:
            low = int(match[1])
            found.update(range(low, min(int(match[2] or low), low + 65535) + 1))
    return frozenset(found)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?)B?", text)
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]] if match else 0


def _cpuinfo(root: Path) -> list[dict[str, str]]:
    """Return one mapping per processor; facts stated once for all (Arm, one-processor listings) are in every one."""
    blocks = []
    for block in re.split(r"\n\s*\n", _text(root / "proc/cpuinfo")):
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in pairs}
        if fields:
            blocks.append(fields)
    common = {k: v for b in blocks if "processor" not in b for k, v in b.items()}
    return [{**common, **b} for b in blocks if "processor" in b]


def _online(root: Path, info: list[dict[str, str]]) -> frozenset[int]:
    found = cpu_list(_text(root / "sys/devices/system/cpu/online"))
    return found or frozenset(int(b["processor"]) for b in info if b["processor"].isdigit()) or frozenset({0})


def _affinity(root: Path) -> frozenset[int]:
    """Return the CPUs that the threads of this process may run on: an engine binds each of its threads to one.

    Without a list of threads (a test's tree, another system) those of the process.
    """
    tasks = [_text(path / "status") for path in (root / "proc/self/task").glob("*")]
    found = [_allowed(text) for text in tasks or [_text(root / "proc/self/status")]]
    if not any(found) and root == ROOT and hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset().union(*found) or _online(root, _cpuinfo(root))


def _allowed(status: str) -> frozenset[int]:
    match = re.search(r"^Cpus_allowed_list:\s*(.+)$", status, flags=re.MULTILINE)
    return cpu_list(match[1]) if match else frozenset()


# --- cores -----------------------------------------------------------------------------------------------------------


def _siblings(root: Path, cpu: int, info: list[dict[str, str]]) -> frozenset[int]:
    """Return the threads of the core that holds `cpu`; without topology files by cpuinfo's core ids; else the CPU
    alone."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    found = cpu_list(_text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list"))
    if found:
        return found
    where = {int(b["processor"]): (b.get("physical id"), b.get("core id")) for b in info if b["processor"].isdigit()}
    mine = where.get(cpu, (None, None))
    return frozenset({cpu} if mine[1] is None else (c for c, place in where.items() if place == mine))


def _fastest(root: Path, usable: list[int]) -> list[int]:
    """Return the cores of the fastest kind on a hybrid CPU, because equal shares finish when the slowest core does.

    Arm states `cpu_capacity` per core; x86 lists the performance cores of a hybrid part in `cpu_core`.
    """
    performance = cpu_list(_text(root / "sys/devices/cpu_core/cpus")) & set(usable)
    if performance:
        return sorted(performance)
    capacity = {c: int(_text(root / f"sys/devices/system/cpu/cpu{c}/cpu_capacity") or 1024) for c in usable}
    return [c for c in usable if capacity[c] >= 0.9 * max(capacity.values())]


def _vendor(info: list[dict[str, str]]) -> str:
    first = info[0] if info else {}
    return first.get("vendor_id") or ARM_VENDORS.get(first.get("CPU implementer", "").lower(), "unknown")


def _model(root: Path, info: list[dict[str, str]]) -> str:
    """Return the marketing name without decorations; on Arm the core's name, or the part number."""
    first = info[0] if info else {}
    part = first.get("CPU part", "").lower()
    name = first.get("model name") or ARM_PARTS.get(part) or (f"part {part}" if part else "")
    name = name or _text(root / "proc/device-tree/model").strip("\0") or first.get("Hardware", "")
    name = re.sub(r"\((R|TM|tm|r)\)|\bCPU\b|@.*$|\b\S+-Core Processor\b|\bProcessor\b", " ", name)
    return " ".join(name.split()) or "unknown CPU"


def _family(info: list[dict[str, str]]) -> str:
    """Return family.model.stepping: a hypervisor may hide the name ("AMD EPYC") but not the generation."""
    first = info[0] if info else {}
    x86 = [first.get(k, "") for k in ("cpu family", "model", "stepping")]
    arm = [first.get(k, "") for k in ("CPU part", "CPU variant", "CPU revision")]
    return ".".join(x86 if x86[0] else arm).strip(".")


def _isa(info: list[dict[str, str]], cpus: Iterable[int]) -> list[str]:
    """Return the relevant flags that every usable core has."""
    wanted = {str(c) for c in cpus}
    flags = [set((b.get("flags") or b.get("Features") or "").split()) for b in info if b["processor"] in wanted]
    return sorted(set.intersection(*flags) & RELEVANT_FLAGS) if flags else []


# --- caches, nodes, memory -------------------------------------------------------------------------------------------


def _caches(root: Path, cpus: list[int]) -> dict[str, int]:
    """Return the sizes as one core sees them, how many usable cores share one L3 (at most), and how many L3s they have.

    Without cache files: 32 KiB and 512 KiB, the smallest L1d and L2 of a core since 2013 that has AVX2; no L3.
    """
    levels = {cpu: _cache_levels(root, cpu) for cpu in cpus}
    first = levels[cpus[0]]
    domains = {lv[3].cpus for lv in levels.values() if 3 in lv}
    sharing = max((len(d & set(cpus)) for d in domains), default=len(cpus))
    return {
        "l1d_bytes": first[1].bytes if 1 in first else 32 << 10,
        "l2_bytes": first[2].bytes if 2 in first else 512 << 10,
        "l3_bytes": first[3].bytes if 3 in first else 0,
        "l3_cpus": sharing,
        "l3_domains": max(1, len(domains)),
    }


def _cache_levels(root: Path, cpu: int) -> dict[int, CpuCache]:
    found: dict[int, CpuCache] = {}
    for folder in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        level, size = _text(folder / "level"), _size(_text(folder / "size"))
        if level.isdigit() and size and _text(folder / "type") in ("Data", "Unified"):
            found[int(level)] = CpuCache(
                bytes=size, cpus=cpu_list(_text(folder / "shared_cpu_list")) or frozenset({cpu})
            )
    return found


def _numa_nodes(root: Path, cpus: list[int]) -> int:
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*")
    return max(1, sum(1 for node in nodes if cpu_list(_text(node / "cpulist")) & set(cpus)))


def _memory_bytes(root: Path) -> int:
    """Return the machine's memory, not the container's limit, because two containers of one machine are one device."""
    total = meminfo(root).get("MemTotal", 0)
    return round(total / MEMORY_GRAIN) * MEMORY_GRAIN


def meminfo(root: Path = ROOT) -> Mapping[str, int]:
    """Return /proc/meminfo in bytes."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", _text(root / "proc/meminfo"), flags=re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in lines}


# --- quota -----------------------------------------------------------------------------------------------------------


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the CPUs that the cgroups grant this process (the least along its path to the root, v1 and v2), None if
    unlimited."""
    found = [quota for folder in _cgroup_folders(root) if (quota := _quota_of(folder)) is not None]
    return round(min(found), 3) if found else None


def _quota_of(folder: Path) -> float | None:
    limit, _, period = _text(folder / "cpu.max").partition(" ")
    if not limit:
        limit, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not (limit.isdigit() and period.isdigit()) or int(period) == 0 or int(limit) == 0:
        return None  # "max", -1, or no such file
    return int(limit) / int(period)


def free_memory() -> int:
    """Return the bytes of memory that can be had now without driving anyone out."""
    import psutil

    left, free = memory_left(), int(psutil.virtual_memory().available)
    return free if left is None else min(free, left)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes that the cgroups still grant this process (the least along its path), counting reclaimable file
    cache as free; None if unlimited."""
    found = [left for folder in _cgroup_folders(root, "memory") if (left := _left_of(folder)) is not None]
    return min(found) if found else None


def _left_of(folder: Path) -> int | None:
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        most, used = _text(folder / limit), _text(folder / usage)
        if most.isdigit() and used.isdigit() and int(most) < 1 << 60:  # version 1 encodes "none" as a number near 2^63
            stat = dict(line.split(maxsplit=1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
            spare = stat.get(cache, "")
            return max(0, int(most) - int(used) + (int(spare) if spare.isdigit() else 0))
    return None


def _cgroup_folders(root: Path, controller: str = "cpu") -> list[Path]:
    """Return this process's cgroup of the controller and its ancestors, in each hierarchy that can have it."""
    memberships = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            memberships["cgroup2"] = path
        elif controller in controllers.split(","):
            memberships["cgroup"] = path
    found: list[Path] = []
    for kind, inner, point in _cgroup_mounts(root, controller):
        if kind in memberships:
            found += _upwards(root, point, _below(memberships[kind], inner))
    return found


def _cgroup_mounts(root: Path, controller: str) -> list[tuple[str, str, str]]:
    """(cgroup | cgroup2, path inside the hierarchy, mount point) of each hierarchy that may have the controller."""
    found = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or not kinds:
            continue
        if kinds[0] == "cgroup2" or (kinds[0] == "cgroup" and controller in kinds[-1].split(",")):
            found.append((kinds[0], fields[3], fields[4]))
    return found or [("cgroup2", "/", "/sys/fs/cgroup"), ("cgroup", "/", f"/sys/fs/cgroup/{controller}")]


def _below(path: str, inner: str) -> str:
    """Return `path` as seen from a mount of the hierarchy's `inner`, or its root if the two do not meet, as in some
    containers."""
    base = inner.rstrip("/")
    return path[len(base) :] if path == base or path.startswith(base + "/") else ""


def _upwards(root: Path, point: str, relative: str) -> list[Path]:
    top = root / point.lstrip("/")
    parts = [p for p in relative.split("/") if p and p != ".."]
    return [top.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def is_virtual(root: Path = ROOT) -> bool:
    """Return True if a hypervisor shares this CPU: by its flag on x86, by the firmware's name elsewhere."""
    info = _cpuinfo(root)
    if info and "hypervisor" in info[0].get("flags", "").split():
        return True
    product = _text(root / "sys/class/dmi/id/product_name") + _text(root / "sys/hypervisor/type")
    return any(word in product.lower() for word in ("kvm", "virtual", "qemu", "xen", "hvm", "ec2"))
