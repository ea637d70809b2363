"""Commands `serve`, which runs the daemon, and `status`, which shows what the daemon does."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from typing import Any

import click

from autosel import devices, extras, settings
from autosel.cli.options import json_option, verb
from autosel.cli.output import emit_json, paragraph, table
from autosel.client import Client, Unreachable
from autosel.errors import AutoselError

MOST_USES = 12  # rows
MOST_JOBS = 6


@verb("serve", "serve", "serve --tcp 127.0.0.1:8765", "serve --systemd-unit")
@click.option("--tcp", default="", metavar="HOST:PORT", help="also listen on this loopback port, for the dashboard")
@click.option("--origin", "origins", multiple=True, metavar="URL", help="allow requests from this web page; repeatable")
@click.option(
    "--busy",
    type=click.FloatRange(0.0),
    default=0.5,
    show_default=True,
    metavar="CORES",
    help="tune while other work uses at most this many cores",
)
@click.option("--tune/--no-tune", default=True, help="--no-tune: only serve and record")
@click.option("--systemd-unit", "unit", is_flag=True, help="print a systemd user unit that starts this")
def serve_command(tcp: str, origins: tuple[str, ...], busy: float, tune: bool, unit: bool) -> None:
    """Write the ledger for all clients, tune workloads that clients miss while the device is idle, demote on faults.

    Listens on a Unix socket below AUTOSEL_HOME that only this user can reach. Ctrl-C stops it. If it is killed, nothing
    that it acknowledged is lost.
    """
    try:
        from autosel.daemon import serve
        from autosel.daemon.hub import Options
    except ModuleNotFoundError as error:
        raise extras.missing("daemon", "the daemon", error) from error
    if unit:
        click.echo(serve.unit(_command(tcp, origins, busy, tune), settings.home()), nl=False)
        return
    serve.serve(Options(tcp=tcp, origins=origins, busy_limit=busy, tune=tune))


def _command(tcp: str, origins: tuple[str, ...], busy: float, tune: bool) -> str:
    words = [sys.executable, "-P", "-m", "autosel.cli.main", "serve"]
    words += ["--tcp", tcp] if tcp else []
    for origin in origins:
        words += ["--origin", origin]
    words += ["--busy", f"{busy:g}"] if busy != 0.5 else []
    words += [] if tune else ["--no-tune"]
    return shlex.join(words)


@verb("status", "status", "status --coverage", "status --json")
@click.option("--coverage", is_flag=True, help="the share of each process's time in ops that decisions serve")
@json_option
def status_command(coverage: bool, as_json: bool) -> None:
    """Show the daemon of this home, the number of calls that each candidate serves, and the current tune.

    Exit code 1 if there is no daemon.

    --coverage shows each process's calls with their time from the races, and why calls miss. Without a race, the time
    is derived from the bytes moved and the measured read rate: a lower bound.
    """
    with Client(timeout_s=5.0) as ask:
        try:
            about = ask.get("/v1/health")
        except Unreachable as error:
            raise AutoselError(
                "no daemon serves this home",
                why=f"{ask.path}: {error.why}",
                todo=f"start one: {settings.spelling()} serve",
            ) from error
        if coverage:
            found = ask.get("/v1/coverage")
            emit_json(found) if as_json else _show_coverage(found["processes"])
        elif as_json:
            found = {"jobs": ask.get("/v1/jobs")["jobs"], "fleet": ask.get("/v1/fleet"), "uses": ask.get("/v1/uses")}
            emit_json({**about, **found})
        else:
            _show(about, ask)


def _show(about: dict[str, Any], ask: Client) -> None:
    serving = ", ".join(f"{n} {state}" for state, n in about["serving"].items()) or "nothing decided yet"
    rows = [
        ["daemon", f"autosel {about['version']}, pid {about['pid']}, since {about['started_at'][:19]}Z"],
        ["ledger", f"{about['ledger']}{'' if about['status'] == 'ok' else ': READ-ONLY, its disk cannot be written'}"],
        ["serving", f"{serving}, epoch {about['epoch']}" + (f", {about['stale']} stale" if about["stale"] else "")],
        ["tuning", _tuning(about)],
        *(["command", _progress(c)] for c in about.get("commands", ())),
        ["device", f"{about['others_busy_cores']:.1f} cores busy with other work"],
        *([d["device"], d["held"] or "idle"] for d in about.get("devices", ()) if d["device"] != devices.HOST),
    ]
    rows += [["fleet", _fleet(ask.get("/v1/fleet"))]]
    served = ask.get("/v1/uses")
    rows += [["calls", _calls(served)]]
    rows += [["dashboard", about["dashboard"]]] if about["dashboard"] else []
    for name, text in rows:
        click.echo(paragraph(f"{name:<11}{text}", hang=" " * 11))
    if served["uses"]:
        click.echo("\n" + _uses_table(served["uses"]))
    jobs = ask.get("/v1/jobs")["jobs"]
    for title, ended in (("queue", False), ("ended", True)):
        if some := [j for j in jobs if bool(j["ended_at"]) == ended]:
            click.echo("\n" + _jobs_table(title, some))


def _jobs_table(title: str, jobs: list[dict[str, Any]]) -> str:
    """Return a table of the first jobs, with the rest in one line."""
    lines = [[str(j["id"]), j["state"], j["source"], j["workload"], j["note"] or j["reason"]] for j in jobs[:MOST_JOBS]]
    rest = len(jobs) - MOST_JOBS
    lines += [["", "", "", f"{rest} others", ""]] if rest > 0 else []
    return table((title, "state", "from", "workload", "note"), lines, right=(0,), wrap=4)


def _show_coverage(processes: list[dict[str, Any]]) -> None:
    if not processes:
        click.echo("no process of this home has called anything yet")
    for number, found in enumerate(processes):
        click.echo(("\n" if number else "") + paragraph(_coverage_line(found), hang="  "))
        click.echo(_coverage_table(found["parts"]))


def _coverage_line(found: dict[str, Any]) -> str:
    calls = sum(p["calls"] for p in found["parts"]) + found["left_out"]
    share = "unknown" if found["share"] is None else f"{found['share']:.0%}"
    who = f"{found['engine'] or 'a program'}, process {found['process']}, {found['mode']}"
    times = Counter({p["origin"]: 0.0 for p in found["parts"]})
    for part in found["parts"]:
        times[part["origin"]] += part["calls"] * (part["us_per_call"] or 0.0)
    total = sum(times.values())
    origins = ", ".join(f"{us / total:.0%} {origin}" for origin, us in times.most_common() if us)
    untimed = sum(p["calls"] for p in found["parts"] if p["us_per_call"] is None)
    text = f"{who}: decisions serve {share} of the time in ops, {calls} calls"
    text += f"; times: {origins}" if origins else ""
    return text + (f"; {untimed} calls have no known time" if untimed else "")


def _coverage_table(parts: list[dict[str, Any]]) -> str:
    """Return a table of the parts that take the most time, with the rest in one line."""
    total = sum(p["calls"] * (p["us_per_call"] or 0.0) for p in parts) or 1.0
    rows = [
        [
            p["bucket"] or p["op"],
            str(p["calls"]),
            "-" if p["us_per_call"] is None else f"{p['calls'] * p['us_per_call'] / total:.0%}",
            p["candidate"] if not p["why"] else f"missed: {p['why']}",
        ]
        for p in parts[:MOST_USES]
    ]
    rest = parts[MOST_USES:]
    rows += [[f"{len(rest)} others", str(sum(p["calls"] for p in rest)), "", ""]] if rest else []
    return table(("workloads", "calls", "of time", "served by"), rows, right=(1, 2), wrap=3)


def _calls(served: dict[str, Any]) -> str:
    """Return the calls that this home's processes have reported since the daemon started."""
    if not served["calls"]:
        return "no process of this home has called anything yet"
    count = served["processes"]
    covered = sum(u["calls"] for u in served["uses"] if u["decision_id"] is not None) / served["calls"]
    lively = f"{count} {'process' if count == 1 else 'processes'} in the last minute"
    text = f"{served['calls']} since it started, {covered:.0%} of them by a decision; {lively}"
    conditions: Counter[str] = Counter()  # that undecided calls would need
    for use in served["uses"]:
        if use["conditions"]:
            conditions[use["conditions"]] += use["calls"]
    return text + "".join(f"; {count} without a decision: {told}" for told, count in conditions.most_common(1))


def _uses_table(uses: list[dict[str, Any]]) -> str:
    """Return a table of the candidates with the most calls, with the rest in one line."""
    lines = [[u["op"], u["candidate"], str(u["decision_id"] or "none"), f"{u['calls']}"] for u in uses[:MOST_USES]]
    rest = uses[MOST_USES:]
    lines += [["rest", f"{len(rest)} others", "", str(sum(u["calls"] for u in rest))]] if rest else []
    return table(("op", "served by", "decision", "calls"), lines, right=(2, 3), wrap=1)


def _fleet(found: dict[str, Any]) -> str:
    hosts, odd = len(found["hosts"]), found["disagreements"]
    told = [f"{hosts} hosts share this ledger" if found["shared"] else "this host alone"]
    told += [f"{len(found['waiting'])} decisions of others wait for a proof here"] if found["waiting"] else []
    told += [f"SICK? {d['slower']} differs from a device of its kind: doctor shows where" for d in odd]
    return "; ".join(told)


def _progress(found: dict[str, Any]) -> str:
    count = f" {found['done']}/{found['total']}" if found["total"] > 1 else ""
    left = f", about {found['left_s']:.0f} s left" if found["left_s"] >= 0 else ""
    at = f"{found['command']}: {found['stage'] or 'starting'}{count} {found['detail']}".rstrip()
    return f"{at}, {found['decided']} decided{left}"


def _tuning(about: dict[str, Any]) -> str:
    live = about["tuning"]
    if live:
        return f"{live['stage']} {live['done']}/{live['total']} {live['detail']}, {live['seconds']:.0f} s"
    if about["jobs"]:
        return f"{about['jobs']} wait; {about['held'] or 'next in a moment'}"
    return "idle"
