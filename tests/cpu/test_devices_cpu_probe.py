"""Test the fingerprint of this machine: real probes, real files, a real cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autosel.devices.cpu import machine, probe
from autosel.native.compile import compile_source, find_compiler
from autosel.native.isa import ISA_FLAGS, ISA_NEEDS, Isa, best_isa
from autosel.values import Rate
from tests import drawn

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def rates() -> dict[str, Rate]:
    return probe.measure(budget_s=0.8)


def run(code: str, home: Path, **environment: str) -> str:
    """Run Python in a fresh process with a new home; return its output."""
    env = {**os.environ, "AUTOSEL_HOME": str(home), **environment}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.strip()


# --- rates -----------------------------------------------------------------------------------------------------------


@needs_compiler
def test_every_promised_rate_is_there_with_unit_spread_and_source(rates: dict[str, Rate]) -> None:
    cpus = machine.identity()["cpus"]
    per_thread = [f"{what}_bytes_per_s@{t}" for what in ("read", "copy") for t in probe.thread_counts(cpus)]
    joins = [f"fork_join_s@{t}" for t in probe.thread_counts(cpus) if t > 1]
    for name in (*per_thread, *joins, "dram_latency_s", "fma_flops@1", "exp_per_s@1"):
        assert rates[name].value > 0
        assert rates[name].spread >= 0
        assert rates[name].unit == probe.unit_of(name)
        assert probe.SOURCE in rates[name].source


@needs_compiler
def test_rates_have_the_order_that_holds_on_every_machine(rates: dict[str, Rate]) -> None:
    value = {name: rate.value for name, rate in rates.items()}
    assert value["exp_per_s@1"] < value["fma_flops@1"] / 10  # at least five multiply-adds per exponential
    assert (
        value["dram_latency_s"] > 64 / value["read_bytes_per_s@1"]
    )  # a chain of misses is slower than a stream of lines
    if "llc_bytes_per_s@1" in value:
        assert value["llc_bytes_per_s@1"] > value["read_bytes_per_s@1"]
    if "bf16_dot_flops@1" in value:
        # AMD starts one or two in a cycle. Intel's cores with AMX start one in two cycles: half the multiply-adds' rate
        # (Granite Rapids: 1.90 and 7.58 billion instructions a second).
        assert value["bf16_dot_flops@1"] > 0.4 * value["fma_flops@1"]


@needs_compiler
def test_the_dot_rate_exists_exactly_if_the_instruction_does(rates: dict[str, Rate]) -> None:
    assert ("bf16_dot_flops@1" in rates) == (best_isa(machine.identity()["isa"]) == "avx512bf16")


@needs_compiler
@pytest.mark.parametrize("isa", drawn.share(list(ISA_NEEDS), days=2))
def test_the_probes_compile_and_run_in_every_instruction_set(isa: Isa) -> None:
    if not set(ISA_NEEDS[isa]) <= set(machine.identity()["isa"]):
        pytest.skip(f"this CPU lacks {isa}")
    made = compile_source(probe.SOURCE, ("-Wl,--as-needed", *ISA_FLAGS[isa]))
    probes = probe.load(made.digest)
    assert min(probes.read(1, 0.005)) > 0
    assert min(probes.windows("fma", seconds=0.001)) > 0
    assert min(probes.windows("exp", seconds=0.001)) > 0


@needs_compiler
def test_the_ceiling_is_about_the_fingerprints_best_read_rate() -> None:
    """Compare within a factor of four, three times at most: other work may change the machine's rate in between, but a
    wrong unit fails."""
    cpus = machine.identity()["cpus"]

    def ratio() -> float:
        rate = probe.measure(budget_s=0.4)[f"read_bytes_per_s@{cpus}"].value
        return max(max(probe.load().read(cpus, 0.05)) for _ in range(3)) / rate

    assert any(0.25 < ratio() < 4 for _ in range(3))


@needs_compiler
def test_the_read_probe_maps_its_buffer_once() -> None:
    probes = probe.load()
    probes.read(1, 0.001)
    before = dict(probes.buffers)
    probes.read(1, 0.001)
    assert probes.buffers == before


@needs_compiler
def test_the_read_probe_reads_on_where_the_last_call_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the windows of short probes stay in a last-level cache of 480 MB, which they are to exceed."""
    began: list[int] = []

    def windows(of: probe.Probes, name: str, *arguments: Any, seconds: float) -> list[float]:
        began.append(arguments[3] // of.window_bytes)
        return [1e9] * 3

    monkeypatch.setattr(probe.Probes, "windows", windows)
    probes = replace(probe.load(), read_windows=0)
    count = probes.buffer_bytes // probes.window_bytes
    for _ in range(count):
        probes.read(1, 0.0)
    assert began == [3 * i % count for i in range(count)]


def test_numpy_measures_without_a_compiler() -> None:
    facts = machine.identity()
    found = probe.measure_without_compiler(facts, budget_s=0.1)
    assert set(found) == {f"{w}_bytes_per_s@{t}" for w in ("read", "copy") for t in probe.thread_counts(facts["cpus"])}
    assert all("lower bound" in rate.source and rate.value > 0 for rate in found.values())
    probe._numpy_buffers.cache_clear()  # two buffers of an eighth of memory where the L3 is large


# --- take ------------------------------------------------------------------------------------------------------------

TAKE = """
import sys
from autosel import fingerprint
fp = fingerprint.take()
again = fingerprint.take()
assert fp == again, "the second take measured again"
assert not {"torch", "tvm_ffi"} & set(sys.modules), "a fingerprint needs neither"
print(fp.env_id, "fma_flops@1" in fp.rates, fp.environment["compiler"], *fp.notes, sep="|")
"""


@needs_compiler
def test_a_fingerprint_is_taken_once_per_home_and_without_torch(tmp_path: Path) -> None:
    first, second = run(TAKE, tmp_path), run(TAKE, tmp_path)
    assert first == second
    env_id, native, *_ = first.split("|")
    assert native == "True"
    assert [p.name for p in (tmp_path / "fingerprint").iterdir()] == [f"{env_id}.json"]


def test_without_a_compiler_identity_and_memory_rates_remain(tmp_path: Path) -> None:
    _, native, compiler, *notes = run(TAKE, tmp_path, PATH=str(tmp_path), CXX="", AUTOSEL_CXX="").split("|")
    assert (native, compiler) == ("False", "None")
    assert "no C++ compiler" in notes[0]


def test_affinity_of_one_cpu_makes_one_thread_and_the_same_device(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU here")
    code = "import os; from autosel.devices.cpu.machine import hardware, identity\n"
    code += "a = hardware(); os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); b = hardware()\n"
    code += "print(identity()['cpus'], a == b)"
    assert run(code, tmp_path) == "1 True"
