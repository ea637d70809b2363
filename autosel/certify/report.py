"""A certificate for people: one self-contained page and its pictures, without scripts, fonts or downloads."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from autosel.certify.audit import Audit, AuditRow, audit, proof_of_use
from autosel.certify.certificate import Certificate
from autosel.certify.derive import arithmetic, claimed_interval, headline_roofline
from autosel.certify.plots import pictures, png, svg
from autosel.certify.words import compared, compared_format, figure, percent, prompted, scored, speculated, suspected
from autosel.errors import AutoselError
from autosel.values import to_json

PAGE, DOCUMENT = "index.html", "report.json"
FORMAT = "autosel.report"
CAPTIONS = {
    "ops": "Where the time of a step goes. The strong part of a bar is what its roofline needs.",
    "roofline": "Each op against the limits of the device. The larger the dot, the larger its share of the step.",
    "latency": "Share of the steps that took at most this time.",
}


def write(folder: Path, made: Certificate) -> list[Path]:
    """Write index.html, report.json, and each picture as SVG and PNG. Files are replaced atomically."""
    drawn = pictures(made)
    inline = {name: svg(drawing, for_page=True) for name, drawing in drawn.items()}
    files: dict[str, bytes] = {}
    for name, drawing in drawn.items():
        files[f"{name}.svg"] = svg(drawing, for_page=False).encode()
        files[f"{name}.png"] = png(drawing)
    files[DOCUMENT] = json.dumps({"format": FORMAT, "version": 1, "certificates": [to_json(made)]}, indent=1).encode()
    files[PAGE] = page(made, inline).encode()
    return [replace_file(folder / name, content) for name, content in files.items()]


def replace_file(path: Path, content: bytes) -> Path:
    """Replace a file atomically and durably: a reader sees the old or the new one. Raises AutoselError."""
    making = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with making.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        making.replace(path)
    except OSError as error:
        with suppress(OSError):
            making.unlink()
        raise AutoselError(f"cannot write {path}", why=error.strerror or str(error), todo="check the path") from error
    return path


def write_json(path: Path, document: object) -> None:
    """Replace a file by a document, atomically. Raises AutoselError."""
    replace_file(path, json.dumps(document, indent=1).encode() + b"\n")


def page(made: Certificate, drawn: dict[str, str]) -> str:
    """Return the HTML with the pictures inside."""
    found = audit(made)
    figures = "".join(
        f"<figure><div class=wide>{drawn[name]}</div><figcaption>{escape(text)}</figcaption></figure>"
        for name, text in CAPTIONS.items()
        if name in drawn
    )
    title = f"{made.model} on {made.device}"
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            _headline(made),
            _tiles(made),
            _verdicts(made),
            f"<h2>Ops of a step</h2>{_ops_table(found)}",
            f'<div class="figures">{figures}</div>',
            f"<h2>Run</h2>{_facts(made)}",
            _check(made),
            "</main></body></html>\n",
        )
    )


def _headline(made: Certificate) -> str:
    part = made.layers.run != made.layers.of
    warning = (
        f'<p class="warn">Only {made.layers.run} of the model’s {made.layers.of} layers ran. '
        "These figures are for a part of the model, not for the whole model.</p>"
        if part
        else ""
    )
    where = f"{arithmetic(made)}, batch {made.shape.batch}, context {made.shape.seq}, {escape(made.weights)} weights"
    below = f"{where} · {escape(made.device)} · {escape(made.timestamp)}"
    return f"<h1>{escape(made.model)}</h1><p class=sub>{below}</p>{warning}"


def _tiles(made: Certificate) -> str:
    step = made.latency_interval_ms
    tiles = [
        (figure(made.tokens_per_sec), "tokens/s", f"sustained {figure(made.sustained_tokens_per_sec)}"),
        *_speedup_tile(made),
        (
            f"{figure(made.latency_ms.med)} ms",
            "a step, median",
            f"{figure(step.lo)} … {figure(step.hi)}, p95 {figure(made.latency_ms.p95)}",
        ),
        (
            percent(headline_roofline(made)),
            "of the roofline",
            f"{figure(made.read_bytes_per_s / 1e9, 3)} GB/s at best during the run",
        ),
    ]
    if made.ttft_ms is not None:
        other = made.baseline_ttft_ms
        below = f"{made.shape.prompt} tokens" + ("" if other is None else f"; baseline {figure(other)} ms")
        tiles.append((f"{figure(made.ttft_ms)} ms", "to the first token", below))
    marked = (f"<b>{escape(a)}</b><span>{escape(b)}</span><small>{escape(c)}</small>" for a, b, c in tiles)
    return "<ul class=tiles>" + "".join(f"<li>{cell}</li>" for cell in marked) + "</ul>"


def _speedup_tile(made: Certificate) -> list[tuple[str, str, str]]:
    if made.baseline is None:
        return []
    found = claimed_interval(made)
    below = f"{found.lo:.2f} … {found.hi:.2f}" if found else "no interval: too few steps"
    return [(f"{made.baseline.speedup:.2f}×", "over the baseline", below)]


def _verdicts(made: Certificate) -> str:
    v = made.verification
    right = f"{compared(made)}; at most {v.max_logit_error:.3g} from the reference, {v.logit_bound:.3g} allowed"
    kind, word = ("ok", "passed") if made.verification_ok else ("bad", "FAILED")
    lines = [(kind, f"verification {word}: {right}")]
    lines += [("note", f"speculation: {speculated(made)}")] if speculated(made) else []
    lines += [("note", f"quality: {scored(made)}")] if scored(made) else []
    lines += [("note", f"format: {compared_format(made)}")] if compared_format(made) else []
    lines += [("bad", f"SUSPECT: {suspected(made)}")] if suspected(made) else []
    for judged in made.slo:
        word = "met" if judged.met else "MISSED"
        lines.append(("ok" if judged.met else "bad", f"{judged.objective}: {word}, measured {judged.found}"))
    lines += [("note", "other work ran, or the device was slowed, during the measurement")] if made.contended else []
    lines += [("note", note) for note in made.notes]
    return "<ul class=verdicts>" + "".join(f'<li class="{kind}">{escape(text)}</li>' for kind, text in lines) + "</ul>"


def _ops_table(found: Audit) -> str:
    heads = ("op", "share", "ms a step", "calls", "µs a call", "served by", "next best", "GB/s", "roofline", "limit")
    rows = "".join(f"<tr>{_cells(_op_row(row), heads)}</tr>" for row in found.rows)
    own = ["rest", percent(found.rest_share), figure(found.rest_us / 1e3, 3), *[""] * 7]
    rest = f"<tr>{_cells(own, heads)}</tr>"
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}{rest}</tbody></table></div>'


def _op_row(row: AuditRow) -> list[str]:
    return [
        row.label,
        percent(row.share),
        figure(row.time_us / 1e3, 3),
        str(row.calls),
        figure(row.call_us),
        row.candidate,
        f"{row.runner_up} {row.runner_up_ratio:.2f}×" if row.runner_up_ratio else "",
        figure(row.bytes_per_s / 1e9, 3),
        percent(row.roofline),
        row.limit,
    ]


def _cells(values: Sequence[str], heads: Sequence[str]) -> str:
    """Return table cells that name their column: on a phone a row is a list without the head."""
    pairs = zip(values, heads, strict=True)
    return "".join(f'<td data-h="{escape(head)}">{escape(value)}</td>' for value, head in pairs)


def _facts(made: Certificate) -> str:
    gaps, ceiling = made.itl_ms, figure(made.read_bytes_per_s / 1e9)
    turns = " of each arm, interleaved," if made.baseline else ""
    facts = (
        ("device", f"{made.device}, {made.sm}"),
        ("layers", f"{made.layers.run} of {made.layers.of}"),
        ("prompt", prompted(made)),
        ("steps", f"{made.iters}{turns} after {made.warmup} to warm up"),
        ("memory", f"{figure(made.read_median_bytes_per_s / 1e9)} GB/s read between the steps, at best {ceiling}"),
        ("bytes a token", f"{figure(made.bytes_per_token / 1e9)} GB"),
        ("key-value cache", f"{figure(made.kv_cache_bytes / 2**20)} MiB"),
        ("weights", f"{figure(made.weights_bytes / 2**30)} GiB"),
        ("peak memory", f"{figure(made.peak_memory_bytes / 2**30)} GiB"),
        ("between tokens", f"p50 {figure(gaps.p50)}, p90 {figure(gaps.p90)}, p99 {figure(gaps.p99)} ms"),
        ("autosel's Python", "" if made.python_overhead is None else f"{100 * made.python_overhead:.2g} % of a step"),
        ("tokens a dollar", figure(made.cost.tokens_per_dollar) if made.cost.tokens_per_dollar else ""),
        ("tokens a watt-hour", figure(made.cost.tokens_per_watt_hour) if made.cost.tokens_per_watt_hour else ""),
        ("software", ", ".join(f"{k} {v!s:.40}" for k, v in made.environment.items())),
        ("served", proof_of_use(made)),
        ("commit", made.git_sha),
    )
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts if v) + "</dl>"


def _check(made: Certificate) -> str:
    document = escape(json.dumps(to_json(made), indent=1))
    signed = f"signed by <code>{made.signer}</code>" if made.signer else "not signed"
    return (
        f"<h2>Check it</h2><p>Run it again: <code>{escape(made.repro_cmd)}</code></p>"
        f"<p>Certificate {made.sequence}, sha256 <code>{made.checksum}</code>, {signed}. The checksum shows accidents "
        "and partial edits. A person who can rewrite the file can also compute it again, and none of this proves "
        "that the measurement was honest: run it again.</p>"
        f"<details><summary>The certificate</summary><pre>{document}</pre></details>"
    )


STYLE = """
:root{--paper:#fff;--ink:#1c2330;--quiet:#5c6675;--grid:#d9dee6;--accent:#0b66c3;--other:#b5651d;--bad:#b3261e;
--ok:#1b7f3b;--font:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--paper:#12161d;--ink:#e4e8ef;--quiet:#9aa5b5;--grid:#2c3542;--accent:#5aa9f5;
--other:#e09a55;--bad:#ff8a80;--ok:#6fcf8a}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 var(--font);font-variant-numeric:tabular-nums}
main{max-width:62rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1,p,li{overflow-wrap:anywhere}h1{font-size:1.6rem;margin:0}h2{font-size:1.05rem;margin:2.2rem 0 .6rem}
.sub,small,figcaption,dt{color:var(--quiet)}.sub{margin:.1rem 0 1rem}
.warn{border-left:4px solid var(--bad);padding:.4rem .8rem;font-weight:600}
ul{list-style:none;padding:0;margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr));gap:.6rem}
.tiles li{border:1px solid var(--grid);border-radius:6px;padding:.7rem .8rem;display:flex;flex-direction:column}
.tiles b{font-size:1.5rem;font-weight:600;line-height:1.2}
.verdicts{margin-top:1rem}.verdicts li{padding-left:1.1rem;text-indent:-1.1rem}
.verdicts li::before{content:"•";display:inline-block;width:1.1rem;text-indent:0;color:var(--quiet)}
.verdicts .ok::before{content:"✓";color:var(--ok)}.verdicts .bad::before{content:"✗";color:var(--bad)}
.verdicts .bad{color:var(--bad)}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{padding:.28rem .6rem;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{font-weight:500;color:var(--quiet)}td:nth-child(1),th:nth-child(1),td:nth-child(6),th:nth-child(6),
td:nth-child(7),th:nth-child(7),td:nth-child(10),th:nth-child(10){text-align:left}
figure{margin:1.8rem 0 0}figure svg{width:100%;min-width:36rem;height:auto;display:block}figcaption{font-size:.88rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1.2rem;margin:0}dd{margin:0;overflow-wrap:anywhere}
@media (max-width:34rem){dl{grid-template-columns:1fr}dt{margin-top:.4rem}
figure svg{min-width:30rem}.figures{margin:0 -.6rem}
thead{display:none}tr{display:grid;grid-template-columns:1fr 1fr;gap:0 1rem;padding:.5rem 0;
border-bottom:1px solid var(--grid)}
td:nth-child(n){display:flex;justify-content:space-between;gap:.6rem;padding:.1rem 0;border:0;white-space:normal;
overflow-wrap:anywhere;text-align:right}
td:empty{display:none}td::before{content:attr(data-h);color:var(--quiet);white-space:nowrap}
td:nth-child(1){grid-column:1/-1;justify-content:start;font-weight:600}td:nth-child(1)::before{content:none}
td:nth-child(6),td:nth-child(7){grid-column:1/-1}}
code,pre{font:.86em ui-monospace,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere}
pre{overflow-x:auto;border:1px solid var(--grid);border-radius:6px;padding:.8rem}
"""
