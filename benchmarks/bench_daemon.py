"""Measure the daemon's start, lookups, writes, memory and durability under kill -9, and compare them with goals.

    python benchmarks/bench_daemon.py                      about a minute on two quiet cores
    python benchmarks/bench_daemon.py --only lookups       one of the parts below; repeatable
    python benchmarks/bench_daemon.py --full               10^6 requests and 1,000 kills: about an hour
    python benchmarks/bench_daemon.py --only kills --kills 100 --seed 3      a number of kills
    python benchmarks/bench_daemon.py --json

Clients are separate processes on the same cores. They use the Unix socket and wait for each answer before the next
request, so the figures are for daemon and clients together. Every request loop has a fixed count.

    start    from the command to READY, median of several starts
    lookups  GET /v1/best/OP?workload=KEY by 8 processes
    tuning   the same while a tune in a child of the daemon uses the cores
    writes   32 processes debit error budgets; each write is on disk when acknowledged and is counted afterwards
    records  the same with whole decisions, which are published before they are acknowledged
    memory   resident size of the daemon before and after the requests
    kills    kill -9 at a random moment with four writers; every acknowledged write is looked up afterwards
    news     from a decision by another host in a shared ledger until this host's snapshot has it, through PostgreSQL
             and a listening daemon; needs the extra `fleet` and PostgreSQL's server programs
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import command_line
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autosel.client import Client, Refused, Unreachable, connect, socket_path  # noqa: E402
from autosel.errors import AutoselError  # noqa: E402
from autosel.ledger import commands, open_ledger  # noqa: E402
from autosel.values import Workload, to_json  # noqa: E402
from tests.cpu.daemons import Daemon, running  # noqa: E402
from tests.cpu.test_ledger import ATTN, BASELINE, CPP, PASSED, record  # noqa: E402
from tests.flows.test_daemon import here  # noqa: E402

CLIENTS, WRITERS = 8, 32
Latencies = list[float]  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Hold the result of one part. `reached` is True if the goal holds, and None without a goal."""

    name: str
    text: str
    goal: str
    reached: bool | None
    values: dict[str, Any]


def main() -> int:
    parser = command_line.parser(__doc__)
    parser.add_argument("--only", action="append", choices=sorted(PARTS), help="repeatable")
    parser.add_argument("--full", action="store_true", help="10^6 requests, 1,000 kills")
    parser.add_argument("--kills", type=int, default=0, help="default 15, with --full 1,000")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random moments of the kills")
    options = parser.parse_args()
    results = []
    for name in options.only or PARTS:
        with tempfile.TemporaryDirectory() as folder:
            part = partial(kills, count=options.kills, seed=options.seed) if name == "kills" else PARTS[name]
            found = part(Path(folder) / "home", options.full)
        results.append(found)
        if not options.json:
            mark = {True: "reached", False: "NOT reached", None: ""}[found.reached]
            sys.stdout.write(f"{found.name:<8} {found.text}\n{'':8} goal: {found.goal}  {mark}\n")
            sys.stdout.flush()
    if options.json:
        json.dump([asdict(r) for r in results], sys.stdout, indent=1)
    return 0 if all(r.reached is not False for r in results) else 3


def spread(times: Latencies) -> dict[str, float]:
    ordered = sorted(times)
    return {"p50_ms": 1e3 * ordered[len(ordered) // 2], "p99_ms": 1e3 * ordered[int(len(ordered) * 0.99)]}


# --- many processes ---------------------------------------------------------------------------------------------------


def together(count: int, work: Callable[[int], Latencies]) -> tuple[float, Latencies]:
    """Return the seconds from the common start until the last process has ended, and every latency."""
    context = mp.get_context("fork")
    gate, out = context.Barrier(count + 1), context.Queue()

    def one(number: int) -> None:
        gate.wait()
        out.put(work(number))

    processes = [context.Process(target=one, args=(n,)) for n in range(count)]
    for process in processes:
        process.start()
    gate.wait()
    started = time.perf_counter()
    found = [time_s for _ in processes for time_s in out.get()]
    seconds = time.perf_counter() - started
    for process in processes:
        process.join()
    return seconds, found


def exchange(line: Any, request: bytes) -> bytes:
    """Send a request and return the body of the whole answer."""
    line.sendall(request)
    data = line.recv(65536)
    while b"\r\n\r\n" not in data:
        data += line.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(next(x for x in head.lower().split(b"\r\n") if x.startswith(b"content-length:")).split(b":")[1])
    while len(body) < length:
        body += line.recv(65536)
    assert head.startswith(b"HTTP/1.1 200"), head[:80]
    return body


def looking(path: Path, count: int) -> Callable[[int], Latencies]:
    request = f"GET /v1/best/attn?workload={ATTN.key} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()

    def work(_: int) -> Latencies:
        found = []
        with connect(path, 60.0) as line:
            for _ in range(count):
                started = time.perf_counter()
                exchange(line, request)
                found.append(time.perf_counter() - started)
        return found

    return work


def posted(path: Path, bodies: Callable[[int], Sequence[Any]]) -> Callable[[int], Latencies]:
    """Send ledger commands one after the other over one connection."""

    def work(number: int) -> Latencies:
        found = []
        with connect(path, 60.0) as line:
            for command in bodies(number):
                body = json.dumps(commands.encode(command, {})).encode()
                head = f"POST {commands.ADDRESS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
                started = time.perf_counter()
                exchange(line, request)
                found.append(time.perf_counter() - started)
        return found

    return work


@contextmanager
def quiet_daemon(home: Path) -> Iterator[Daemon]:
    """Start a daemon that does not tune, and wait until its child, which uses a core for seconds, knows the device."""
    with running(home, "--no-tune") as daemon:
        with daemon.client() as ask:
            wait_for(ask, lambda found: "hw_id" in found, "/v1/fingerprint")
        yield daemon


def fill(home: Path) -> None:
    """Record several decisions that serve this machine."""
    with open_ledger(home=home, alone=True) as ledger:
        for power in range(6, 14):
            record(ledger, f"{power}", fp=here(), workload=ATTN.at(L=1 << power))


# --- the parts --------------------------------------------------------------------------------------------------------


def start(home: Path, full: bool) -> Result:
    fill(home)
    times = []
    for _ in range(15 if full else 7):
        began = time.perf_counter()
        with running(home, "--no-tune"):
            times.append(time.perf_counter() - began)
    middle = statistics.median(times)
    return Result(
        name="start",
        text=f"{middle:.2f} s (median of {len(times)}, slowest {max(times):.2f})",
        goal="<= 1.5 s",
        reached=middle <= 1.5,
        values={"seconds": times},
    )


def lookups(home: Path, full: bool) -> Result:
    fill(home)
    with quiet_daemon(home):
        return _lookups("lookups", home, 40_000 if full else 8_000)


def _lookups(name: str, home: Path, count: int) -> Result:
    seconds, found = together(CLIENTS, looking(socket_path(home), count))
    rate, by = len(found) / seconds, spread(found)
    text = f"{rate:,.0f}/s, p50 {by['p50_ms']:.2f} ms, p99 {by['p99_ms']:.2f} ms"
    return Result(
        name=name,
        text=f"{text} ({len(found):,} by {CLIENTS} clients)",
        goal=">= 10,000/s, p99 <= 5 ms",
        reached=rate >= 10_000 and by["p99_ms"] <= 5,
        values={"per_s": rate, **by},
    )


def tuning(home: Path, full: bool) -> Result:
    """Measure lookups while a tune uses all cores; daemon and clients share the remaining time."""
    fill(home)
    w = Workload(op="rmsnorm", dims=(("M", 1), ("d", 4096)), dtype="bf16")
    with running(home, "--busy", "1000") as daemon, daemon.client() as ask:
        ask.post("/v1/jobs", {"workloads": [to_json(w)]})
        wait_for(ask, lambda health: health["tuning"] is not None and health["tuning"]["stage"] == "parity")
        found = _lookups("tuning", home, 8_000 if full else 3_000)
        under_way = ask.get("/v1/health")["tuning"] is not None
    text = found.text if under_way else f"{found.text}; the tune ended before the lookups did"
    return Result(
        name=found.name, text=text, goal=found.goal, reached=found.reached if under_way else None, values=found.values
    )


def wait_for(
    ask: Client, true: Callable[[dict[str, Any]], bool], address: str = "/v1/health", seconds: float = 60.0
) -> None:
    until = time.monotonic() + seconds
    while not _is(ask, address, true):
        assert time.monotonic() < until, "timeout"
        time.sleep(0.05)


def _is(ask: Client, address: str, true: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        return true(ask.get(address))
    except Refused:  # not known yet
        return False


def writes(home: Path, full: bool) -> Result:
    each = 500

    def bodies(number: int) -> list[Any]:
        return [commands.Spend(key=f"writer {number}", amount=1e-6, reason=str(n)) for n in range(each)]

    with quiet_daemon(home) as daemon:
        before_s = core_seconds(daemon)
        seconds, found = together(WRITERS, posted(socket_path(home), bodies))
        used_s = core_seconds(daemon) - before_s
        commits = figure(daemon, "autosel_ledger_commits_total")
    with open_ledger(home=home, alone=True) as ledger:
        lost = sum(round(each - ledger.spent(f"writer {n}") / 1e-6) for n in range(WRITERS))
    return _written("writes", seconds, used_s, found, lost, commits, "none lost, >= 2,000/s, p99 <= 50 ms", 2_000)


def records(home: Path, full: bool) -> Result:
    each = 100 if full else 25

    def bodies(number: int) -> list[Any]:
        return [_decision(number, n) for n in range(each)]

    with quiet_daemon(home) as daemon:
        before_s = core_seconds(daemon)
        seconds, found = together(WRITERS, posted(socket_path(home), bodies))
        used_s = core_seconds(daemon) - before_s
        commits = figure(daemon, "autosel_ledger_commits_total")
    with open_ledger(home=home, alone=True) as ledger:
        lost = WRITERS * each - len(ledger.history())
    return _written("records", seconds, used_s, found, lost, commits, "none lost (no goal for the rate)", 0)


def _decision(number: int, count: int) -> commands.Record:
    return commands.Record(
        fp=here(),
        workload=ATTN.at(B=number + 1, L=1 << (6 + count % 8)),
        verdict=None,
        race=None,
        parities=((CPP, PASSED),),
        arm=CPP,
        baseline=BASELINE,
        mode="m",
        state="promoted",
        reason="",
        idempotency_key=f"{number}-{count}-{os.getpid()}",
        length_range=None,
        entrants=(),
    )


def _written(
    name: str, seconds: float, used_s: float, found: Latencies, lost: int, commits: float, goal: str, floor: float
) -> Result:
    rate, by, own_ms = len(found) / seconds, spread(found), 1e3 * used_s / len(found)
    text = f"{rate:,.0f}/s, p50 {by['p50_ms']:.1f} ms, p99 {by['p99_ms']:.1f} ms; {lost} of {len(found):,} lost"
    return Result(
        name=name,
        text=f"{text}; {len(found) / max(1.0, commits):.0f} a commit; {own_ms:.2f} ms of a core each in the daemon",
        goal=goal,
        reached=lost == 0 and (not floor or (rate >= floor and by["p99_ms"] <= 50)),
        values={"per_s": rate, "lost": lost, "commits": commits, "core_ms": own_ms, **by},
    )


def core_seconds(daemon: Daemon) -> float:
    """Return the CPU seconds of the daemon since its start, without its children."""
    used = psutil.Process(daemon.process.pid).cpu_times()
    return float(used.user + used.system)


def figure(daemon: Daemon, name: str) -> float:
    with connect(socket_path(daemon.home), 30.0) as line:
        text = exchange(line, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").decode()
    return float(next(x.split()[1] for x in text.splitlines() if x.startswith(name)))


def memory(home: Path, full: bool) -> Result:
    """Send lookups, with other requests as one in ten; a first part warms the caches."""
    fill(home)
    total = 1_000_000 if full else 100_000
    with quiet_daemon(home) as daemon:
        process = psutil.Process(daemon.process.pid)
        _mixed(home, total // 10)
        before, files = process.memory_info().rss, process.num_fds()
        _mixed(home, total)
        after, files_after = process.memory_info().rss, process.num_fds()
    grown = (after - before) / 2**20
    text = f"{grown:+.1f} MiB over {total:,} requests (from {before / 2**20:.0f})"
    return Result(
        name="memory",
        text=f"{text}, {files_after - files:+d} descriptors",
        goal="<= 8 MiB over 10^6",
        reached=grown <= 8 and files_after <= files + 2,
        values={"grown_mib": grown, "requests": total, "descriptors": files_after - files},
    )


def _mixed(home: Path, total: int) -> None:
    paths = [
        "/v1/serving",
        "/v1/health",
        "/v1/decisions?limit=5",
        "/v1/decisions/1",
        "/v1/jobs",
        "/metrics",
        "/",
        "/op/attn",
    ]
    requests = [f"GET {p} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() for p in paths]
    look = f"GET /v1/best/attn?workload={ATTN.key} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()

    def work(_: int) -> Latencies:
        with connect(socket_path(home), 60.0) as line:
            for n in range(total // 4):
                exchange(line, requests[n // 10 % len(requests)] if n % 10 == 0 else look)
        return []

    together(4, work)


def kills(home: Path, full: bool, count: int = 0, seed: int = 1) -> Result:
    rng, total, lost = random.Random(seed), 0, 0
    count = count or (1_000 if full else 15)
    context = mp.get_context("fork")
    for _ in range(count):
        out = context.Queue()
        with running(home, "--no-tune") as daemon:
            writers = [context.Process(target=_until_the_end, args=(home, n, out)) for n in range(4)]
            for writer in writers:
                writer.start()
            found = [out.get(timeout=60)]
            time.sleep(rng.uniform(0.0, 0.25))
            daemon.kill()
            for writer in writers:
                writer.join()
            while not out.empty():
                found.append(out.get())
        with open_ledger(home=home, alone=True) as ledger:
            lost += sum(spent < told - 1e-12 for told, spent in _claims(found, ledger))
            ledger.check()
        total += len(found)
    return Result(
        name="kills",
        text=f"{count} kills, {total:,} acknowledged writes, {lost} lost",
        goal="none lost over 1,000 kills",
        reached=lost == 0,
        values={"kills": count, "acknowledged": total, "lost": lost},
    )


def _claims(found: list[tuple[str, float]], ledger: Any) -> list[tuple[float, float]]:
    """Return (acknowledged amount, amount in the ledger) for each key."""
    told: dict[str, float] = {}
    for key, amount in found:
        told[key] = told.get(key, 0.0) + amount
    return [(amount, ledger.spent(key)) for key, amount in told.items()]


def _until_the_end(home: Path, number: int, out: Any) -> None:
    line = Client(socket_path(home), timeout_s=30.0)
    key = f"{number}-{os.getpid()}"
    for _ in range(5_000):
        spend = commands.Spend(key=key, amount=1e-6, reason="")
        try:
            line.post(commands.ADDRESS, commands.encode(spend, {}))
        except (Unreachable, AutoselError):
            return
        out.put((key, 1e-6))


def news(home: Path, full: bool) -> Result:
    from autosel.ledger import snapshot
    from tests.fleet import postgres

    times: Latencies = []
    with postgres.server() as server:
        url = server.url(server.schema())
        home.mkdir(mode=0o700)
        (home / "config.toml").write_text(f'db = "{url}"\n')
        with running(home, "--no-tune"), open_ledger(url, home=home.with_name("other"), alone=True) as other:
            for n in range(200 if full else 40):
                w = ATTN.at(B=n + 1)
                made = record(other, str(n), fp=here(), workload=w, arm=BASELINE, state="kept", race=None, mode="m")
                began = time.perf_counter()
                while not _holds(snapshot.read(home / snapshot.FILE), made.id):
                    time.sleep(0.001)
                times.append(time.perf_counter() - began)
    by, slowest = spread(times), 1e3 * max(times)
    return Result(
        name="news",
        text=f"p50 {by['p50_ms']:.1f} ms, p99 {by['p99_ms']:.1f} ms, slowest {slowest:.0f} ({len(times)} decisions)",
        goal="<= 1 s",
        reached=max(times) <= 1.0,
        values={"seconds": times, **by},
    )


def _holds(found: Any, decision_id: int) -> bool:
    return found is not None and any(row.document["id"] == decision_id for row in found.rows)


PARTS: dict[str, Callable[[Path, bool], Result]] = {
    "start": start,
    "lookups": lookups,
    "tuning": tuning,
    "writes": writes,
    "records": records,
    "memory": memory,
    "kills": kills,
    "news": news,
}

if __name__ == "__main__":
    sys.exit(main())
