"""The pytest plugin: options that name a candidate, and one item for each of its checks."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import cached_property

import pytest

from autosel.errors import AutoselError
from autosel.testing.subject import DEVICE, MODEL, SEQ, Check, Order, TestedCandidate, of_kind

CALL_S = 60.0
SUITE = "autosel-suite"
KINDS = ("hostile", "habit", "size", "left")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("autosel", "conformance of a kernel candidate")
    group.addoption("--candidate", metavar="WHO", help="module:function, or a name such as cpp:rmsnorm")
    group.addoption("--op", metavar="OP", help="the op that the candidate implements, such as rmsnorm, linear or attn")
    group.addoption(
        "--dtype",
        action="append",
        default=[],
        choices=("bf16", "fp16", "fp32"),
        help="dtype (default: the model's); repeatable",
    )
    group.addoption("--model", default=MODEL, metavar="NAME", help=f"preset or folder of the shapes (default {MODEL})")
    group.addoption("--batch", type=int, default=1, metavar="N", help="sequences in a decode step (default 1)")
    group.addoption("--seq", type=int, default=SEQ, metavar="N", help=f"context length (default {SEQ})")
    group.addoption("--device", default=DEVICE, metavar="DEVICE", help=f"cpu, cuda or cuda:N (default {DEVICE})")
    group.addoption("--case", default="", metavar="NAME", help="run only this case")
    group.addoption("--inputs", default="", metavar="TEXT", help="use the inputs of an earlier run")
    group.addoption(
        "--deadline",
        type=float,
        default=CALL_S,
        metavar="S",
        help=f"timeout of a call in seconds (default {CALL_S:.0f})",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ConformanceRun(config), SUITE)


class ConformanceRun:
    """State of one pytest run: the subject, which is created before collection and closed at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    @cached_property
    def subject(self) -> TestedCandidate:
        option = self.config.getoption
        if not option("candidate") or not option("op"):
            raise pytest.UsageError("autosel.testing needs --candidate module:function and --op OP")
        order = Order(
            candidate=option("candidate"),
            op=option("op"),
            dtypes=tuple(dict.fromkeys(option("dtype"))),
            model=option("model"),
            batch=option("batch"),
            seq=option("seq"),
            device=option("device"),
            deadline_s=option("deadline"),
            inputs=option("inputs") or secrets.token_hex(8),
        )
        try:
            return TestedCandidate(order)
        except AutoselError as error:
            raise pytest.UsageError(str(error)) from error

    @cached_property
    def checks(self) -> list[Check]:
        found = self.subject.checks()
        case = self.config.getoption("case")
        if case and not of_kind(found, KINDS, case):
            names = ", ".join(dict.fromkeys(c.step.name for c in found))
            raise pytest.UsageError(f"unknown --case {case!r}; the cases are {names}")
        return found

    def pytest_sessionstart(self) -> None:
        """Report an error in the options before collection."""
        _ = self.checks

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for kind in KINDS:
            if kind in metafunc.fixturenames:
                chosen = of_kind(self.checks, (kind,), self.config.getoption("case"))
                metafunc.parametrize(kind, chosen, ids=[c.id for c in chosen])

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Run parity items before containment items. With --case, deselect all other items."""
        items.sort(key=lambda item: "test_containment" in item.nodeid)
        if not config.getoption("case"):
            return
        wanted = [item for item in items if any(isinstance(v, Check) for v in _parameters(item))]
        config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
        items[:] = wanted

    def pytest_report_header(self, config: pytest.Config) -> Sequence[str]:
        if not config.getoption("candidate"):
            return []
        subject = self.subject
        keys = ", ".join(p.workload.key for p in subject.proofs[:3])
        more = f" and {len(subject.proofs) - 3} more" if len(subject.proofs) > 3 else ""
        lines = [f"autosel: {subject.candidate.name} as {subject.candidate.op} at {keys}{more}"]
        lines += [f"autosel: unsupported: {key}: {reason}" for key, reason in subject.rejected.items()]
        return [*lines, f"autosel: inputs {subject.order.inputs}"]

    def pytest_sessionfinish(self) -> None:
        if "subject" in vars(self):
            self.subject.close()


@pytest.fixture(scope="session")
def autosel_subject(request: pytest.FixtureRequest) -> TestedCandidate:
    """The candidate under test."""
    suite = request.config.pluginmanager.get_plugin(SUITE)
    assert isinstance(suite, ConformanceRun)
    return suite.subject


def _parameters(item: pytest.Item) -> Sequence[object]:
    called = getattr(item, "callspec", None)
    return list(called.params.values()) if called is not None else []
