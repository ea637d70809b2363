"""Files that a run writes besides its certificate: audit and trace as JSON, the report as a page with plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autosel.certify import audit, report
from autosel.certify.audit import Audit
from autosel.certify.certificate import Certificate
from autosel.certify.trace import trace
from autosel.decode.run import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Paths of the files; None means not written. `report` is a folder."""

    audit: Path | None = None
    trace: Path | None = None
    report: Path | None = None


def files(
    places: Places, made: Certificate, found: Audit, timeline: Sequence[Span] = ()
) -> Iterator[tuple[Path, Callable[[], object]]]:
    """Yield each path and the function that writes it, so that one failure does not affect the others. `timeline`: of
    a step, for the trace."""
    if places.audit is not None:
        yield places.audit, partial(_write_json, places.audit, audit.document(found))
    if places.trace is not None:
        yield places.trace, partial(_write_json, places.trace, trace(made, timeline))
    if places.report is not None:
        yield places.report / report.PAGE, partial(report.write, places.report, made)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    report.replace_file(path, json.dumps(document, indent=1).encode() + b"\n")
