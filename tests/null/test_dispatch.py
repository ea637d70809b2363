"""Test dispatch without our kernels: arms are Python functions on tiny tensors, snapshots are real files."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import devices, dispatch, ops, settings
from autosel.candidates import arms, registry, validity
from autosel.dispatch import lock, resolve
from autosel.dispatch.board import Board, this_device
from autosel.dispatch.signature import signature
from autosel.errors import BadArguments, UnknownName
from autosel.fingerprint import known
from autosel.ledger import snapshot
from autosel.ledger.faults import Fault
from autosel.ledger.key import current_mode, serving_key
from autosel.ops.weight import quantise
from autosel.parity import state
from autosel.values import (
    Arm,
    Decision,
    Effect,
    Fingerprint,
    Knobs,
    PythonRecipe,
    State,
    Verdict,
    Workload,
    digest,
    to_json,
)
from tests.forks import result_of

ROOT = Path(__file__).resolve().parents[2]
RMS, ATTN = ops.find("rmsnorm"), ops.find("attn")
X, WEIGHT = torch.randn(2, 64), torch.ones(64)
W = RMS.workload("fp32", {"M": 2, "d": 64})
User = Callable[[str], Arm]  # the arm of one of the user's kernels, by its name
Gpus = tuple[Fingerprint, Fingerprint]

USER_MODULE = """
import torch
def sevens(x, weight, eps, offset, out=None):
    out = torch.empty_like(x) if out is None else out
    return out.fill_(7)
def eights(x, weight, eps, offset):
    return torch.full_like(x, 8)
def lengths(q, k, v, lengths, max_len, scale, window, softcap, out=None):
    return max_len
def lengths_short(q, k, v, lengths, max_len, scale, window, softcap, out=None):
    return -max_len
"""


@pytest.fixture(autouse=True)
def unguarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the guard: these kernels are wrong, and tests only check which one is called."""
    monkeypatch.setenv("AUTOSEL_GUARD", "off")
    settings.read.cache_clear()
    yield
    monkeypatch.undo()
    settings.read.cache_clear()


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> User:
    return arms_of_module(tmp_path_factory.mktemp("user") / "dispatch_test_kernels.py", USER_MODULE)


def arms_of_module(file: Path, source: str) -> User:
    """Write a module of kernels. Return the function that gives the arm of one of them by its name."""
    file.write_text(source)
    return lambda name: python_arm(f"user:{name}", PythonRecipe(target=f"{file.stem}:{name}", path=str(file.parent)))


def python_arm(name: str, recipe: PythonRecipe) -> Arm:
    source = arms.python_digest(recipe)
    return Arm(candidate=name, backend="USER", recipe=recipe, knobs={}, digest=digest({"source": source, "knobs": {}}))


def baseline(op: str) -> Arm:
    return arms.arm(registry.baseline(op), W, this_device(), "", Knobs())


def decision(w: Workload, arm: Arm, **changes: Any) -> Decision:
    effect = Effect(median=2.0, lo=1.9, hi=2.1)
    values: dict[str, Any] = {
        "id": 41,
        "state": "promoted",
        "hw_id": this_device().hw_id,
        "op": w.op,
        "bucket": w.bucket,
        "mode": current_mode(),
        "workload": w,
        "arm": arm,
        "baseline": arms.arm(registry.baseline(w.op), w, this_device(), "", Knobs()),
        "verdict": Verdict(outcome="promote", winner=arm.candidate, reason="won", effect=effect),
        "reason": "won 42 of 42",
        "created_at": "2026-01-01T00:00:00.000000+00:00",
    }
    return Decision(**(values | changes))


def publish(home: Path, decisions: Sequence[Decision], epoch: int = 1) -> None:
    rows = []
    for number, d in enumerate(decisions):
        key = serving_key(d.hw_id, d.mode, d.bucket, d.length_range)
        rows.append({"key": key, "epoch": epoch + number, "decision": to_json(d)})
    snapshot.write(home / snapshot.FILE, snapshot.document(epoch, rows))


def renew(board: Board, decisions: Sequence[Decision], epoch: int = 1) -> None:
    """Publish these decisions in the home of a board, which then serves them."""
    publish(board.path.parent, decisions, epoch)
    board.refresh()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def board(home: Path) -> Iterator[Board]:
    with dispatch.use(home) as found:
        yield found


def is_baseline(result: torch.Tensor) -> bool:
    return torch.equal(result, torch.nn.functional.rms_norm(X, (64,), WEIGHT, 1e-6))


# --- served kernels -----------------------------------------------------------------------------------------------


def test_a_decision_serves_by_shape_and_bound(home: Path, user: User) -> None:
    publish(home, [decision(W, user("sevens"))])
    with dispatch.use(home):
        assert dispatch.best("rmsnorm")(X, WEIGHT).eq(7).all()
        bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
        assert bound(X, WEIGHT).eq(7).all()
        assert bound.candidate == "user:sevens"
        assert bound.decision is not None
        assert bound.decision.id == 41
        assert bound.calls() == 1
        text = bound.explain()
        assert "decision  41, promoted" in text
        assert "2.00x (1.90 .. 2.10) over torch:rmsnorm" in text


def test_a_shell_and_a_notebook_show_which_kernel_runs(home: Path, user: User) -> None:
    publish(home, [decision(W, user("sevens"))])
    with dispatch.use(home):
        best, bound = dispatch.best("rmsnorm"), dispatch.best("rmsnorm", like=(X, WEIGHT))
        assert "autosel.best('rmsnorm'): not called yet" in repr(best)
        assert best._repr_html_() == "<p>not called yet</p>"
        best(X, WEIGHT), best(X[:1], WEIGHT)
        assert "autosel.best('rmsnorm'): torch:rmsnorm, user:sevens" in repr(best)
        assert "autosel.best('rmsnorm', like=...): user:sevens, decision 41, 2.0x ≥1.90" in repr(bound)
        for shown in (best._repr_html_(), bound._repr_html_()):
            assert "<td>user:sevens</td><td>41</td><td>2.0x ≥1.90</td>" in shown
        publish(home, [])
        dispatch.refresh()
        assert "autosel.best('rmsnorm', like=...): torch:rmsnorm, baseline" in repr(bound)


def test_out_is_written_and_returned(home: Path, user: User) -> None:
    publish(home, [decision(W, user("sevens")), decision(W.at(M=1), user("eights"))])
    with dispatch.use(home):
        best = dispatch.best("rmsnorm")
        out = torch.zeros_like(X)
        assert best(X, WEIGHT, out=out) is out
        assert out.eq(7).all()
        small = torch.zeros(1, 64)
        best(X[:1], WEIGHT, out=small)
        assert small.eq(8).all(), "out must also be written if the candidate allocates its result"


def test_other_buckets_than_the_decided_one_get_the_baseline(home: Path, user: User) -> None:
    publish(home, [decision(W, user("sevens"))])
    with dispatch.use(home):
        best = dispatch.best("rmsnorm")
        for x in (X[:1], X.bfloat16()):
            weight = WEIGHT.to(x.dtype)
            assert not best(x, weight).eq(7).any()
        assert best(X, WEIGHT, 1e-6, 1.0).eq(7).sum() == 0, "a trait changes the computation"
        assert best(X, WEIGHT, eps=1e-5).eq(7).all(), "eps must not change the decision"


CHANGES: dict[str, tuple[Callable[[Decision], Decision], str]] = {
    "another device": (lambda d: replace(d, hw_id="0" * 64), "tuned on another device (0000"),
    "another mode": (lambda d: replace(d, mode="graph"), "tuned under graph, running under eager"),
    "demoted": (lambda d: replace(d, state="demoted", reason="NaN seen"), "demoted: NaN seen"),
    "quarantined": (lambda d: replace(d, state="quarantined", reason="crash"), "quarantined: crash"),
    "another torch": (lambda d: replace(d, baseline=replace(d.baseline, digest="0" * 64)), "libraries"),
    "edited candidate": (lambda d: replace(d, arm=replace(d.arm, digest="0" * 64)), "code or its libraries"),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_foreign_stale_and_demoted_decisions_do_not_serve(home: Path, user: User, changed: str) -> None:
    change, why = CHANGES[changed]
    publish(home, [change(decision(W, user("sevens")))])
    with dispatch.use(home):
        best, bound = dispatch.best("rmsnorm"), dispatch.best("rmsnorm", like=(X, WEIGHT))
        assert is_baseline(best(X, WEIGHT))
        assert is_baseline(bound(X, WEIGHT))
        assert why in bound.reason
        assert why in best.explain()


def test_a_user_module_that_is_gone_or_edited_does_not_serve(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "short_lived.py"
    file.write_text("def f(x, weight, eps, offset, out=None):\n    return x\n")
    recipe = PythonRecipe(target="short_lived:f", path=str(tmp_path))
    publish(home, [decision(W, python_arm("user:f", recipe))])
    file.write_text("def f(x, weight, eps, offset, out=None):\n    return -x\n")
    validity.forget()
    with dispatch.use(home):
        assert "changed since they were measured" in dispatch.best("rmsnorm", like=(X, WEIGHT)).reason
    file.unlink()
    validity.forget()
    with dispatch.use(home):
        bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
        assert "no longer exists" in bound.reason
        assert is_baseline(bound(X, WEIGHT))


def test_a_candidate_that_no_longer_imports_is_replaced_by_the_baseline(home: Path, tmp_path: Path) -> None:
    (tmp_path / "broken_at_import.py").write_text("raise SystemError('driver too old')\n")
    recipe = PythonRecipe(target="broken_at_import:f", path=str(tmp_path))
    publish(home, [decision(W, python_arm("user:f", recipe))])
    with dispatch.use(home):
        bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
        assert is_baseline(bound(X, WEIGHT))
        assert "cannot be loaded: driver too old" in bound.reason


# --- devices ------------------------------------------------------------------------------------------------------


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Return the identities of cuda:0 and cuda:1."""
    found = (known.load("rtx-5070-ti"), known.load("h200"))
    monkeypatch.setattr(devices, "_identified", {"cuda:0": found[0], "cuda:1": found[1]}.__getitem__)
    return found


def test_each_device_has_its_own_decisions(home: Path, user: User, two_gpus: Gpus) -> None:
    publish(home, [decision(W, user("eights")), decision(W, user("sevens"), id=42, hw_id=two_gpus[1].hw_id)])
    with dispatch.use(home) as board:
        served = {place: board.resolution(RMS, W, place) for place in ("cpu", "cuda:0", "cuda:1")}
        assert {place: r.candidate for place, r in served.items()} == {
            "cpu": "user:eights",
            "cuda:0": "torch:rmsnorm",
            "cuda:1": "user:sevens",
        }
        assert ", running on NVIDIA GeForce RTX 5070 Ti" in served["cuda:0"].reason
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "user:eights"


def test_a_new_snapshot_reaches_every_used_device(home: Path, user: User, two_gpus: Gpus) -> None:
    hw_id = two_gpus[1].hw_id
    publish(home, [decision(W, user("sevens"), hw_id=hw_id)])
    with dispatch.use(home) as board:
        assert board.resolution(RMS, W, "cuda:1").candidate == "user:sevens"
        before = board.epoch
        publish(home, [decision(W, user("sevens"), hw_id=hw_id, state="demoted", id=43)], epoch=2)
        board.refresh()
        assert board.resolution(RMS, W, "cuda:1").candidate == "torch:rmsnorm"
        assert board.epoch == before + 1


def fault_of(d: Decision, **changes: Any) -> Fault:
    """Return a fault that was seen an hour after the decision."""
    values: dict[str, Any] = {"cause": "kernel", "reason": "wrong", "evidence": {}} | changes
    return Fault(decision=d, workload=d.workload.key, seen_at="2026-01-01T01:00:00.000000+00:00", **values)


def test_a_fault_on_one_device_does_not_affect_another(home: Path, user: User, two_gpus: Gpus) -> None:
    gpu, cpu = decision(W, user("sevens"), id=42, hw_id=two_gpus[1].hw_id), decision(W, user("sevens"))
    publish(home, [gpu, cpu])
    with dispatch.use(home) as board:
        assert board.resolution(RMS, W, "cuda:1").candidate == "user:sevens"
        board.report(fault_of(gpu))
        assert board.resolution(RMS, W, "cuda:1").candidate == "torch:rmsnorm"
        assert board.resolution(RMS, W, "cpu").candidate == "user:sevens"


def test_a_gpus_decisions_serve_for_any_number_of_host_threads(home: Path, user: User, two_gpus: Gpus) -> None:
    """Serve a GPU's decisions in engines' workers, which set one thread, while the tuner had all. On the CPU a decision
    depends on the number of threads."""
    other = current_mode().replace(f".t{torch.get_num_threads()}.", ".t999.")
    gpu = decision(W, user("sevens"), id=42, hw_id=two_gpus[1].hw_id, mode=other)
    publish(home, [gpu, decision(W, user("sevens"), mode=other)])
    with dispatch.use(home) as board:
        assert board.resolution(RMS, W, "cuda:1").candidate == "user:sevens"
        assert board.resolution(RMS, W, "cpu").candidate == "torch:rmsnorm"
    own = replace(gpu, arm=user("eights"), id=7, mode=current_mode())
    publish(home, [own, gpu])  # decided twice: this process's own mode first, else the last
    with dispatch.use(home) as board:
        assert board.resolution(RMS, W, "cuda:1").candidate == "user:eights"
    publish(home, [replace(own, mode=other.replace("999", "998")), gpu])
    with dispatch.use(home) as board:
        assert board.resolution(RMS, W, "cuda:1").candidate == "user:sevens"
    publish(home, [replace(gpu, mode=f"{other}.deterministic")])
    with dispatch.use(home) as board:
        found = board.resolution(RMS, W, "cuda:1")
        assert (
            found.candidate == "torch:rmsnorm"
            and found.reason == "tuned with deterministic algorithms, running with any"
        )


@pytest.mark.parametrize("precision", ["high", "cuda_tf32-mkldnn_ieee"])
def test_the_precision_of_fp32_products_is_a_mode_only_of_fp32_on_a_gpu(
    home: Path,
    user: User,
    two_gpus: Gpus,
    precision: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keep serving bf16 models in servers that call `torch.set_float32_matmul_precision("high")`, as many do."""
    bf16 = RMS.workload("bf16", dict(W.dims))
    made = [decision(w, user("sevens"), id=number, hw_id=two_gpus[1].hw_id) for number, w in enumerate((W, bf16))]
    publish(home, made)
    monkeypatch.setattr(resolve, "current_mode", lambda: current_mode().replace("highest", precision))
    with dispatch.use(home) as board:
        assert board.resolution(RMS, bf16, "cuda:1").candidate == "user:sevens"
        found = board.resolution(RMS, W, "cuda:1")
        assert (
            found.candidate == "torch:rmsnorm"
            and found.reason == f"tuned with matmul precision highest, running with {precision}"
        )
        here = board._serving_at("cuda:1").rows.values()
        rows = [row for rows in here for row in rows]
        pinned = lock.pinned_here(rows, two_gpus[1].hw_id, f"eager.t1.{precision}", "cuda")
        assert [r.document["bucket"] for r in pinned] == [bf16.bucket]


BOUND_TO_ONE_CORE = """
import os
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
import torch
from autosel import dispatch
from autosel.devices import ids_of, this_device

X, WEIGHT = torch.ones(2, 64), torch.ones(64)
for threads in (1, 2):
    torch.set_num_threads(threads)
    found = dispatch.best("rmsnorm", like=(X, WEIGHT))
    print(found.candidate, found.reason, sep=": ")
print(*ids_of(this_device()))
"""


def bound_to_one_core(home: Path) -> list[str]:
    """Return the serving candidates in a process bound to one core, with one and two threads, and its device's ids."""
    environment = {**os.environ, "AUTOSEL_HOME": str(home)}
    words = [sys.executable, "-c", BOUND_TO_ONE_CORE]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_decision_serves_any_binding_of_the_same_cores_with_as_many_threads(home: Path, user: User) -> None:
    mode = current_mode().replace(f".t{torch.get_num_threads()}.", ".t{}.")
    publish(home, [decision(W, user("sevens"), mode=mode.format(n), id=n) for n in (1, 2)])
    one, two, ids = bound_to_one_core(home)
    assert one.startswith("user:sevens: ") and ids.split()[0] == this_device().hw_id
    cpus = this_device().identity["cpus"]
    assert two == f"torch:rmsnorm: 2 threads on 1 of {cpus} cores: set as many threads as cores"
    former = ids.split()[1]  # an earlier version gave such a process another device id
    publish(home, [decision(W, user("sevens"), mode=mode.format(1), hw_id=former)])
    assert bound_to_one_core(home)[0].startswith("user:sevens: ")


def test_a_process_that_sets_the_precision_of_single_backends_is_served_and_has_its_own_mode(
    home: Path, user: User
) -> None:
    """Check that no call fails, because PyTorch's older query raises in such a process."""
    publish(home, [decision(W, user("sevens"))])

    def modes() -> tuple[str, str]:
        before = current_mode()
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert dispatch.best("rmsnorm")(torch.ones(2, 64), torch.ones(64)).isfinite().all()
        assert state.State().now()["float32 matmul precision"] in current_mode()
        return before, current_mode()

    before, after = result_of(modes)
    assert after == before.replace("highest", "cuda_tf32-mkldnn_ieee") != before


def test_a_fork_while_another_thread_holds_the_boards_lock_does_not_block_the_child() -> None:
    with dispatch._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if dispatch._lock.acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_making_a_callable_does_not_initialise_the_driver_so_the_process_can_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    for module, name in ((torch.cuda, "is_available"), (torch.accelerator, "is_available")):
        monkeypatch.setattr(module, name, lambda where=module.__name__: asked.append(where))
    signature.cache_clear()
    signature(RMS)
    signature.cache_clear()
    assert asked == []


def test_a_gpu_that_cannot_be_identified_gets_the_baseline_with_the_reason(home: Path, user: User) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    publish(home, [decision(W, user("eights"))])
    with dispatch.use(home) as board:
        found = board.resolution(RMS, W, "cuda:0")
        assert found.candidate == "torch:rmsnorm"
        assert "cuda:0 cannot be identified" in found.reason
        assert board.resolution(RMS, W, "cpu").candidate == "user:eights"


def test_a_place_is_the_devices_number_in_this_process() -> None:
    class Tensor:
        def __init__(self, *device: object) -> None:
            self.device = torch.device(*device)  # type: ignore[arg-type]

    places = [devices.place_of(Tensor(*d)) for d in (("cpu",), ("cuda", 1), ("cuda",), ("meta",))]
    assert places == ["cpu", "cuda:1", "cuda:0", "meta"]


def test_disabled_serves_the_baseline(home: Path, user: User, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(home, [decision(W, user("sevens"))])
    monkeypatch.setenv("AUTOSEL_DISABLE", "1")
    settings.read.cache_clear()
    with dispatch.use(home):
        assert is_baseline(dispatch.best("rmsnorm")(X, WEIGHT))
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).reason == "AUTOSEL_DISABLE is set"


def test_a_split_bucket_chooses_by_length_and_counts_each_part_also_when_bound(home: Path, user: User) -> None:
    w = attn_workload(96)
    short = decision(w, user("lengths_short"), length_range=(65, 96), id=1)
    publish(home, [short, decision(w, user("lengths"), length_range=(97, 120), id=2)])
    q, k, v = attn_inputs(128)
    with dispatch.use(home) as board:
        bound = dispatch.best("attn", like=(q, k, v, None, 80))
        for run in (dispatch.best("attn"), bound):
            assert [run(q, k, v, max_len=n) for n in (65, 96, 97, 120)] == [-65, -96, 97, 120]
            for n in (121, 122, 123):
                assert isinstance(run(q, k, v, max_len=n), torch.Tensor), "without a row the baseline must serve"
        assert "lengths   to 96: user:lengths_short" in dispatch.best("attn", like=(q, k, v)).explain()
        expected = {("user:lengths_short", 1): 4, ("user:lengths", 2): 4, ("torch:sdpa", None): 6}
        assert _counted(board) == expected
        publish(home, [short], epoch=2)
        board.refresh()
        bound(q, k, v, max_len=65)
        assert _counted(board) == expected | {("user:lengths_short", 1): 5}, (
            "earlier calls must count for their candidate"
        )
        assert sum(board.asked().values()) == 15


def _counted(board: Board) -> dict[Any, int]:
    counted: dict[Any, int] = {}
    for use in board.uses():
        counted[use.candidate, use.decision_id] = counted.get((use.candidate, use.decision_id), 0) + use.calls
    return counted


# --- arguments ----------------------------------------------------------------------------------------------------


def test_attention_takes_the_whole_cache_when_no_length_is_given(board: Board, user: User) -> None:
    renew(board, [decision(attn_workload(48), user("lengths"))])
    q, k, v = attn_inputs(48)
    assert dispatch.best("attn")(q, k, v) == 48
    assert dispatch.best("attn", like=(q, k, v))(q, k, v) == 48
    assert dispatch.best("attn")(q=q, v=v, k=k, max_len=33) == 33


def test_every_op_has_a_signature_with_the_defaults_of_its_table(board: Board) -> None:
    for op in ops.OPS.values():
        assert callable(board.selection(op)), op.name
    assert signature(ATTN).parameters == (
        "q, k, v, lengths=None, max_len=None, scale=0.0, window=0, softcap=0.0, out=None"
    )
    assert signature(RMS).parameters == "x, weight, eps=1e-06, offset=0.0, out=None"


def test_every_op_runs_its_baseline_on_its_own_inputs(board: Board) -> None:
    for op in ops.OPS.values():
        inputs = op.inputs(op.cases(small(op))[0].workload, 1)
        w = op.workload_of(inputs)
        best, bound = dispatch.best(op.name), dispatch.best(op.name, like=inputs)
        for run in (best, bound):
            result = run(**inputs)
            assert op.verify(inputs, result if isinstance(result, tuple) else (result,)), (op.name, w.key)


def test_wrong_arguments_are_named_with_the_reason(board: Board) -> None:
    best = dispatch.best("rmsnorm")
    for call, why in (
        (lambda: best(X, WEIGHT[:3]), "weight"),
        (lambda: best(None, WEIGHT), "x is NoneType"),
        (lambda: dispatch.best("rmsnorm", like=(X,)), "weight"),
        (lambda: dispatch.best("rmsnorm", like=(X, WEIGHT, 1e-6, 0.0, None, 3)), "arguments"),
        (lambda: dispatch.best("rmsnorm", like={"x": X, "w": WEIGHT}), "'w'"),
    ):
        with pytest.raises(BadArguments, match=why):
            call()
    with pytest.raises(TypeError, match="missing 1 required"):
        best(X)
    with pytest.raises(UnknownName, match="did you mean rmsnorm"):
        dispatch.best("rmsnrm")


# --- changes ------------------------------------------------------------------------------------------------------


def test_a_demotion_reaches_bound_callables_and_changes_the_epoch(board: Board, user: User) -> None:
    renew(board, [decision(W, user("sevens"))])
    before = dispatch.epoch()
    best, bound = dispatch.best("rmsnorm"), dispatch.best("rmsnorm", like=(X, WEIGHT))
    assert best(X, WEIGHT).eq(7).all()
    renew(board, [decision(W, baseline("rmsnorm"), state="demoted", id=42, reason="fault")], epoch=2)
    assert is_baseline(bound(X, WEIGHT))
    assert is_baseline(best(X, WEIGHT))
    assert (bound.candidate, bound.reason) == ("torch:rmsnorm", "demoted: fault")
    assert dispatch.epoch() == before + 1
    renew(board, [decision(W, user("eights"), id=43)], epoch=3)
    assert bound(X, WEIGHT).eq(8).all()
    assert dispatch.epoch() == before + 1, "a promotion must not change the epoch"


def test_the_watcher_sees_a_demotion_without_being_asked(board: Board, user: User) -> None:
    home = board.path.parent
    renew(board, [decision(W, user("sevens"))])
    bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
    seen = threading.Event()
    read = board._read

    def noticing() -> Any:
        seen.set()
        return read()

    board._read = noticing  # type: ignore[method-assign]
    publish(home, [], epoch=2)
    assert seen.wait(timeout=30)
    with board._lock:  # held until everything is replaced
        assert is_baseline(bound(X, WEIGHT))


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": "autosel.decisions"}', b"\xff" * 100])
def test_an_incomplete_snapshot_serves_the_baseline_until_it_is_complete(
    board: Board, user: User, content: bytes
) -> None:
    home = board.path.parent
    publish(home, [decision(W, user("sevens"))])
    good = board.path.read_bytes()
    bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
    board.path.write_bytes(content)
    board.refresh()
    assert is_baseline(bound(X, WEIGHT))
    assert "decisions" in bound.reason
    board.path.write_bytes(good.replace(b"won 42 of 42", b"won 43 of 42"))
    board.refresh()
    assert "damaged or edited" in bound.reason
    board.path.write_bytes(good)
    board.refresh()
    assert bound(X, WEIGHT).eq(7).all()


def test_a_snapshot_that_others_could_have_written_is_ignored(home: Path, user: User) -> None:
    publish(home, [decision(W, user("sevens"))])
    for mode in (0o620, 0o602):
        (home / snapshot.FILE).chmod(mode)
        with dispatch.use(home):
            assert "may have been written by others" in dispatch.best("rmsnorm", like=(X, WEIGHT)).reason
    (home / snapshot.FILE).chmod(0o644)
    with dispatch.use(home):
        assert dispatch.best("rmsnorm", like=(X, WEIGHT)).candidate == "user:sevens"
    if os.getuid() == 0:
        os.chown(home / snapshot.FILE, 65534, 65534)
        with dispatch.use(home):
            assert "owner 65534" in dispatch.best("rmsnorm", like=(X, WEIGHT)).reason


def test_a_row_whose_key_differs_from_its_contents_does_not_serve(home: Path, user: User) -> None:
    d = decision(W, user("sevens"))
    rows = [{"key": "stolen", "epoch": 1, "decision": to_json(d)}]
    snapshot.write(home / snapshot.FILE, snapshot.document(1, rows))
    with dispatch.use(home):
        assert "is another's" in dispatch.best("rmsnorm", like=(X, WEIGHT)).reason


def test_threads_call_while_decisions_change_and_always_get_one_of_the_arms(board: Board, user: User) -> None:
    states: list[tuple[State, Arm]] = [("promoted", user("sevens")), ("promoted", user("eights"))]
    renew(board, [decision(W, states[0][1])])
    best, bound = dispatch.best("rmsnorm"), dispatch.best("rmsnorm", like=(X, WEIGHT))
    done, wrong = threading.Event(), []

    def call() -> None:
        while not done.is_set():
            for run in (best, bound):
                value = float(run(X, WEIGHT)[0, 0])
                if value not in (7.0, 8.0):
                    wrong.append((value, board.resolution(RMS, W).reason))
                    return

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        renew(board, [decision(W, states[turn % 2][1])], epoch=turn + 2)
    last = best(X, WEIGHT)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert last.eq(8).all(), "after a refresh the old arm must not serve"


def test_uses_count_hits_and_misses_by_decision(board: Board, user: User) -> None:
    renew(board, [decision(W, user("sevens"))])
    best, bound = dispatch.best("rmsnorm"), dispatch.best("rmsnorm", like=(X, WEIGHT))
    for _ in range(3):
        best(X, WEIGHT)
        bound(X, WEIGHT)
    best(X[:1], WEIGHT)
    renew(board, [], epoch=2)
    bound(X, WEIGHT)
    del bound
    assert _counted(board) == {("user:sevens", 41): 6, ("torch:rmsnorm", None): 2}, (
        "earlier calls must count for their candidate"
    )


# --- processes ----------------------------------------------------------------------------------------------------


def test_best_never_opens_the_database(home: Path, user: User) -> None:
    publish(home, [decision(W, baseline("rmsnorm"), state="kept")])
    code = (
        "import sys, torch, autosel\n"
        "best = autosel.best('rmsnorm'); best(torch.randn(2, 64), torch.ones(64))\n"
        "assert 'decision  41, kept' in best.explain(), best.explain()\n"
        "assert 'sqlalchemy' not in sys.modules and 'sqlite3' not in sys.modules"
    )
    environment = {**os.environ, "AUTOSEL_HOME": str(home), "PYTHONPATH": str(ROOT)}
    threads = str(torch.get_num_threads())
    code = f"import torch; torch.set_num_threads({threads})\n{code}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)


def test_a_forked_child_keeps_serving_and_watching(board: Board, user: User) -> None:
    renew(board, [decision(W, user("sevens"))])
    bound = dispatch.best("rmsnorm", like=(X, WEIGHT))
    bound(X, WEIGHT)
    child = os.fork()
    if child == 0:
        ok = sum(u.calls for u in board.uses()) == 0  # its parent's calls are its parent's
        ok = (
            ok
            and bound(X, WEIGHT).eq(7).all().item()
            and any(t.name == "autosel-snapshot" for t in threading.enumerate())
        )
        renew(board, [], epoch=2)
        os._exit(0 if ok and bound.candidate == "torch:rmsnorm" else 1)
    assert os.waitpid(child, 0)[1] == 0


# --- helpers ------------------------------------------------------------------------------------------------------


def attn_workload(length: int) -> Workload:
    return ATTN.workload("fp32", {"B": 1, "Hq": 2, "Hkv": 1, "S": 1, "D": 8, "L": length})


def attn_inputs(room: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 2, 1, 8), torch.randn(1, 1, room, 8), torch.randn(1, 1, room, 8)


SIZES = {"B": 1, "Hq": 2, "Hkv": 1, "S": 1, "D": 8, "L": 32, "page": 16, "R": 8, "V": 64}


def small(op: Any) -> Workload:
    made: Workload = op.workload("fp32", {name: SIZES.get(name, 16) for name in op.dim_names})
    return made


@pytest.mark.parametrize("weight", ["plain", "int4-g64"])
def test_an_undecided_op_says_how_to_decide_it(home: Path, weight: str) -> None:
    x, w = torch.ones(1, 64), quantise(torch.ones(32, 64), weight)
    with dispatch.use(home):
        best = dispatch.best("linear", like=(x, w, None, None))
    assert best.decision is None and best.explain().count("autosel tune --recorded") == 1
