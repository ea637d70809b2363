"""Test fingerprints of simulated machines: file trees in a temporary folder, independent of this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autosel import fingerprint as device
from autosel.cli import doctor
from autosel.devices import stack, store
from autosel.devices.cpu import drift, machine, neighbours, probe
from autosel.devices.cpu.identity import noise
from autosel.devices.cpu.machine import cpu_list, cpu_quota, hardware, identity, is_virtual, memory_left
from autosel.devices.cpu.neighbours import Neighbours
from autosel.errors import UnknownName
from autosel.fingerprint.describe import describe, headline
from autosel.values import Fingerprint, Rate

X86_FLAGS = "fpu sse4_2 avx avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl avx512vbmi avx512_bf16 hypervisor"


class Tree:
    """A root folder with the files of a simulated machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def put(self, path: str, text: str) -> Tree:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        return self

    def x86(self, cpus: int, model: str = "AMD EPYC 9R45 192-Core Processor", flags: str = X86_FLAGS) -> Tree:
        block = "processor\t: {}\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"
        block += "model name\t: {}\nstepping\t: 1\nflags\t\t: {}\n"
        self.put("proc/cpuinfo", "\n".join(block.format(c, model, flags) for c in range(cpus)))
        return self.put("sys/devices/system/cpu/online", f"0-{cpus - 1}")

    def core(self, cpu: int, siblings: str, l2: str = "1024K", l3: str = "", l3_cpus: str = "") -> Tree:
        base = f"sys/devices/system/cpu/cpu{cpu}"
        self.put(f"{base}/topology/core_cpus_list", siblings)
        caches = [("1", "Data", "32K", siblings), ("1", "Instruction", "64K", siblings), ("2", "Unified", l2, siblings)]
        caches += [("3", "Unified", l3, l3_cpus)] if l3 else []
        for index, (level, kind, size, shared) in enumerate(caches):
            folder = f"{base}/cache/index{index}"
            self.put(f"{folder}/level", level).put(f"{folder}/type", kind)
            self.put(f"{folder}/size", size).put(f"{folder}/shared_cpu_list", shared)
        return self

    def memory(self, gib: float) -> Tree:
        return self.put("proc/meminfo", f"MemTotal:       {int(gib * (1 << 20))} kB\nMemFree: 12 kB")

    def node(self, number: int, cpus: str) -> Tree:
        return self.put(f"sys/devices/system/node/node{number}/cpulist", cpus)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


# --- identity --------------------------------------------------------------------------------------------------------


def smt_machine(tree: Tree) -> Tree:
    """Simulate 4 cores and 8 threads; core n has threads n and n + 4, as Linux numbers them on Intel."""
    tree.x86(8, model="Intel(R) Xeon(R) Platinum 8488C CPU @ 2.40GHz").memory(31.4).node(0, "0-7")
    for cpu in range(8):
        tree.core(cpu, f"{cpu % 4},{cpu % 4 + 4}", l2="2048K", l3="107520K", l3_cpus="0-7")
    return tree


def test_threads_of_one_core_count_once(tree: Tree) -> None:
    found = identity(smt_machine(tree).root)
    assert (found["cpus"], found["cores"], found["threads_per_core"]) == (4, 4, 2)
    assert (found["l3_cpus"], found["l3_domains"], found["l2_bytes"]) == (4, 1, 2 << 20)
    assert found["model"] == "Intel Xeon Platinum 8488C"
    assert found["memory_bytes"] % (256 << 20) == 0


def test_affinity_to_two_threads_of_one_core_leaves_one_cpu(tree: Tree) -> None:
    found = identity(smt_machine(tree).root, affinity=frozenset({1, 5}))
    assert found["cpus"] == 1
    assert found["cores"] == 4


def test_affinity_naming_only_absent_cpus_is_ignored(tree: Tree) -> None:
    assert identity(smt_machine(tree).root, affinity=frozenset({64}))["cpus"] == 4


def test_affinity_is_read_from_the_process_status(tree: Tree) -> None:
    smt_machine(tree).put("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-1,4\n")
    assert identity(tree.root)["cpus"] == 2


def epyc(tree: Tree) -> Tree:
    """Simulate two sockets of 16 cores, with an L3 for each 4; the node boundary is between cpu 15 and 16."""
    tree.x86(32).memory(756).node(0, "0-15").node(1, "16-31")
    for cpu in range(32):
        low = cpu // 4 * 4
        tree.core(cpu, str(cpu), l3="32768K", l3_cpus=f"{low}-{low + 3}")
    return tree


def test_every_l3_and_node_of_two_sockets_is_found(tree: Tree) -> None:
    found = identity(epyc(tree).root)
    assert (found["cpus"], found["l3_domains"], found["l3_cpus"], found["numa_nodes"]) == (32, 8, 4, 2)
    assert found["l3_bytes"] == 32 << 20
    assert found["model"] == "AMD EPYC 9R45"
    assert found["family"] == "26.2.1"


def test_only_cores_in_the_affinity_count(tree: Tree) -> None:
    found = identity(epyc(tree).root, affinity=frozenset({0, 1, 4}))
    assert (found["cpus"], found["l3_domains"], found["l3_cpus"], found["numa_nodes"]) == (3, 2, 2, 1)
    assert found["cores"] == 32


@pytest.mark.parametrize("bound", [{0, 1, 4}, {31}, set(range(16, 32))])
def test_the_hardware_is_the_same_for_any_binding_of_a_process(tree: Tree, bound: set[int]) -> None:
    root = epyc(tree).root
    assert hardware(root, frozenset(bound)) == hardware(root) == identity(root)


def test_a_process_may_use_the_cores_that_its_threads_are_bound_to(tree: Tree) -> None:
    epyc(tree).put("proc/self/task/7/status", "Name:\tx\nCpus_allowed_list:\t3\n")
    tree.put("proc/self/task/8/status", "Name:\tx\nCpus_allowed_list:\t4\n")
    assert (identity(tree.root)["cpus"], hardware(tree.root)["cpus"]) == (2, 32)


def test_slow_cores_of_a_hybrid_cpu_are_other_hardware(tree: Tree) -> None:
    root = hybrid(tree).root
    assert hardware(root, frozenset({3})) == identity(root)  # the second thread of a performance core
    assert hardware(root, frozenset({4, 5})) == identity(root, frozenset({4, 5})) != identity(root)


def test_a_hybrid_cpu_offers_its_performance_cores(tree: Tree) -> None:
    found = identity(hybrid(tree).root)
    assert (found["cpus"], found["slow_cores"], found["cores"]) == (2, 4, 6)
    assert found["l2_bytes"] == 2 << 20


def hybrid(tree: Tree) -> Tree:
    tree.x86(8, model="13th Gen Intel(R) Core(TM) i5").put("sys/devices/cpu_core/cpus", "0-3")
    for cpu in range(4):
        tree.core(cpu, f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}", l2="2048K")
    for cpu in range(4, 8):
        tree.core(cpu, str(cpu), l2="4096K")
    return tree


def arm(tree: Tree, cpus: int = 2, part: str = "0xd4f") -> Tree:
    block = (
        "processor\t: {}\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd asimddp sve bf16 i8mm\nCPU implementer\t: 0x41\n"
    )
    block += f"CPU architecture: 8\nCPU variant\t: 0x0\nCPU part\t: {part}\nCPU revision\t: 1\n"
    return tree.put("proc/cpuinfo", "\n".join(block.format(c) for c in range(cpus)))


def test_an_arm_cpu_is_named_by_its_part(tree: Tree) -> None:
    found = identity(arm(tree).root)
    assert (found["vendor"], found["model"]) == ("ARM", "Neoverse-V2")
    assert found["isa"] == ["asimd", "asimddp", "bf16", "i8mm", "sve"]
    assert found["cpus"] == 2


def test_an_unknown_arm_part_keeps_its_number(tree: Tree) -> None:
    assert identity(arm(tree, part="0xfff").root)["model"] == "part 0xfff"


def test_little_arm_cores_are_left_out(tree: Tree) -> None:
    arm(tree, cpus=4)
    for cpu, capacity in enumerate((446, 446, 1024, 1024)):
        tree.put(f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    found = identity(tree.root)
    assert (found["cpus"], found["slow_cores"]) == (2, 2)


def test_a_machine_without_any_file_is_one_small_cpu(tree: Tree) -> None:
    found = identity(tree.root)
    assert (found["cpus"], found["isa"], found["vendor"]) == (1, [], "unknown")
    assert (found["l3_bytes"], found["l3_domains"], found["quota_cpus"]) == (0, 1, None)
    assert found["l1d_bytes"] > 0
    assert found["l2_bytes"] > 0


def test_without_topology_siblings_come_from_cpuinfo(tree: Tree) -> None:
    block = "processor : {}\nphysical id : 0\ncore id : {}\n"
    tree.put("proc/cpuinfo", "\n".join(block.format(c, c % 2) for c in range(4)))
    found = identity(tree.root)
    assert (found["cpus"], found["threads_per_core"]) == (2, 2)


def test_a_flag_counts_only_if_every_usable_core_has_it(tree: Tree) -> None:
    tree.put("proc/cpuinfo", "processor : 0\nflags : avx2 fma avx512f\n\nprocessor : 1\nflags : avx2 fma\n")
    assert identity(tree.root)["isa"] == ["avx2", "fma"]
    assert identity(tree.root, affinity=frozenset({0}))["isa"] == ["avx2", "avx512f", "fma"]


@pytest.mark.parametrize("text", ["", "junk", "3-", "-", "1,,x,2-z"])
def test_the_readable_part_of_an_invalid_cpu_list_is_used(text: str) -> None:
    assert cpu_list(text) <= {1}


# --- quota -----------------------------------------------------------------------------------------------------------

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct"


def test_a_quota_of_one_and_a_half_cpus_is_worth_one_thread(tree: Tree) -> None:
    smt_machine(tree).put("proc/self/cgroup", "0::/app").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/app/cpu.max", "150000 100000")
    found = identity(tree.root)
    assert found["quota_cpus"] == 1.5
    assert found["cpus"] == 1


def test_a_quota_below_one_cpu_still_leaves_one_thread(tree: Tree) -> None:
    smt_machine(tree).put("proc/self/cgroup", "0::/").put("sys/fs/cgroup/cpu.max", "25000 100000")
    assert identity(tree.root)["cpus"] == 1


def test_the_tightest_quota_on_the_way_up_counts(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "0::/a/b/c").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/a/cpu.max", "200000 100000").put("sys/fs/cgroup/a/b/cpu.max", "max 100000")
    tree.put("sys/fs/cgroup/a/b/c/cpu.max", "800000 100000")
    assert cpu_quota(tree.root) == 2.0


def test_a_version_1_quota_is_found_by_its_controller(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/docker/abc\n0::/other")
    tree.put("proc/self/mountinfo", f"{V2_MOUNT}\n{V1_MOUNT}")
    folder = "sys/fs/cgroup/cpu,cpuacct/docker/abc"
    tree.put(f"{folder}/cpu.cfs_quota_us", "300000").put(f"{folder}/cpu.cfs_period_us", "100000")
    assert cpu_quota(tree.root) == 3.0


def test_in_a_container_the_mount_is_its_own_group(tree: Tree) -> None:
    """Read the mounted folder of the container's group, because the path shown is the host's."""
    tree.put("proc/self/cgroup", "4:cpu,cpuacct:/docker/abc")
    tree.put("proc/self/mountinfo", V1_MOUNT.replace(" / /sys", " /docker/abc /sys"))
    folder = "sys/fs/cgroup/cpu,cpuacct"
    tree.put(f"{folder}/cpu.cfs_quota_us", "50000").put(f"{folder}/cpu.cfs_period_us", "100000")
    assert cpu_quota(tree.root) == 0.5


@pytest.mark.parametrize("limit", ["max 100000", "-1", "junk", "0 100000", "100000 0", ""])
def test_an_unlimited_or_invalid_quota_is_none(tree: Tree, limit: str) -> None:
    tree.put("proc/self/cgroup", "0::/").put("sys/fs/cgroup/cpu.max", limit)
    assert cpu_quota(tree.root) is None


def test_free_memory_of_groups_is_the_smallest_along_the_path(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "0::/a/b").put("proc/self/mountinfo", V2_MOUNT)
    tree.put("sys/fs/cgroup/a/memory.max", "5000").put("sys/fs/cgroup/a/memory.current", "3000")
    tree.put("sys/fs/cgroup/a/memory.stat", "anon 2000\ninactive_file 400")
    tree.put("sys/fs/cgroup/a/b/memory.max", "max").put("sys/fs/cgroup/a/b/memory.current", "10")
    assert memory_left(tree.root) == 2400
    tree.put("sys/fs/cgroup/a/memory.current", "9000")
    assert memory_left(tree.root) == 0


def test_a_version_1_memory_limit_is_found_and_its_maximum_means_no_limit(tree: Tree) -> None:
    tree.put("proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/docker/abc")
    tree.put("proc/self/mountinfo", V1_MOUNT.replace("cpu,cpuacct", "memory"))
    folder = "sys/fs/cgroup/memory/m"
    tree.put(f"{folder}/memory.limit_in_bytes", str(2**63 - 4096)).put(f"{folder}/memory.usage_in_bytes", "100")
    assert memory_left(tree.root) is None
    tree.put(f"{folder}/memory.limit_in_bytes", "1000")
    assert memory_left(tree.root) == 900


def test_without_cgroups_the_quota_is_none(tree: Tree) -> None:
    assert cpu_quota(tree.root) is None


# --- keys ------------------------------------------------------------------------------------------------------------


def fingerprint(rates: dict[str, Rate] | None = None, **identity_changes: Any) -> Fingerprint:
    facts = {
        "vendor": "AuthenticAMD",
        "model": "AMD EPYC 9R45",
        "isa": ["avx2", "avx512_bf16", "avx512bw", "avx512dq", "avx512f", "avx512vbmi", "avx512vl", "f16c", "fma"],
        "cpus": 2,
        "cores": 2,
        "slow_cores": 0,
        "quota_cpus": None,
        "l3_bytes": 32 << 20,
        "memory_bytes": 16 << 30,
        **identity_changes,
    }
    environment = {"torch": "2.13.0", "compiler": None}
    return Fingerprint(kind="cpu", name="AMD EPYC 9R45", identity=facts, environment=environment, rates=rates or {})


def rate(value: float, unit: str = "B/s", spread: float = 0.05) -> Rate:
    return Rate(value=value, unit=unit, spread=spread, source=f"p90 of 9 windows, {probe.SOURCE}")


def test_rates_are_not_part_of_any_key() -> None:
    slow, fast = fingerprint({"read_bytes_per_s@2": rate(1e9)}), fingerprint({"read_bytes_per_s@2": rate(9e9)})
    assert (slow.hw_id, slow.env_id) == (fast.hw_id, fast.env_id)


def test_a_quota_changes_the_device_and_a_library_changes_the_environment() -> None:
    plain = fingerprint()
    assert fingerprint(quota_cpus=1.5).hw_id != plain.hw_id
    newer = dataclasses.replace(plain, environment={**plain.environment, "torch": "2.14.0"})
    assert newer.hw_id == plain.hw_id
    assert newer.env_id != plain.env_id


def test_the_environment_changes_with_any_kernel_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/a.cpp").write_text("one")
    monkeypatch.setattr("autosel.resources.kernels", lambda: tmp_path)
    before = stack.pack_digest("cpu")
    (tmp_path / "cpu/a.cpp").write_text("two")
    assert stack.pack_digest("cpu") != before


# --- noise -----------------------------------------------------------------------------------------------------------

QUIET = Neighbours(cores=0.02, stolen=0.005)
STEADY = {"read_bytes_per_s@2": rate(4e10, spread=0.1)}


def test_a_quiet_machine_gives_no_reason() -> None:
    assert noise(QUIET, STEADY) == ()


@pytest.mark.parametrize(
    ("found", "rates", "words"),
    [
        (Neighbours(cores=0.9, by=("make 0.9 cores",)), STEADY, "0.9 cores busy (limit: 0.1): make 0.9 cores"),
        (Neighbours(stolen=0.03), STEADY, "3.0 % of CPU time"),
        (QUIET, {"read_bytes_per_s@2": rate(4e10, spread=0.9)}, "spread by 90 %"),
    ],
)
def test_each_kind_of_noise_is_named(found: Neighbours, rates: dict[str, Rate], words: str) -> None:
    (reason,) = noise(found, rates)
    assert words in reason


def test_spread_of_other_rates_is_not_attributed_to_neighbours() -> None:
    assert noise(QUIET, {**STEADY, "dram_latency_s": rate(1e-7, "s", spread=3.0)}) == ()


def test_a_hypervisor_is_seen_by_flag_or_by_firmware(tree: Tree) -> None:
    assert is_virtual(tree.x86(1).root)
    arm(tree)
    assert not is_virtual(tree.root)
    assert is_virtual(tree.put("sys/class/dmi/id/product_name", "KVM Virtual Machine").root)


# --- statistics ------------------------------------------------------------------------------------------------------


def test_a_rate_is_its_best_decile_and_a_time_its_lowest() -> None:
    figures = [float(n) for n in range(1, 12)]
    assert probe.summary(figures, "B/s", "p{} of {}").value == 10.0
    assert probe.summary(figures, "B/s", "p{} of {}").source == "p90 of 11"
    assert probe.summary(figures, "s", "p{} of {}").value == 2.0
    assert probe.summary(figures, "s", "p{} of {}").source == "p10 of 11"


def test_a_third_of_disturbed_windows_moves_the_spread_and_not_the_value() -> None:
    quiet = [100.0 + n % 3 for n in range(30)]
    disturbed = [v if n % 3 else v / 10 for n, v in enumerate(quiet)]
    a, b = probe.summary(quiet, "B/s", ""), probe.summary(disturbed, "B/s", "")
    assert b.value == pytest.approx(a.value, rel=0.02)
    assert b.spread > 10 * a.spread


@pytest.mark.parametrize(("cpus", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_thread_counts_double_and_end_with_all(cpus: int, counts: tuple[int, ...]) -> None:
    assert probe.thread_counts(cpus) == counts


def test_the_read_buffer_exceeds_every_cache_and_spares_memory() -> None:
    facts = {"l3_bytes": 32 << 20, "l3_domains": 8, "memory_bytes": 256 << 30}
    assert probe.buffer_bytes(facts) == 4 * 8 * (32 << 20)
    assert probe.buffer_bytes({**facts, "memory_bytes": 1 << 30}) == 128 << 20
    assert probe.buffer_bytes({**facts, "l3_bytes": 0}) == probe.BUFFER_MIN


# --- stored until drift ----------------------------------------------------------------------------------------------


def test_a_stored_fingerprint_is_read_back_equal(home: Path) -> None:
    fp = dataclasses.replace(fingerprint({"read_bytes_per_s@2": rate(4e10)}), contended=True, notes=("busy",))
    assert store.write(fp) == ""
    assert store.read(fp.env_id) == fp
    assert [p.name for p in (home / "fingerprint").iterdir()] == [f"{fp.env_id}.json"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d["rates"]["read_bytes_per_s@2"].update(value=-1.0),
        lambda d: d["rates"]["read_bytes_per_s@2"].update(value="fast"),
        lambda d: d["identity"].update(cpus=64),
        lambda d: d.update(kind="toaster"),
        lambda d: d.pop("rates"),
        lambda d: d.update(extra=1),
    ],
)
def test_a_changed_file_is_ignored(home: Path, damage: Callable[[dict[str, Any]], Any]) -> None:
    fp = fingerprint({"read_bytes_per_s@2": rate(4e10)})
    store.write(fp)
    data = json.loads(store.path_of(fp.env_id).read_text())
    damage(data)
    store.path_of(fp.env_id).write_text(json.dumps(data))
    assert store.read(fp.env_id) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": NaN}', "[" * 100000, "\xff"])
def test_a_truncated_file_is_ignored(home: Path, text: str) -> None:
    store.path_of("f" * 64).parent.mkdir(parents=True)
    store.path_of("f" * 64).write_text(text, encoding="latin-1")
    assert store.read("f" * 64) is None


def test_a_read_only_folder_gives_the_reason(home: Path) -> None:
    home.mkdir()
    (home / "fingerprint").write_text("a file where the folder should be")
    assert "rates are not kept" in store.write(fingerprint())


@pytest.fixture
def measured(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run `take` on a simulated machine; the list gets an entry for each measurement."""
    done: list[str] = []

    def measure() -> dict[str, Rate]:
        done.append("measured")
        return {"read_bytes_per_s@2": rate(4e10 + len(done))}

    for name in ("identity", "hardware"):
        monkeypatch.setattr(machine, name, lambda: dict(fingerprint().identity))
    monkeypatch.setattr(neighbours, "between", lambda before, now: Neighbours())
    monkeypatch.setattr(probe, "measure", measure)
    return done


def test_rates_are_measured_once_and_then_reused(measured: list[str]) -> None:
    first, second = device.take(), device.take("cpu:0")
    assert measured == ["measured"]
    assert first == second


def test_rates_measured_on_a_busy_machine_are_measured_again_when_it_is_quiet(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Neighbours(cores=1.5, by=("make 1.5 cores",))
    monkeypatch.setattr(neighbours, "between", lambda before, now: busy)
    assert device.take().contended
    assert device.take().contended
    assert len(measured) == 1
    monkeypatch.setattr(neighbours, "between", lambda before, now: Neighbours())
    assert not device.take().contended
    assert not device.take().contended
    assert len(measured) == 2


def test_a_process_on_fewer_cores_measures_what_is_missing_and_keeps_the_rest(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = device.take()
    monkeypatch.setattr(machine, "identity", lambda: {**fingerprint().identity, "cpus": 1})
    monkeypatch.setattr(probe, "measure", lambda: {"read_bytes_per_s@1": rate(2e10)})
    bound = device.take()
    assert (bound.hw_id, bound.env_id, bound.cpus, whole.cpus) == (whole.hw_id, whole.env_id, 1, 2)
    assert set(bound.rates) == {"read_bytes_per_s@1", "read_bytes_per_s@2"}
    assert device.take() == bound and measured == ["measured"]


def test_a_fingerprint_for_fewer_threads_is_of_the_same_device() -> None:
    whole = fingerprint()
    assert [device.at(whole, n).cpus for n in (1, 2, 3)] == [1, 2, 2]
    assert device.at(whole, 1).hw_id == whole.hw_id and device.at(whole, 2) == whole


def test_refresh_measures_again_and_replaces(measured: list[str]) -> None:
    device.take()
    fresh = device.take(refresh=True)
    assert len(measured) == 2
    assert device.take() == fresh


def test_a_missing_device_is_an_error_that_names_the_present_ones(measured: list[str]) -> None:
    with pytest.raises(UnknownName, match="known: cpu"):
        device.take("tpu:0")


def with_looks(monkeypatch: pytest.MonkeyPatch, reads: list[float], *, virtual: bool) -> Fingerprint:
    looks = iter(reads)
    monkeypatch.setattr(drift, "_look_read", lambda *_: next(looks))
    monkeypatch.setattr(drift, "_look_join", lambda *_: 1.0)
    monkeypatch.setattr(machine, "is_virtual", lambda: virtual)
    return device.take()


def test_one_good_measurement_in_three_means_no_drift(measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fp = with_looks(monkeypatch, [0.4, 0.98, 0.5], virtual=False)
    assert not device.drifted(fp).moved


@pytest.mark.parametrize(("reads", "ratio"), [([0.8, 0.8, 0.8], "0.80x"), ([1.8, 1.7, 1.8], "1.80x")])
@pytest.mark.parametrize(("virtual", "why"), [(False, "they have changed"), (True, "other work runs here")])
def test_doctor_reports_rates_that_no_longer_hold_and_changes_nothing(
    measured: list[str], monkeypatch: pytest.MonkeyPatch, reads: list[float], ratio: str, virtual: bool, why: str
) -> None:
    fp = with_looks(monkeypatch, [*reads, *reads], virtual=virtual)
    (found,) = doctor._drift(fp, "cpu")
    assert (found.what, found.level) == ("rates", "note")
    assert f"read rate {ratio}" in found.text
    assert why in found.text
    assert "fingerprint cpu --refresh" in found.todo
    assert device.take() == fp
    assert len(measured) == 1


# --- text ------------------------------------------------------------------------------------------------------------


def test_the_headline_names_cpu_cores_isa_and_limits() -> None:
    fp = fingerprint({"read_bytes_per_s@2": rate(46.1e9)})
    assert headline(fp) == "AMD EPYC 9R45 2 cores AVX-512-BF16   read 46.1 GB/s  L3 32 MiB"
    assert headline(dataclasses.replace(fp, contended=True)).endswith("contended")


def test_the_table_has_identity_environment_and_rates_with_sources() -> None:
    rows = describe(fingerprint({"read_bytes_per_s@2": rate(46.1e9, spread=0.1)}))
    assert ("L3", "32 MiB", "", "/proc, /sys") in rows
    assert ("compiler", "none", "", "") in rows
    assert rows[-1] == ("read, 2 threads", "46.1 GB/s", "±5 %", "p90 of 9 windows, cpu/probes.cpp")
