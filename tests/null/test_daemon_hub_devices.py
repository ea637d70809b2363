"""Test the daemon of a machine with a second device, whose identity is simulated; no GPU needed."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from autosel import devices, dispatch, fingerprint
from autosel import ledger as ledgers
from autosel.daemon import idle
from autosel.daemon.hub import Facts, this_device
from autosel.daemon.idle import GpuMeter, Utilisation
from autosel.daemon.jobs import Jobs
from autosel.dispatch.handover import Handover
from autosel.dispatch.served import Coverage
from autosel.fingerprint import known
from autosel.tuning.underway import RunningCommand
from autosel.values import to_json
from tests.cpu.test_ledger import ATTN, MODE, record
from tests.null.daemon_app import App, over_socket, queue_in
from tests.quiet import here

H200 = known.load("h200")
UUID = "GPU-1f0c"
NOBODY = 10**9  # no process of this machine
IDLE = Utilisation(total=0.0, pids=frozenset(), shares={})
TAKEN = Utilisation(total=1.0, pids=frozenset({NOBODY}), shares={})


def gpu(name: str = "cuda:0", **changes: Any) -> Facts:
    values = {"device": name, "unit": UUID, "fingerprint": to_json(H200), "hw_id": H200.hw_id, "mode": MODE}
    return Facts(**(values | changes))


def cpu() -> Facts:
    return Facts(hw_id=this_device(), mode=MODE)


# --- idle devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "share"),
    [
        (Utilisation(total=0.7, pids=frozenset({7, 8}), shares={}), 0.7),
        (Utilisation(total=0.9, pids=frozenset({1, 8}), shares={1: 0.6, 8: 0.3}), 0.3),
        (Utilisation(total=0.9, pids=frozenset({1, 2}), shares={1: 0.6, 2: 0.3}), 0.0),
        (Utilisation(total=0.9, pids=frozenset({1}), shares={}), 0.0),
        (Utilisation(total=None, pids=frozenset({8}), shares={}), 1.0),
        (Utilisation(total=None, pids=frozenset(), shares={}), 0.0),
        (Utilisation(total=0.9, pids=frozenset({8}), shares={5: 0.9}), 0.0),  # one missing, and one idle
    ],
)
def test_a_gpu_is_busy_while_others_use_it(said: Utilisation, share: float) -> None:
    assert said.others({1, 2}) == pytest.approx(share)


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 1.0)), max_size=30))
def test_a_gpus_meter_stays_a_share_and_starts_busy(looks: list[tuple[float, float]]) -> None:
    now, said = 0.0, [0.0]
    meter = GpuMeter("cuda:0", UUID, ask=lambda _: Utilisation(total=said[0], pids=frozenset({NOBODY}), shares={}))
    assert meter.why(0.5)
    for seconds, total in looks:
        now, said[0] = now + seconds, total
        assert -1e-9 <= meter.look(now) <= 1 + 1e-9


def test_a_gpu_becomes_idle_and_busy_again() -> None:
    said = [IDLE]
    meter = GpuMeter("cuda:0", UUID, ask=lambda _: said[0])
    for second in range(30):
        meter.look(float(second))
    assert meter.why(0.5) == ""
    said[0] = TAKEN
    for second in range(30, 33):
        meter.look(float(second))
    assert "cuda:0 busy" in meter.why(0.5)


class Nvml:
    """Replay NVML's answers; queries that a device does not support raise."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    def __init__(self, *, mig: bool = False, there: bool = True) -> None:
        self.mig, self.there = mig, there

    def nvmlInit(self) -> None:
        if not self.there:
            raise self.NVMLError

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> bytes:
        if uuid != UUID.encode():
            raise self.NVMLError_NotFound
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, _: bytes) -> list[Any]:
        return [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]

    def nvmlDeviceGetUtilizationRates(self, _: bytes) -> Any:
        if self.mig:
            raise self.NVMLError_NotSupported
        return SimpleNamespace(gpu=85)

    def nvmlDeviceGetProcessUtilization(self, _: bytes, __: int) -> list[Any]:
        if self.mig:
            raise self.NVMLError_NotSupported
        return [SimpleNamespace(pid=7, smUtil=u, timeStamp=t) for t, u in ((2, 60), (1, 90))]


def test_nvml_gives_the_users_of_a_device_and_their_shares() -> None:
    found = idle.utilisation(UUID, Nvml())
    assert (found.total, found.pids, found.shares) == (0.85, {7, 8}, {7: 0.6})
    mig = idle.utilisation(UUID, Nvml(mig=True))
    assert (mig.total, mig.pids, mig.shares) == (None, {7, 8}, {})


@pytest.mark.parametrize("nvml", [Nvml(there=False), Nvml()], ids=["no driver", "no such device"])
def test_a_gpu_without_nvml_answers_is_not_tuned(nvml: Nvml) -> None:
    assert idle.utilisation("GPU-other" if nvml.there else UUID, nvml).others({7, 8}) == 1.0


# --- the queue --------------------------------------------------------------------------------------------------------


@pytest.fixture
def queue(tmp_path: Path) -> Jobs:
    made = queue_in(tmp_path)
    made.know("cuda:0", UUID)
    return made


def rest(queue: Jobs, *devices: str) -> None:
    for name, meter in queue.meters.items():
        meter.busy = 0.0 if name in devices else 9.0


def test_a_workload_waits_once_for_each_device_and_keeps_its_own_over_a_restart(queue: Jobs) -> None:
    for device in ("cpu", "cuda:0", "cuda:0"):
        queue.add(ATTN, "miss", "", calls=1, device=device)
    assert sorted((j.device, j.calls) for j in queue.all()) == [("cpu", 1), ("cuda:0", 2)]
    assert sorted(j.device for j in queue_in(queue.path.parent).all()) == ["cpu", "cuda:0"]


class Child:
    """Replace the tuning process; collect its tasks, and send `said` to the queue."""

    def __init__(self, queue: Jobs, *said: dict[str, Any]) -> None:
        self.tasks: list[dict[str, Any]] = []
        self.code, self._said = 0, [*said]
        queue._child_runs = self._runs  # type: ignore[method-assign]

    @property
    def proofs(self) -> list[tuple[str, str]]:
        return [(task["do"], task["device"]) for task in self.tasks]

    async def _runs(self, task: dict[str, Any], hear: Any, *, aside: bool = False) -> int:
        self.tasks.append(task)
        while self._said and task["do"] == "complete":
            hear(self._said.pop())
        return self.code


def test_a_busy_device_does_not_delay_work_on_an_idle_one(queue: Jobs) -> None:
    tasks = Child(queue).tasks
    queue.add(ATTN, "asked", "", device="cpu")
    queue.add(ATTN.at(B=2), "miss", "", device="cuda:0")
    queue.add(ATTN.at(B=4), "miss", "", device="cuda:0")
    queue.add(ATTN.at(B=8), "miss", "", device="cuda:1")
    rest(queue, "cuda:0")
    asyncio.run(queue._next())
    assert queue.held == ""
    assert [(t["do"], t["device"], len(t["workloads"])) for t in tasks] == [("tune", "cuda:0", 2)]
    rest(queue)
    asyncio.run(queue._next())
    assert len(tasks) == 1 and "cores busy" in queue.held
    rest(queue, "cpu", "cuda:0")
    asyncio.run(queue._next())
    asyncio.run(queue._next())
    assert [t["device"] for t in tasks] == ["cuda:0", "cpu"], "a missing device must get no jobs"
    assert "cuda:1 is not here" in queue.held


def test_stale_winners_and_decisions_of_others_are_proven_on_their_own_device(queue: Jobs) -> None:
    child = Child(queue)
    queue.lost, queue.offered = {1: "cpu", 2: "cuda:0"}, {3: "cuda:0"}
    rest(queue, "cuda:0")
    asyncio.run(queue._next())
    assert child.proofs == [("renew", "cuda:0")] and queue.lost == {1: "cpu"}
    child.code = 1  # another process holds the device
    asyncio.run(queue._next())
    asyncio.run(queue._next())
    assert child.proofs == [("renew", "cuda:0"), ("adopt", "cuda:0")], "it was tried again at once"


def test_remaining_rows_of_proofs_come_last_and_are_looked_up_once_if_there_are_none(queue: Jobs) -> None:
    child = Child(queue, {"event": "completed", "id": 5, "workload": "rmsnorm/M1", "rows": 37, "reason": ""})
    queue.offered, queue.incomplete = {3: "cpu"}, {5: "cpu", 6: "cpu"}
    rest(queue, "cpu")
    asyncio.run(queue._next())
    queue.offered = {}
    asyncio.run(queue._next())
    assert child.proofs == [("adopt", "cpu"), ("complete", "cpu")] and queue.incomplete == {6: "cpu"}
    asyncio.run(queue._next())
    asyncio.run(queue._next())
    assert child.proofs[2:] == [("complete", "cpu")] and queue.incomplete == {}


# --- requests and answers --------------------------------------------------------------------------------------------


@pytest.fixture
def app(tmp_path: Path) -> App:
    with ledgers.open_ledger(home=tmp_path / "home", alone=True) as ledger:
        record(ledger, "cpu", fp=here())
        record(ledger, "gpu", fp=H200, workload=ATTN.at(L=512))
    return App(tmp_path / "home")


def learned(client: TestClient, app: App, *facts: Facts, commands: Sequence[RunningCommand] = ()) -> None:
    """Report this in the event loop's thread, like a child's findings and the commands of other processes."""

    async def tell() -> None:
        for found in facts:
            app.hub.learn(found)
        app.hub.see(list(commands))
        await app.hub.reload()

    client.portal.call(tell)  # type: ignore[union-attr]


def test_each_device_has_its_identity_decisions_and_misses(app: App) -> None:
    with over_socket(app) as client:
        learned(client, app, cpu(), gpu(), gpu("cuda:1", unit="GPU-2"))
        told = client.get("/v1/health").json()["devices"]
        assert [(d["device"], d["hw_id"]) for d in told] == [
            ("cpu", this_device()),
            ("cuda:0", H200.hw_id),
            ("cuda:1", H200.hw_id),
        ]
        assert client.get("/v1/fingerprint?device=cuda:0").json()["name"] == H200.name
        assert client.get("/v1/fingerprint?device=cuda:7").status_code in (404, 503)
        serving = client.get("/v1/serving").json()["serving"]
        assert sorted(row["device"] for row in serving) == ["cpu", "cuda:0"]
        on = {d: client.get(f"/v1/best/attn?device={d}").json() for d in ("cpu", "cuda:0")}
        assert [len(rows) for rows in on.values()] == [1, 1]
        assert on["cpu"] != on["cuda:0"]
        w = ATTN.at(B=7)
        miss = {"hw_id": H200.hw_id, "mode": MODE, "misses": [{"workload": to_json(w), "calls": 3}]}
        app.hub.jobs.meters["cuda:1"].busy = 0.0  # of equal ones, the idle one is chosen
        assert client.post("/v1/misses", json=miss).json()["refused"] == ""
        (job,) = client.get("/v1/jobs").json()["jobs"]
        assert (job["device"], job["calls"], job["workload"], job["bucket"]) == ("cuda:1", 3, w.key, w.bucket)
        otherwise = miss | {"mode": MODE.replace("highest", "high"), "misses": miss["misses"] * 2}
        otherwise["misses"][1] = {"workload": to_json(dataclasses.replace(ATTN, dtype="fp32")), "calls": 1}
        told = client.post("/v1/misses", json=otherwise).json()
        assert told["refused"] == "" and len(told["queued"]) == 1, (
            "bf16 does not depend on the precision of fp32 products"
        )
        told = client.post("/v1/misses", json=otherwise | {"misses": otherwise["misses"][1:]}).json()
        assert "is not served by it" in told["refused"]
        elsewhere = client.post("/v1/misses", json=miss | {"hw_id": "0" * 64}).json()
        assert "another device" in elsewhere["refused"]
        asked = client.post("/v1/jobs", json={"workloads": [to_json(ATTN)], "device": "cuda:9"})
        assert asked.status_code == 422 and "cuda:9" in asked.json()["error"]["what"]
        page = client.get("/").text
        assert "H200" in page and "cuda:0" in page
        assert client.get("/op/attn").status_code == 200


def test_misses_of_a_process_with_fewer_threads_are_tuned_for_so_many(app: App) -> None:
    four = dataclasses.replace(here(), identity={**here().identity, "cpus": 4})
    with over_socket(app) as client:
        learned(client, app, dataclasses.replace(cpu(), hw_id=four.hw_id, fingerprint=to_json(four), mode="eager.t4"))
        miss = {"hw_id": four.hw_id, "misses": [{"workload": to_json(ATTN), "calls": 3}]}
        told = {n: client.post("/v1/misses", json={**miss, "mode": f"eager.t{n}"}).json() for n in (1, 4, 5)}
        assert [bool(told[n]["queued"]) for n in (1, 4, 5)] == [True, True, False]
        assert "a process that runs eager.t5 is not served by it" in told[5]["refused"]
        jobs = client.get("/v1/jobs").json()["jobs"]
        assert sorted(job["threads"] for job in jobs) == [0, 1]


def test_a_queued_workload_leaves_the_queue_when_another_process_decides_it(app: App) -> None:
    with over_socket(app) as client:
        learned(client, app, cpu())
        missed = [{"workload": to_json(ATTN.at(B=b)), "calls": 3} for b in (7, 9)]
        told = client.post("/v1/misses", json={"hw_id": this_device(), "mode": MODE, "misses": missed}).json()
        with ledgers.open_ledger(home=app.home) as ledger:
            other = record(ledger, "other mode", fp=here(), workload=ATTN.at(B=9), mode=f"{MODE}.other")
            made = record(ledger, "meanwhile", fp=here(), workload=ATTN.at(B=7), mode=MODE)
        learned(client, app)
        jobs = {job["id"]: job for job in client.get("/v1/jobs").json()["jobs"]}
        first, second = (jobs[number] for number in told["queued"])
        assert (first["state"], first["decision_id"]) == ("done", made.id) and other.id != made.id
        assert first["note"] == "decided by another process" and second["state"] == "queued"
        forced = {"workloads": [to_json(ATTN.at(B=7))], "force": True}
        client.post("/v1/jobs", json=forced)
        learned(client, app, cpu())
        assert client.get("/v1/health").json()["jobs"] == 2, "a forced race is wanted although it is decided"


def test_the_pages_show_a_tune_from_the_command_line_until_it_ends(app: App) -> None:
    tune = RunningCommand(command="autosel tune --model llama-8b", pid=7, started_at="2026-11-26T01:00:00+00:00")
    tune = dataclasses.replace(tune, stage="screening", detail="attn", done=3, total=12, decided=5, left_s=200.0)

    with over_socket(app) as client:
        learned(client, app, commands=[tune])
        for page in ("/", "/race"):
            text = " ".join(re.sub("<[^>]*>", "", client.get(page).text).split())
            assert "autosel tune --model llama-8b screening 3/12 attn" in text and "5 decided, about 3 min left" in text
        assert client.get("/v1/health").json()["commands"] == [to_json(tune)]
        learned(client, app)
        assert "autosel tune --model llama-8b" not in client.get("/race").text


def test_a_measurement_reports_no_misses(tmp_path: Path) -> None:
    handover = Handover(tmp_path)
    with dispatch.measuring(), dispatch.measuring():
        handover.missed(ATTN, "one")
    assert handover._missed == {}
    handover.missed(ATTN.at(B=2), "one")
    assert list(handover._missed.values()) == [ATTN.at(B=2)]


def test_a_process_reports_its_misses_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, int]] = []
    run = tmp_path / "run"
    run.mkdir()
    (run / "daemon.sock").touch()
    handover = Handover(tmp_path)
    monkeypatch.setattr(
        handover._client, "post", lambda _, body: sent.append((body["hw_id"], len(body["misses"]))) or {}
    )
    for hw_id in ("one", "two", "two"):
        handover.missed(ATTN, hw_id)
    handover.missed(ATTN.at(B=2), "two")
    for _ in range(2):
        handover.deliver(lambda: MODE, dict, dict, lambda: Coverage(engine="", mode=MODE, parts=()))
    assert sent == [("one", 1), ("two", 2)]


def test_without_a_driver_there_is_only_the_cpu() -> None:
    if fingerprint.present() == ("cpu",):
        assert devices.device_at("cuda:0")[1], "tensors of a missing device must get a reason"
