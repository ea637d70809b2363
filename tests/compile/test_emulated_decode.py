"""Test whole steps on emulated threads, on the same path as on a GPU: list of ops -> tasks -> launch -> tokens.

Only the library differs: the kernel is compiled for this CPU instead of by nvcc.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from autosel import devices, dispatch, fingerprint, models
from autosel.candidates import arms
from autosel.candidates.cuda import step as kernel
from autosel.candidates.cuda.step import Entries, StepBuild
from autosel.certify.audit import audit
from autosel.certify.issue import IssueRequest, issue
from autosel.certify.verify import wrong
from autosel.cli.main import run
from autosel.decode import choose, graph, launch, persistent, race
from autosel.decode.cache import make_cache
from autosel.decode.generate import generate, prefill
from autosel.decode.launch import LaunchStep, write_launch
from autosel.decode.measure import measure
from autosel.decode.model import Decoder
from autosel.decode.run import Plan
from autosel.decode.step import Place, Step, write_step
from autosel.decode.weights import load_weights
from autosel.devices.cuda import device as cuda_device
from autosel.errors import DeviceFault, EnvironmentFault, ParityError, UsageError
from autosel.fingerprint import known
from autosel.knobs.gpu.persistent import Prediction
from autosel.ledger.store import open_ledger
from autosel.models.shape import ModelShape
from autosel.values import Accepted, DTypeName, Fingerprint, Passed, Rejected
from tests import homes
from tests.compile.cupy_stand_in import HostEvent
from tests.compile.emulate import emulated
from tests.llama import write_config

PRESETS = {"llama": "llama-1b", "qwen3": "qwen3-1.7b", "gemma3": "gemma3-1b"}
SIZES = {"d": 32, "I": 48, "V": 97, "Hq": 4, "Hkv": 2, "D": 16, "max_context": 256}
WINDOW = 11
PROMPTS = [[5, 60, 3, 96, 41, 8, 22, 9, 77, 13, 2, 50, 31], [90, 4, 17, 33, 61]]  # one past the window
COUNT = 8  # past the end of a bucket of lengths, so that the tasks are written again during the run


def tiny(family: str) -> ModelShape:
    """Return a preset with its traits at a size for emulated threads, with both kinds of Gemma's layers."""
    whole = models.load(PRESETS[family])
    types = ("sliding", "full") if whole.window else ("full", "full")
    rope = dataclasses.replace(whole.rope, rotary_dim=SIZES["D"])
    local = dataclasses.replace(whole.rope_local, rotary_dim=SIZES["D"]) if whole.rope_local else None
    changes: dict[str, Any] = {"layers": 2, "layer_types": types, "rope": rope, "rope_local": local}
    return dataclasses.replace(
        whole, name=f"tiny {whole.name}", **SIZES, **changes, window=WINDOW if whole.window else 0
    )


def decoder_of(family: str, dtype: DTypeName = "fp32") -> Decoder:
    return Decoder(load_weights(Plan(model=tiny(family), dtype=dtype, seq=40)))


@pytest.fixture(scope="module")
def fp() -> Fingerprint:
    return known.load("h200")


def compiled_for_this_cpu(build: StepBuild) -> Entries:
    macros = [flag.removeprefix("-D") for flag in build.recipe.flags if flag.startswith("-D")]
    step, check, resident = (emulated("step", name, *macros) for name in ("step", "step_check", "step_resident"))
    return Entries(step=step, check=check, resident=resident, digest="emulated")


@pytest.fixture(autouse=True)
def emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "compiled", compiled_for_this_cpu)
    monkeypatch.setitem(persistent.KINDS, "CPP", persistent.KINDS["CUDA_EXT"])  # memory of the simulated device


@pytest.mark.parametrize("family", PRESETS)
def test_one_launch_a_step_gives_the_tokens_of_the_step_op_by_op(family: str, fp: Fingerprint) -> None:
    decoder = decoder_of(family)
    asked: dict[str, Any] = {"keep_logits": True}
    expected = generate(decoder, PROMPTS, COUNT, **asked)
    made = generate(decoder, PROMPTS, COUNT, form="whole", fp=fp, **asked)
    assert made.tokens == expected.tokens
    for ours, theirs in zip(made.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# --- one step --------------------------------------------------------------------------------------------------------


@pytest.fixture
def steps(fp: Fingerprint) -> tuple[Step, LaunchStep]:
    """Return a step of llama op by op, and by one launch, after the same prompt and in the same cache."""
    decoder = decoder_of("llama")
    cache = make_cache(decoder.shape, "fp32", rows=2, room=40)
    with torch.inference_mode():
        prefill(decoder, cache, PROMPTS)
        place = Place.at(torch.tensor([7, 8]), [len(p) for p in PROMPTS])
        return write_step(decoder, cache, place), write_launch(write_step(decoder, cache, place), fp)


@torch.inference_mode()
def test_a_launch_has_tasks_for_every_call_of_the_list(steps: tuple[Step, LaunchStep]) -> None:
    ops, one = steps
    told = [c.site for t in one.tasks for c in t.calls] + [c.site for c in one.rest]
    assert sorted(told) == sorted(c.site for c in ops.calls)
    assert len(one.tasks) == 1 + 6 * 2 + 2
    assert one.ctas == 4  # of the simulated device
    assert persistent.KINDS["CUDA_EXT"].candidate == one.candidate and one.build == "emulated"


@torch.inference_mode()
def test_a_task_ends_after_the_one_before_it(steps: tuple[Step, LaunchStep]) -> None:
    _, one = steps
    ends = one.task_ns()
    assert len(ends) == len(one.tasks) and ends == sorted(ends) and ends[-1] > 0
    before = one.logits.clone()
    one.idle()()
    one.run()
    one.settle()
    assert torch.equal(one.logits, before)


@torch.inference_mode()
def test_a_watchdogs_stop_is_an_error_that_names_the_task_and_the_ops_continue(steps: tuple[Step, LaunchStep]) -> None:
    ops, one = steps
    one.bound.limit_us = 50
    one.bound.state[kernel.STATE_WORDS + 3] = -7  # as if CTAs of task 3 never finished
    one.run()
    with pytest.raises(DeviceFault, match="stopped by its watchdog") as caught:
        one.settle()
    assert "task 4 (o)" in caught.value.why and "--step ops" in caught.value.todo
    assert caught.value.arm.candidate == "cuda:step" and caught.value.arm.knobs["slots"] >= 2
    ops.run()
    assert torch.isfinite(ops.logits).all()


@torch.inference_mode()
def test_a_launch_that_the_device_refuses_is_a_fault_and_no_crash(steps: tuple[Step, LaunchStep]) -> None:
    _, one = steps
    one.bound.grid = 5
    with pytest.raises(DeviceFault, match="refused the whole-step launch") as caught:
        one.run()
    assert "of which 4 can be resident" in caught.value.why


def test_no_launch_if_no_cta_can_be_resident(fp: Fingerprint, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_of("llama")
    cache = make_cache(decoder.shape, "fp32", rows=1, room=16)

    def none(like: Any, slots: int, found: torch.Tensor) -> None:
        found.zero_()

    def unable(like: Any, slots: int, found: torch.Tensor) -> None:
        raise ValueError("this device launches no kernels whose CTAs wait for each other")

    with torch.inference_mode():
        step = write_step(decoder, cache, Place.at(torch.tensor([3]), [4]))
        for resident, why in ((none, "no CTA of"), (unable, "no kernels whose CTAs wait")):
            made = Entries(step=_never, check=_never, resident=resident)
            monkeypatch.setattr(kernel, "compiled", lambda build, made=made: made)
            with pytest.raises(UsageError, match="no whole-step launch") as caught:
                write_launch(step, fp)
            assert why in caught.value.why


def _never(*arguments: Any) -> None:
    raise AssertionError("nothing may be launched")


# --- a measured run --------------------------------------------------------------------------------------------------


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch, fp: Fingerprint) -> None:
    monkeypatch.setattr("autosel.decode.measure.fingerprint", SimpleNamespace(take=lambda device: fp))


def plan_of(**changes: Any) -> Plan:
    asked: dict[str, Any] = {"dtype": "fp32", "batch": 2, "seq": 14, "iters": 3, "warmup": 1}
    return Plan(model=tiny("llama"), **(asked | changes))


def test_a_forced_launch_is_measured_and_certified(on_h200: None) -> None:
    plan = plan_of(step="whole")
    made = measure(plan, load_weights(plan))
    assert made.mode_key.startswith("team.") and made.tokens_equal == made.tokens_checked == 6
    assert [(w.half, w.form, w.taken) for w in made.ways] == [("step", "ops", False), ("step", "team", True)]
    assert {c.backend for c in made.choices if c.op != "sample"} == {"CUDA_EXT"}
    assert made.notes[0].startswith("step: one launch")
    assert sum(t.count_per_step for t in made.per_op if t.op == "attn") == 2
    certificate = issue(made, {}, IssueRequest(repro_cmd="autosel run --persistent"))
    assert wrong(certificate) == ""
    assert certificate.mode.startswith("team.") and certificate.verification_ok
    assert [(a.op, a.taken, a.other) for a in audit(certificate).attribution] == [("step", "team", "ops")]


def test_by_default_a_launch_is_raced_if_the_rates_predict_a_gain(
    on_h200: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced: list[int] = []

    def medians(scene: Any, steps: Any) -> list[float]:
        raced.append(len(steps))
        return [2e6 if isinstance(s, Step) else 1e6 for s in steps]

    monkeypatch.setattr(choose, "step_medians", medians)
    plan = plan_of()
    made = measure(plan, load_weights(plan))
    assert raced == [2] and made.mode_key.startswith("team.")
    monkeypatch.setattr(launch, "predict", lambda *_: Prediction(graph_s=1e-3, launch_s=0.99e-3))
    made = measure(plan, load_weights(plan))
    assert raced == [2] and made.mode_key.startswith("eager.")
    assert any("no whole-step launch: by this device's measured rates" in note for note in made.notes)


def test_a_faulty_launch_is_quarantined_and_not_tried_again(
    on_h200: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(step="whole")
    settle = LaunchStep.settle

    def stopped(step: LaunchStep) -> None:
        settle(step)
        step.said.fill_(2)
        settle(step)

    with open_ledger(home=tmp_path, alone=True) as ledger:
        monkeypatch.setattr(LaunchStep, "settle", stopped)
        with pytest.raises(DeviceFault, match="watchdog"):
            measure(plan, load_weights(plan), ledger=ledger)
        monkeypatch.setattr(LaunchStep, "settle", settle)
        with pytest.raises(UsageError, match="cuda:step is in quarantine"):
            measure(plan, load_weights(plan), ledger=ledger)
        made = measure(plan_of(), load_weights(plan_of()), ledger=ledger)
        assert made.mode_key.startswith("eager.") and any("watchdog" in note for note in made.notes)


def test_an_error_of_the_device_under_a_launch_is_blamed_on_it(
    on_h200: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raise the error at the next CUDA call of any kind, like an illegal access."""

    def lost(step: LaunchStep) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(LaunchStep, "settle", lost)
    with (
        open_ledger(home=tmp_path, alone=True) as ledger,
        pytest.raises(DeviceFault, match="the device failed under cuda:step") as caught,
    ):
        measure(plan_of(step="whole"), load_weights(plan_of()), ledger=ledger)
    assert "illegal memory access" in caught.value.why and "--step ops" in caught.value.todo


# --- a graph of the list ---------------------------------------------------------------------------------------------


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replay by running the list, because there are no graphs. Return the captured lengths."""
    seen: list[int] = []

    def captured(ops: Step) -> Any:
        seen.append(ops.place.longest)
        return ops.run

    monkeypatch.setattr(graph, "captured", captured)
    monkeypatch.setattr(graph, "supports", lambda plan: Accepted() if not plan.advance else Rejected(reason="it moves"))
    return seen


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Give each form of a step its time, and run it once; return the forms that were sampled."""

    def set_times(**ms: float) -> list[str]:
        asked: list[str] = []
        noise = Random(3)

        def sample(self: Any, arm: str, calls: int) -> float:
            if arm not in asked:
                self.written[arm].run()
            asked.append(arm)
            return ms[arm.partition(":")[0]] * 1e6 * noise.gauss(1.0, 0.001)

        monkeypatch.setattr(race.StepSeat, "_sample", sample)
        monkeypatch.setattr(race.StepSeat, "probe", lambda _: 1e13)
        monkeypatch.setattr(race, "watch", lambda: None)  # real waits for a core do not change the simulated times
        return asked

    return set_times


@pytest.mark.parametrize(
    ("ms", "candidate", "mode"),
    [
        ({"ops": 20.0, "graph": 15.0, "cuda": 18.0}, "graph:step", "graph."),
        ({"ops": 20.0, "graph": 18.0, "cuda": 15.0}, "cuda:step", "team."),
        ({"ops": 20.0, "graph": 20.1, "cuda": 20.2}, "ops:step", "eager."),
    ],
)
def test_the_winner_of_three_forms_is_stored_and_the_next_run_uses_it_without_a_race(
    on_h200: None,
    captures: list[int],
    timed: Callable[..., list[str]],
    tmp_path: Path,
    ms: dict[str, float],
    candidate: str,
    mode: str,
) -> None:
    asked = timed(**ms)
    with open_ledger(home=tmp_path, alone=True) as ledger:
        first = measure(plan_of(), load_weights(plan_of()), ledger=ledger)
        assert set(asked) == {"ops:step", "graph:step", "cuda:step"}
        (decision,) = ledger.history("step")
        asked.clear()
        second = measure(plan_of(), load_weights(plan_of()), ledger=ledger)
        assert [d.id for d in ledger.history("step")] == [decision.id] and asked == []
        proven = {arm.candidate for arm, parity in ledger.evidence(decision.id).parities if isinstance(parity, Passed)}
    assert decision.arm.candidate == candidate and proven == {"graph:step", "cuda:step"}
    assert decision.state == ("kept" if candidate == "ops:step" else "promoted")
    for made in (first, second):
        assert made.mode_key.startswith(mode) and made.tokens_equal == made.tokens_checked
        assert any(f"by decision {decision.id}: " in note for note in made.notes)
        (taken,) = [w.form for w in made.ways if w.half == "step" and w.taken]
        assert {"ops": "eager.", "graph": "graph.", "team": "team."}[taken] == mode


@pytest.fixture
def faults(timed: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launch pass its proof and be stopped by its watchdog in the race; a graph would win."""
    timed(ops=20.0, graph=15.0, cuda=18.0)
    sample = race.StepSeat._sample

    def fault(self: Any, arm: str, calls: int) -> float:
        self.runs = arm
        if arm == "cuda:step":
            raise self.written[arm]._stopped(0)
        return sample(self, arm, calls)

    monkeypatch.setattr(race.StepSeat, "_sample", fault)


def test_a_launch_that_faults_in_its_race_is_quarantined_and_the_race_continues(
    on_h200: None, captures: list[int], faults: None, tmp_path: Path, fp: Fingerprint
) -> None:
    with open_ledger(home=tmp_path, alone=True) as ledger:
        made = measure(plan_of(), load_weights(plan_of()), ledger=ledger)
        (decision,) = ledger.history("step")
        raced = ledger.evidence(decision.id).race
        (held,) = ledger.quarantined(fp.hw_id, "step").values()
        again = measure(plan_of(), load_weights(plan_of()), ledger=ledger)
    assert decision.arm.candidate == "graph:step" and made.mode_key.startswith("graph.")
    assert raced is not None and "stopped by its watchdog" in raced.sessions[0].voided
    assert [s.arms for s in raced.sessions[1:]] == [("ops:step", "graph:step")] * 4
    assert "took longer than" in held.reason and held.evidence["control"] == "the step op by op worked afterwards"
    assert again.mode_key.startswith("graph.") and len(ledger.history("step")) == 1


def test_a_launch_is_not_blamed_where_the_step_op_by_op_fails_after_it(
    on_h200: None, captures: list[int], faults: None, tmp_path: Path, fp: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = LaunchStep._stopped

    def and_all_after_it(step: LaunchStep, task: int) -> DeviceFault:
        def lost(ops: Step) -> None:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")

        monkeypatch.setattr(Step, "settle", lost)
        return stopped(step, task)

    monkeypatch.setattr(LaunchStep, "_stopped", and_all_after_it)
    with open_ledger(home=tmp_path, alone=True) as ledger:
        with pytest.raises(EnvironmentFault, match="the step op by op fails, as cuda:step did") as caught:
            measure(plan_of(), load_weights(plan_of()), ledger=ledger)
        assert ledger.quarantined(fp.hw_id, "step") == {} and ledger.history("step") == []
    assert "unspecified launch failure" in caught.value.why and "took longer than" in caught.value.why


def with_other_logits(ops: Step) -> Any:
    def replay() -> None:
        ops.run()
        ops.logits.add_(1.0)

    return replay


def impossible(ops: Step) -> Any:
    raise UsageError("the step cannot be captured as a graph", why="it synchronises")


@pytest.mark.parametrize(
    ("captured", "note", "error"),
    [
        (with_other_logits, "no graph: ", pytest.raises(ParityError, match="the logits of the graph")),
        (impossible, "no graph: it synchronises", pytest.raises(UsageError, match="cannot be captured")),
    ],
    ids=["other logits", "no capture"],
)
def test_a_graph_that_fails_is_not_used_and_is_an_error_if_it_was_required(
    on_h200: None, captures: list[int], monkeypatch: pytest.MonkeyPatch, captured: Any, note: str, error: Any
) -> None:
    monkeypatch.setattr(graph, "captured", captured)
    monkeypatch.setattr(launch, "predict", lambda *_: Prediction(graph_s=1e-3, launch_s=0.99e-3))
    made = measure(plan_of(), load_weights(plan_of()))
    assert made.mode_key.startswith("eager.") and any(note in told for told in made.notes)
    with error:
        measure(plan_of(step="graph"), load_weights(plan_of()))


@pytest.mark.parametrize(("asked", "mode"), [("graph", "graph."), ("whole", "team.")])
def test_the_requested_form_is_used_and_the_others_times_are_stored(
    on_h200: None, captures: list[int], asked: Any, mode: str
) -> None:
    made = measure(plan_of(step=asked), load_weights(plan_of()))
    assert made.mode_key.startswith(mode)
    assert [w.form for w in made.ways if w.half == "step"] == [
        "ops",
        "graph",
        *(["team"] if asked == "whole" else []),
    ]


@torch.inference_mode()
def test_a_graph_is_captured_again_when_the_length_changes(steps: tuple[Step, LaunchStep], captures: list[int]) -> None:
    ops, _ = steps
    replayed = graph.GraphStep.of(ops)
    for _ in range(2):
        replayed.run()
    replayed.place.advance()
    replayed.run()
    replayed.settle()
    assert captures == [14, 15]


# --- from the command line to the certificate ------------------------------------------------------------------------


class ToThisCpu(TorchFunctionMode):
    """Place tensors of the GPU in this machine's memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def here(value: Any) -> Any:
            on_gpu = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
            return torch.device("cpu") if on_gpu else value

        if func is torch.device and args and str(args[0]).startswith("cuda"):
            return torch.device("cpu")
        return func(*map(here, args), **{name: here(value) for name, value in (kwargs or {}).items()})


@pytest.fixture
def own_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a new ledger; compiled kernels are shared."""
    home.mkdir(mode=0o700)
    for name in ("native", "emulated"):
        (home / name).symlink_to(homes.shared(name))
    monkeypatch.setattr(dispatch, "_stack", [])  # this process still serves from another home


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch, fp: Fingerprint) -> Iterator[None]:
    """Simulate an H200 for PyTorch, NVML and the probes; memory and threads are this CPU's."""
    arms.torch_identity()  # queried once per process, and must not be queried of this one
    monkeypatch.setattr(graph, "captured", lambda ops: ops.run)
    monkeypatch.setattr(fingerprint, "take", lambda device, **_: fp)
    monkeypatch.setattr(fingerprint, "unit", lambda device: "GPU-1f0c")
    monkeypatch.setattr(devices, "_identified", lambda place: fp)
    monkeypatch.setattr(cuda_device, "reader", lambda ordinal: lambda: 4e12)
    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda device: (8 << 30, 8 << 30),
        "max_memory_allocated": lambda device: 1 << 30,
        "device": lambda device: nullcontext(),
        "Event": HostEvent,
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())
    with ToThisCpu():
        yield


def test_a_run_on_a_gpu_from_the_command_line_gives_a_valid_certificate(
    own_home: None,
    a_gpu: None,
    timed: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    timed(ops=20.0, graph=15.0, cuda=18.0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 256}
    write_config(tmp_path, **heads, **sizes)
    words = ["run", "--model", str(tmp_path), "--dtype", "fp32", "--seq", "14", "--iters", "3", "--device", "cuda"]
    certificates = str(tmp_path / "certificates.jsonl")
    assert run([*words, "--certify", certificates, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["certificate"]
    assert made["device"] == "NVIDIA H200" and made["sm"] == "sm_90" and made["verification_ok"]
    assert made["timed_by"] == "CUDA events" and made["host_ms"] >= made["latency_ms"]["med"]
    assert made["mode"].startswith("graph.") and made["repro_cmd"].endswith("--device cuda")
    assert run(["verify", certificates]) == 0
    capsys.readouterr()
    assert run(["best", "step", "--device", "cuda", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidate"] == "graph:step"
    assert run(["explain", "step", "--device", "cuda"]) == 0
    assert "graph" in capsys.readouterr().out
