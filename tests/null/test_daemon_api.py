"""Test the daemon's interface with a real ledger and no socket: access rights, valid requests, error answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from autosel import ledger as ledgers
from autosel.certify.certificate import encode
from autosel.certify.issue import chained
from autosel.daemon import pages
from autosel.daemon.api import ENDPOINTS
from autosel.daemon.bodies import MOST_BYTES
from autosel.daemon.hub import this_device
from autosel.ledger import commands, faults
from autosel.ledger.describe import ratio
from autosel.ledger.faults import Fault
from autosel.values import to_json
from tests.cpu.test_ledger import ATTN, MODE, race, record, recording
from tests.null.certificates import certificate, decode_run
from tests.null.daemon_app import BEARER, App, fault_of, over_socket, over_tcp
from tests.quiet import here

HERE = this_device()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def app(home: Path) -> App:
    with ledgers.open_ledger(home=home, alone=True) as ledger:
        record(ledger, fp=here())
    return App(home)


@pytest.fixture(scope="module")
def local(app: App) -> Iterator[TestClient]:
    with over_socket(app) as client:
        yield client


@pytest.fixture(scope="module")
def remote(app: App, local: TestClient) -> TestClient:
    """Return a client over TCP; the application belongs to `local`."""
    return over_tcp(app)


def problem(answer: Any) -> dict[str, str]:
    found: dict[str, str] = answer.json()["error"]
    assert found["what"]
    return found


# --- access rights ---------------------------------------------------------------------------------------------------


def test_everything_can_be_read_over_tcp_without_a_token(remote: TestClient) -> None:
    for path in ("/", "/decisions", "/v1/serving", "/v1/decisions", "/metrics"):
        assert remote.get(path).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic " + "t" * 43},
        {"Origin": "https://listed.example"},
    ]
    + [{name: "uid:0"} for name in ("X-Forwarded-For", "X-Real-IP", "Forwarded")],  # as if it were local
)
def test_no_change_over_tcp_without_the_token(remote: TestClient, headers: dict[str, str]) -> None:
    answer = remote.post("/v1/decisions/1/demote", json={"reason": "no"}, headers=headers)
    assert answer.status_code == 401
    assert "token" in problem(answer)["why"]
    assert remote.get("/v1/decisions/1").json()["serves"]


def test_with_the_token_a_job_is_queued(remote: TestClient) -> None:
    answer = remote.post("/v1/jobs", json={"workloads": [to_json(ATTN)]}, headers=BEARER)
    assert answer.status_code == 202
    assert answer.json()["jobs"][0]["state"] == "queued"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "127.0.0.1:8765.evil.example", ""])
def test_a_rebound_host_is_refused_even_for_reading(remote: TestClient, host: str) -> None:
    assert remote.get("/v1/serving", headers={"Host": host}).status_code == 403


def test_two_host_headers_are_refused() -> None:
    from autosel.daemon.access import heads

    scope = {"headers": [(b"host", b"127.0.0.1:8765"), (b"host", b"evil.example")]}
    assert heads(scope)["host"] == "127.0.0.1:8765, evil.example"


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://evil.example", 403), ("null", 403), ("http://127.0.0.1:8765", 200), ("https://listed.example", 200)],
)
def test_an_origin_must_be_listed(remote: TestClient, origin: str, status: int) -> None:
    assert remote.get("/v1/serving", headers={"Origin": origin}).status_code == status


def test_the_socket_needs_no_token_and_refuses_web_pages(local: TestClient) -> None:
    assert local.post("/v1/misses", json={"hw_id": HERE, "mode": MODE, "misses": []}).status_code == 202
    assert local.get("/v1/serving", headers={"Origin": "http://localhost"}).status_code == 403


def test_the_ledger_is_written_over_the_socket_only(remote: TestClient) -> None:
    assert remote.post("/v1/ledger", json={"command": {}, "leases": {}}, headers=BEARER).status_code == 403


def test_every_answer_has_security_headers_for_browsers(remote: TestClient) -> None:
    for path in ("/", "/v1/serving", "/nowhere", "/v1/best/attn"):
        headers = remote.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cross-origin-resource-policy"] == "same-origin"


# --- valid requests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        (b"", 400, "JSON"),
        (b"\xff\xfe", 400, "JSON"),
        (b'{"reason": NaN}', 400, "NaN"),
        (b'{"reason": 1e999}', 400, "JSON"),
        (b'{"reason": "a", "reason": "b"}', 400, "twice"),
        (b'{"reason": "\\ud800"}', 400, "surrogate"),
        (b'{"reason": ' + b"9" * 5000 + b"}", 400, "JSON"),
        (b"[" * 20 + b"]" * 20, 400, "deep"),
        (b"[" * 30_000 + b"]" * 30_000, 400, "JSON"),
        (b'{"reason": "' + b"x" * 300 + b'"}', 422, "256"),
        (b'{"reason": "a\\u0000b"}', 422, "NUL"),
        (b'{"reason": 7}', 422, "reason"),
        (b'{"reason": null}', 422, "reason"),
        (b'{"reason": ""}', 422, "kept with"),
        (b"{}", 422, "reason"),
        (b'{"reason": "a", "more": 1}', 422, "more"),
        (b"[]", 422, "object"),
        (b'"reason"', 422, "object"),
        (b'{"reason": "' + b"x" * MOST_BYTES + b'"}', 413, "larger"),
    ],
)
def test_a_malformed_body_is_refused_with_the_reason(local: TestClient, body: bytes, status: int, word: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = local.post("/v1/decisions/1/demote", content=body, headers=headers)
    found = problem(answer)
    assert answer.status_code == status
    assert word in f"{found['what']} {found['why']}"
    assert local.get("/v1/decisions/1").json()["serves"]


def test_only_json_is_taken(local: TestClient) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = local.post("/v1/decisions/1/demote", content=b'{"reason": "a"}', headers={"Content-Type": kind})
        assert answer.status_code == 415


def test_a_body_without_a_length_is_cut_off_at_the_limit(local: TestClient) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 4096

    headers = {"Content-Type": "application/json"}
    assert local.post("/v1/misses", content=endless(), headers=headers).status_code == 413


@pytest.mark.parametrize(
    "workload",
    [
        {"op": "attn", "dims": [], "dtype": "bf16"},
        {"op": "attn", "dims": [["M", 0]], "dtype": "bf16"},
        {"op": "attn", "dims": [["M", 1 << 41]], "dtype": "bf16"},
        {"op": "attn", "dims": [["M", 1], ["M", 2]], "dtype": "bf16"},
        {"op": "attn", "dims": [[f"D{i}", 1] for i in range(9)], "dtype": "bf16"},
        {"op": "attn", "dims": [["M", 1.5]], "dtype": "bf16"},
        {"op": "attn", "dims": [["M", True]], "dtype": "bf16"},
        {"op": "attn", "dims": [["M", 1]], "dtype": "int8"},
        {"op": "../../etc/passwd", "dims": [["M", 1]], "dtype": "bf16"},
        {"op": "attn", "dims": [["M", 1]], "dtype": "bf16", "traits": [["x", "a/b"]]},
        {"op": "attn", "dims": {"M": 1}, "dtype": "bf16"},
    ],
)
def test_a_workload_that_no_op_has_is_refused(local: TestClient, workload: dict[str, Any]) -> None:
    answer = local.post("/v1/jobs", json={"workloads": [workload]})
    assert answer.status_code == 422, answer.text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/nothing", 404),
        ("/v1/decisions/99", 404),
        ("/v1/decisions/0", 422),
        ("/v1/decisions/x", 422),
        ("/v1/decisions/1e3", 422),
        ("/v1/decisions/\u0663", 422),
        ("/v1/decisions/" + "9" * 400, 422),
        ("/v1/decisions?limit=0", 422),
        ("/v1/decisions?limit=501", 422),
        ("/v1/decisions?limit=1&limit=2", 422),
        ("/v1/decisions?color=red", 422),
        ("/v1/best/attn?workload=" + "x" * 300, 422),
        ("/v1/best/attn?workload=%00", 422),
        ("/v1/best/attn?what=1", 422),
        ("/v1/jobs/77", 404),
        ("/v1/certificates/1", 404),
        ("/static/..%2fhub.py", 404),
        ("/static/hub.py", 404),
        ("/op/nothing", 404),
        ("/decisions/99", 404),
    ],
)
def test_an_unknown_address_is_reported(local: TestClient, path: str, status: int) -> None:
    assert local.get(path).status_code == status


def test_a_wrong_method_gets_the_right_ones(local: TestClient) -> None:
    answer = local.post("/v1/serving", json={})
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"]


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_lookup_finds_the_decision_of_the_bucket(local: TestClient) -> None:
    found = local.get("/v1/best/attn", params={"workload": ATTN.at(L=5000).key}).json()
    assert (found["candidate"], found["state"], found["decision_id"]) == ("cpp:attn", "promoted", 1)


def test_a_lookup_without_a_decision_gives_the_baseline_and_the_reason(local: TestClient) -> None:
    found = local.get("/v1/best/attn", params={"workload": ATTN.at(L=64).key}).json()
    assert found["state"] == "baseline"
    assert "no decision" in found["reason"]


def test_every_address_answers_without_an_internal_error(local: TestClient) -> None:
    for e in ENDPOINTS:
        if e.method == "GET" and e.path not in ("/v1/events",):
            answer = local.get(e.path.replace("{id}", "1").replace("{op}", "attn"))
            assert answer.status_code in (200, 404, 503), f"{e.path}: {answer.text}"
    for path in set(pages.PAGES) - {"/compare"}:
        answer = local.get(path.replace("{id}", "1").replace("{op}", "attn").replace("{name}", "style.css"))
        assert answer.status_code == 200, f"{path}: {answer.text}"


def test_the_former_page_of_comparisons_names_the_command(local: TestClient) -> None:
    answer = local.get("/compare?a=c1&b=c2")
    assert answer.status_code == 410 and "verify --compare A B" in answer.text


def test_a_decision_is_changed_by_hand_and_the_change_serves_at_once(local: TestClient) -> None:
    demoted = local.post("/v1/decisions/1/demote", json={"reason": "a wrong token"}).json()
    assert demoted["recorded"] == "demoted"
    assert local.get("/v1/best/attn", params={"workload": ATTN.key}).json()["state"] == "baseline"
    back = local.post("/v1/decisions/1/pin", json={"reason": "it was the driver"}).json()
    assert back["recorded"] == "pinned"
    assert local.get("/v1/best/attn", params={"workload": ATTN.key}).json()["candidate"] == "cpp:attn"
    unpinned = local.post(f"/v1/decisions/{back['decision_id']}/unpin", json={"reason": "enough"}).json()
    assert unpinned["recorded"] in ("demoted", "promoted")


def test_a_refusal_of_the_ledger_is_a_conflict_with_its_reason(local: TestClient) -> None:
    answer = local.post("/v1/decisions/1/promote", json={"reason": "now", "candidate": "torch:packed"})
    assert answer.status_code == 409
    assert "parity" in problem(answer)["what"]
    unknown = local.post("/v1/decisions/1/promote", json={"reason": "now", "candidate": "cpp:nobody"})
    assert unknown.status_code == 404


def test_misses_of_another_device_or_mode_are_not_tuned_here(local: TestClient) -> None:
    misses = [{"workload": to_json(ATTN.at(L=64)), "calls": 3}]
    found = local.post("/v1/misses", json={"hw_id": "other", "mode": MODE, "misses": misses}).json()
    assert found["queued"] == [] and "another device" in found["refused"]
    found = local.post("/v1/misses", json={"hw_id": HERE, "mode": MODE, "misses": misses}).json()
    assert len(found["queued"]) == 1 and found["refused"] == ""
    again = local.post("/v1/misses", json={"hw_id": HERE, "mode": MODE, "misses": misses}).json()
    assert again["queued"] == found["queued"]
    job = local.get(f"/v1/jobs/{found['queued'][0]}").json()
    assert (job["calls"], job["source"]) == (6, "miss")
    assert local.delete(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"


def test_a_repeated_report_of_uses_counts_once_and_callers_names_are_not_labels(local: TestClient) -> None:
    def use(
        candidate: str, calls: int, op: str = "rmsnorm", number: int | None = None, conditions: str = ""
    ) -> dict[str, Any]:
        return {
            "op": op,
            "candidate": candidate,
            "decision_id": number,
            "conditions": conditions,
            "calls": calls,
        }

    def told(client: str, serial: int, *uses: dict[str, Any]) -> int:
        body = {"client": client, "serial": serial, "uses": list(uses)}
        status: int = local.post("/v1/uses", json=body).status_code
        return status

    assert told("a", 1, use("cpp:rmsnorm", 5, number=7), use("/etc/my secret", 2)) == 202
    assert told("a", 1, use("cpp:rmsnorm", 5, number=7), use("/etc/my secret", 2)) == 202, (
        "a report whose answer was lost must count once"
    )
    assert told("b", 1, use("cpp:rmsnorm", 3, number=7)) == told("a", 2, use("cpp:rmsnorm", 1, number=7)) == 202
    found = local.get("/v1/uses").json()
    assert (found["processes"], found["calls"]) == (2, 11)
    assert found["uses"] == [use("cpp:rmsnorm", 9, number=7), use("other", 2)]
    text = local.get("/metrics").text
    assert 'autosel_calls_total{candidate="cpp:rmsnorm",op="rmsnorm"} 9.0' in text
    assert 'autosel_calls_total{candidate="other",op="rmsnorm"} 2.0' in text and "secret" not in text
    why = "tuned with 2 threads, running with 1"
    assert (
        told("d", 1, use("cpp:rmsnorm", 4, conditions=why), use("cpp:rmsnorm", 1, conditions="a text\nof its own"))
        == 202
    )
    assert local.get("/v1/uses").json()["uses"][1:] == [
        use("cpp:rmsnorm", 4, conditions=why),
        use("other", 2),
        use("cpp:rmsnorm", 1),
    ]
    assert told("c", 1, use("cpp:rmsnorm", 1, op="nosuch")) == told("c", 1, use("x", -1)) == 422
    assert told("c", 1, *[use("x", 1)] * 513) == 422


PART: dict[str, Any] = {
    "op": "rmsnorm",
    "bucket": "rmsnorm/M1.d64/bf16",
    "candidate": "cpp:rmsnorm",
    "why": "",
    "calls": 6,
}
PART |= {"us_per_call": 2.0, "origin": "raced"}
COVERED: dict[str, Any] = {"client": "9-a", "process": 9, "engine": "vLLM 1", "mode": MODE, "share": 0.5}
COVERED |= {"left_out": 0, "parts": [PART]}


def test_coverage_is_the_last_report_of_each_process(local: TestClient) -> None:
    for share, client in ((0.5, "9-a"), (0.75, "9-a"), (None, "8-a")):
        assert local.post("/v1/coverage", json={**COVERED, "share": share, "client": client}).status_code == 202
    found = local.get("/v1/coverage").json()["processes"]
    assert [(p["client"], p["share"], p["parts"]) for p in found] == [("8-a", None, [PART]), ("9-a", 0.75, [PART])]


@pytest.mark.parametrize(
    "odd",
    [{"share": 1.5}, {"engine": "a\x1b[2J"}, {"left_out": -1}, {"parts": [PART] * 129}]
    + [{"parts": [PART | {n: v}]} for n, v in (("op", "nosuch"), ("us_per_call", -1.0), ("origin", "guessed"))],
)
def test_odd_coverage_is_refused(local: TestClient, odd: dict[str, Any]) -> None:
    assert local.post("/v1/coverage", json=COVERED | odd).status_code == 422


def test_another_process_writes_through_the_daemon(local: TestClient) -> None:
    w = ATTN.at(L=20_000)
    body = commands.encode(recording("by-command", fp=here(), workload=w, race=race(w), reason="by command"), {})
    first, again = local.post("/v1/ledger", json=body), local.post("/v1/ledger", json=body)
    assert first.status_code == again.status_code == 200
    assert first.json()["id"] == again.json()["id"]
    found = local.get("/v1/best/attn", params={"workload": w.key}).json()
    assert found["reason"] == "by command", "an acknowledged decision must be visible"


def test_figures_for_prometheus_are_plain_text_with_known_labels(local: TestClient) -> None:
    answer = local.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'autosel_decisions_serving{state="' in answer.text
    assert "nothing" not in answer.text  # a wrong path must not become a label


# --- the interface, described -----------------------------------------------------------------------------------------


def test_all_addresses_are_listed(local: TestClient) -> None:
    listed = local.get("/v1").json()["addresses"]
    assert {(a["method"], a["path"]) for a in listed} == {(e.method, e.path) for e in ENDPOINTS}
    assert all(a["summary"] for a in listed)


_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
_POSTS = tuple(e.path.replace("{id}", "1") for e in ENDPOINTS if e.method == "POST")


def test_a_fault_already_taken_in_when_it_is_reported_counts_as_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the daemon's check of the journal, five times a second, or another process take it in first."""
    with ledgers.open_ledger(home=tmp_path, alone=True) as ledger:
        made = record(ledger, fp=here())
    write = faults.write

    def write_and_be_late(home: Path, fault: Fault) -> Path:
        path = write(home, fault)
        with ledgers.open_ledger(home=home):  # as any other process that opens it
            assert not path.exists()
        return path

    with over_socket(App(tmp_path)) as client:
        monkeypatch.setattr(faults, "write", write_and_be_late)
        told = client.post("/v1/faults", json=faults.plain(to_json(fault_of(made))))
        assert told.status_code == 202 and told.json()["taken_in"] is True
        assert client.get("/v1/faults").json()["quarantines"][0]["reason"] == "row 3 is wrong"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(_POSTS), body=_JSON)
def test_any_invalid_request_is_a_client_error_and_never_a_bug(local: TestClient, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    answer = local.post(path, content=content, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500
    problem(answer)


def test_a_certificate_without_a_baseline_is_shown_without_a_speedup(local: TestClient, home: Path) -> None:
    file = home / "certificates.jsonl"
    alone, usual = certificate(decode_run(baseline=False)), chained(certificate(), 2, "")
    file.write_bytes(b"".join(encode(made) + b"\n" for made in (alone, usual)))
    try:
        page = local.get("/certificates").text
        listed = local.get("/v1/certificates").json()
    finally:
        file.unlink()
    assert page.count("no baseline") == 1 and ratio(usual.speedup) in page
    shown = json.dumps(listed)
    assert '"speedup": null' in shown and '"baseline_ms": null' in shown
