"""Format the tables of all stages as text for a terminal and as Markdown for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from benchmarks.gpu.kept import BEGINNING, RunFolder, StageResult
from benchmarks.gpu.stages import NAMES, Table, stage

WIDTH = 100
NAMED = 3  # units listed by name if many failed for one reason


def write_summary(kept: RunFolder, wanted: Callable[[str], bool] = lambda unit: True) -> tuple[str, bool]:
    """Write summary.txt and summary.md over every stored stage. Return the text, and True if all wanted units
    succeeded."""
    records = list(kept.records(NAMES))
    tables = {r.stage: stage(r.stage).table({u: f for u, f in r.units.items() if u != BEGINNING}) for r in records}
    text = "\n\n".join([_head(records), *(_as_text(r, tables[r.stage]) for r in records), _verdict(records, kept)])
    kept.write_text("summary.txt", text + "\n")
    kept.write_text("summary.md", "\n\n".join(_pages(records, tables)) + "\n")
    open_ = (unit for record in records for unit in (*record.failed, *record.undone))
    return text, not any(wanted(unit) or unit == BEGINNING for unit in open_)


def _head(records: Sequence[StageResult]) -> str:
    if not records:
        return "no stage was run"
    device = next((r.device for r in records if r.key), records[0].device)
    shown = ", ".join(sorted({r.git_sha[:12] for r in records if r.git_sha})) or "no git"
    return f"{device['name']}   hw_id {device['hw_id'][:12]}   sources {shown}"


def _verdict(records: Sequence[StageResult], kept: RunFolder) -> str:
    """Return the counts of failed and undone units, and the path of the results."""
    failed, undone = (
        {r.stage: len(names) for r in records if (names := of(r))} for of in (lambda r: r.failed, lambda r: r.undone)
    )
    stages = f"{len(records)} stage{'s' * (len(records) != 1)}"
    told = [f"{stages}, {sum(len(r.units) for r in records)} units: "]
    told[0] += "nothing failed" if not failed else f"{sum(failed.values())} failed ({_each(failed)})"
    told[0] += f", {sum(undone.values())} left undone ({_each(undone)})" if undone else ""
    told += ["  to rerun failed units, add --retry to the same command"] if failed else []
    told += [f"  results: {kept.folder}   (summary.txt, summary.md; .json and .log of each stage)"]
    return "\n".join(told)


def _each(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{stage} {count}" for stage, count in counts.items())


def state(record: StageResult) -> str:
    """Return the numbers of units done, failed and left, as text."""
    told = [f"{len(record.units)} of {len(record.listed)} units", f"{record.seconds:.0f} s"]
    told += [f"{len(record.failed)} failed"] if record.failed else []
    told += [f"{len(record.undone)} left: the same command continues"] if record.undone else []
    return ", ".join(told)


def problems(record: StageResult) -> Iterator[str]:
    """Yield each reason once: a missing tool fails hundreds of units."""
    named: dict[str, list[str]] = {}
    for name in record.failed:
        named.setdefault(reason(record.units[name]), []).append(name)
    for why, names in named.items():
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        yield f"failed: {', '.join(names[:NAMED])}{more}: {why}"


def reason(found: Mapping[str, Any]) -> str:
    """Return the reason that a failed unit gave."""
    return found.get("error") or found.get("reason") or "see the JSON"


def _as_text(record: StageResult, table: Table) -> str:
    lines = [f"{record.stage}   {state(record)}"]
    if table.rows:
        widths = [max(len(row[i]) for row in (table.columns, *table.rows)) for i in range(len(table.columns))]
        for row in (table.columns, *table.rows):
            lines.append("  " + "  ".join(_cell(row, i, widths) for i in range(len(row))).rstrip())
    for remark in (*table.remarks, *problems(record)):
        lines += wrap(remark, WIDTH, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def _cell(row: Sequence[str], i: int, widths: Sequence[int]) -> str:
    """Align figures right and words left."""
    figure = row[i][:1].isdigit() or row[i][:1] in ("-", "+")
    return row[i].rjust(widths[i]) if figure else row[i].ljust(widths[i])


def _pages(records: Sequence[StageResult], tables: dict[str, Table]) -> Iterator[str]:
    yield f"# {_head(records)}"
    for record in records:
        table = tables[record.stage]
        yield f"## {record.stage}\n\n{state(record)}; started {record.started}"
        if table.rows:
            lines = [_row(table.columns), "|" + " --- |" * len(table.columns), *map(_row, table.rows)]
            yield "\n".join(lines)
        for remark in (*table.remarks, *problems(record)):
            yield remark.replace("\n", " ")


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
