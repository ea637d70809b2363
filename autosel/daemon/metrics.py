"""Collect figures for Prometheus. Labels are few and known: no path, workload or name that a caller chose."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series of each, which no board reads
TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Metrics:
    def __init__(self) -> None:
        r = self.registry = CollectorRegistry()
        self.requests = Counter("autosel_requests", "Requests answered", ("route", "status"), registry=r)
        self.seconds = Histogram(
            "autosel_request_seconds", "From a request's first byte to its answer", buckets=_SECONDS, registry=r
        )
        self.lookups = Counter("autosel_lookups", "Lookups by clients", registry=r)
        self.writes = Counter("autosel_ledger_writes", "Writes acknowledged", registry=r)
        self.commits = Counter("autosel_ledger_commits", "Transactions they were committed in", registry=r)
        self.waiting = Gauge("autosel_ledger_writes_waiting", "Writes that wait for the writer", registry=r)
        self.read_only = Gauge("autosel_ledger_read_only", "1: the ledger cannot be written", registry=r)
        self.epoch = Gauge("autosel_epoch", "The latest epoch of the snapshot", registry=r)
        self.serving = Gauge("autosel_decisions_serving", "Decisions that serve this device", ("state",), registry=r)
        self.stale = Gauge("autosel_decisions_stale", "Of these, those whose software has changed", registry=r)
        self.speedup = Gauge(
            "autosel_speedup_median", "Of the decisions that serve an op: median speedup", ("op",), registry=r
        )
        self.contended = Gauge(
            "autosel_speedup_contended", "Of these, decisions that were timed beside other work", ("op",), registry=r
        )
        self.read = Gauge(
            "autosel_speedup_read_bytes_per_second", "Lowest read rate of memory in these races", ("op",), registry=r
        )
        self.measured = Gauge(
            "autosel_speedup_measured_time_seconds", "When the oldest of these was decided", ("op",), registry=r
        )
        self.jobs = Gauge("autosel_jobs", "Workloads to tune", ("state",), registry=r)
        self.tuned = Counter("autosel_workloads_tuned", "Workloads tuned by the daemon", ("outcome",), registry=r)
        self.misses = Counter("autosel_misses", "Calls of clients without a decision", registry=r)
        self.calls = Counter(
            "autosel_calls", "Calls of clients, by the candidate that served them", ("op", "candidate"), registry=r
        )
        self.faults = Counter("autosel_faults", "Faults seen in service and taken in", ("cause",), registry=r)
        self.others = Gauge("autosel_others_busy_cores", "Cores that other work keeps busy", registry=r)
        self.streams = Gauge("autosel_event_streams", "Open lines of server-sent events", registry=r)
        self.started = Gauge("autosel_start_time_seconds", "When the daemon started, Unix time", registry=r)

    def text(self) -> bytes:
        made: bytes = generate_latest(self.registry)
        return made
