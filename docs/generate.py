#!/usr/bin/env python3
"""Generate parts of the documentation from the code, from benchmarks/results/ and from docs/transcripts/.

    python docs/generate.py              rewrite the blocks between markers in docs/*.md and README.md, and the line of
                                         each GPU kernel's header that says whether it has run
    python docs/generate.py --check      change nothing; list the blocks that are out of date and exit with 1
    python docs/generate.py --record     run the commands that the documentation shows, and store their output
    python docs/generate.py --record NAME [COMMAND ...]    record one of them, with another command (a smaller scope)

A block is between `<!-- generated: NAME [ARGUMENT] -->` and `<!-- end -->`. No block depends on this machine: formulas
are shown for the devices in fingerprints/ and for one example CPU. Use the environment's Python (.venv/bin/python).
--record runs the commands in a terminal of 80 columns, with the caller's own home.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autosel import settings  # noqa: E402
from autosel.values import Fingerprint, Knobs, Rate, Workload  # noqa: E402

TRANSCRIPTS = ROOT / "docs" / "transcripts"
BLOCK = re.compile(r"(<!-- generated: (?P<name>[a-z-]+)(?: (?P<argument>[^ ]+))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)
COLUMNS = 80
# The status line of a kernel's header: how it was checked; where it ran.
STATUS = re.compile(r"^((?:// )?status +[a-z ]+; ).*$", re.MULTILINE)
NEVER_RAN, RAN = "not yet run on silicon", "run on silicon: docs/gpu.md"

# The commands that the documentation shows, by the name of the transcript.
COMMANDS: Mapping[str, str] = {"run": "./run", "explain": "./run explain gate_up"}
# The lines of a transcript that the documentation replaces by "...", to keep it within a screen.
CUTS: Mapping[str, Sequence[str]] = {
    "run": (
        r"^ +(\d+m)?\d+s  (?!attn .* L8192).*\n",
        r"^(?:rope|kv_append|linear (?:o|gate|down)|add_rmsnorm|swiglu|sample)\b.*\n",
        r"^attn .* L(?!8192)\d+ .*\n",
    )
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a block is out of date")
    parser.add_argument(
        "--record", nargs=argparse.REMAINDER, help="run the documented commands: all, or NAME [COMMAND]"
    )
    options = parser.parse_args()
    if options.record is not None:
        record(options.record)
    forget_caller()
    stale = [*rewrite(write=not options.check), *rewrite_headers(write=not options.check)]
    for path in stale:
        _say(f"{'out of date' if options.check else 'rewritten'}: {path.relative_to(ROOT)}")
    if stale and options.check:
        _say("run: python docs/generate.py")
    return 1 if stale and options.check else 0


def forget_caller() -> None:
    """Remove the caller's settings, so that the documentation shows defaults and says `autosel`."""
    for name in [n for n in os.environ if n.startswith("AUTOSEL_")]:
        del os.environ[name]
    os.environ["AUTOSEL_HOME"] = str(Path(tempfile.gettempdir()) / "autosel-no-such-home")


def pages() -> list[Path]:
    return [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]


def rewrite(*, write: bool) -> Iterator[Path]:
    """Yield each page with an outdated block; rewrite it if `write`."""
    for path in pages():
        yield from _update(path, BLOCK.sub(_block, path.read_text()), write=write)


def rewrite_headers(*, write: bool) -> Iterator[Path]:
    """Yield each GPU kernel whose header disagrees with the committed results about whether it has run on a GPU;
    rewrite it if `write`."""
    ran = {name for _, name, _ in _outcomes()}
    for path in gpu_sources():
        told = RAN if f"{path.parent.name}:{path.stem}" in ran else NEVER_RAN
        yield from _update(path, STATUS.sub(rf"\g<1>{told}", path.read_text(), count=1), write=write)


def _update(path: Path, text: str, *, write: bool) -> Iterator[Path]:
    """Yield the file if it has another text; write this one if `write`."""
    if text != path.read_text():
        if write:
            path.write_text(text)
        yield path


def gpu_sources() -> list[Path]:
    folders = (("cuda", "*.cu"), ("triton", "*.py"), ("cutlass", "*.cu"))
    return [path for name, pattern in folders for path in sorted((ROOT / "kernels" / name).glob(pattern))]


def _block(match: re.Match[str]) -> str:
    make = BLOCKS.get(match["name"])
    if make is None:
        raise SystemExit(f"unknown block {match['name']!r}; known: {', '.join(BLOCKS)}")
    arguments = [match["argument"]] if match["argument"] else []
    return f"{match[1]}\n{make(*arguments).strip()}\n\n{match[5]}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


# --- markdown --------------------------------------------------------------------------------------------------------


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(_cell(c) for c in line) + " |" for line in lines)


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")


def code(value: object) -> str:
    return f"`{value}`" if str(value) else ""


def fence(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def prose(docstring: str | None) -> str:
    """Return a docstring as paragraphs."""
    return textwrap.dedent(inspect.cleandoc(docstring or "")).strip()


def promise(docstring: str | None) -> str:
    """Return a function's docstring as a noun phrase, without its "Return"."""
    words = prose(docstring).removeprefix("Return ")
    return words[:1].upper() + words[1:]


def short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- command line, settings, errors ----------------------------------------------------------------------------------


def cli() -> str:
    """Return the --help of every verb as printed."""
    import click

    from autosel.cli.main import VERBS
    from autosel.cli.main import cli as top

    parts = [fence(_help(top, "autosel", None))]
    context = click.Context(top, info_name="autosel")
    for verb in VERBS:
        command = top.get_command(context, verb)
        assert command is not None
        parts += [f"## {verb}", fence(_help(command, verb, context))]
        if isinstance(command, click.Group):
            inner = click.Context(command, info_name=verb, parent=context)
            for name, child in command.commands.items():
                parts += [f"### {verb} {name}", fence(_help(child, name, inner))]
    return "\n\n".join(parts)


def _help(command: Any, name: str, parent: Any) -> str:
    import click

    context = click.Context(
        command, info_name=name, parent=parent, terminal_width=COLUMNS, help_option_names=["-h", "--help"]
    )
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def settings_table() -> str:
    rows = [
        (
            code(s.variable),
            "" if s.name == "home" else code(s.name),
            _kind(s),
            code(s.default) if s.default not in (None, "") else "",
            s.help,
        )
        for s in settings.SETTINGS
    ]
    return table(("variable", "in config.toml", "type", "default", "meaning"), rows)


def _kind(setting: settings.Setting) -> str:
    return " or ".join(code(c) for c in setting.choices) if setting.choices else setting.kind.__name__.lower()


def passed_names() -> str:
    names = ", ".join(map(code, settings.PASSED_NAMES))
    prefixes = ", ".join(code(p + "*") for p in settings.PASSED_PREFIXES)
    endings = ", ".join(code("*" + e) for e in settings.SECRET_ENDINGS)
    return f"Passed: {names}; {prefixes}. Never passed: {endings}."


def errors_table() -> str:
    """List every error class: first the classes of `autosel.errors`, then subclasses in other modules."""
    rows = [(code(e.name), e.module, e.exit_code, code(e.base), e.words) for e in error_classes()]
    return table(("error", "module", "exit code", "base class", "meaning"), rows)


class ErrorClass(NamedTuple):
    name: str
    module: str
    base: str
    exit_code: int
    words: str


def error_classes() -> Iterator[ErrorClass]:
    """Yield the error classes, read from the sources because some modules need packages that are not installed."""
    package, codes = ROOT / "autosel", {"Exception": 1}
    for path in sorted(package.rglob("*.py"), key=lambda p: (p != package / "errors.py", p)):
        for node in ast.parse(path.read_text()).body:
            base = ast.unparse(node.bases[0]) if isinstance(node, ast.ClassDef) and node.bases else ""
            if base not in codes or node.name.startswith("_") or (base == "Exception" and node.name != "AutoselError"):
                continue
            own = [ast.literal_eval(n.value) for n in node.body if ast.unparse(n).startswith("exit_code = ")]
            codes[node.name] = [codes[base], *own][-1]
            module = code(path.relative_to(ROOT).with_suffix("").as_posix().replace("/", "."))
            words = " ".join((ast.get_docstring(node) or "").split())
            yield ErrorClass(name=node.name, module=module, base=base, exit_code=codes[node.name], words=words)


# --- architecture ----------------------------------------------------------------------------------------------------


def packages() -> str:
    """List each package and module in autosel/, top layer first, with the first paragraph of its docstring."""
    rows = []
    for number, layer in enumerate(_layers(), 1):
        for name in layer:
            path = ROOT / "autosel" / name
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if file.is_file():
                rows.append((number, code(f"autosel/{name}{'/' if path.is_dir() else '.py'}"), _promise(file)))
    return table(("layer", "path", "content"), rows)


def _layers() -> list[list[str]]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (c["layers"] for c in contracts if c.get("containers") == ["autosel"])
    return [[name.strip(" ()") for name in layer.split("|")] for layer in layers]


def _promise(file: Path) -> str:
    """Return the first paragraph of a module's docstring."""
    words = ast.get_docstring(ast.parse(file.read_text())) or ""
    if not words and file.name == "__init__.py":  # a package without a docstring: list its modules
        return ", ".join(code(p.stem) for p in sorted(file.parent.glob("*.py")) if p.stem != "__init__")
    return " ".join(words.split("\n\n")[0].split())


def story() -> str:
    from autosel import pipeline

    return fence(inspect.getsource(pipeline.tune), "python")


def choosing() -> str:
    from autosel.decode import choose

    return fence(inspect.getsource(choose.choose), "python")


def ledger_tables() -> str:
    from autosel.ledger import schema

    rows = [(code(t.name), ", ".join(c.name for c in t.columns)) for t in schema.METADATA.sorted_tables]
    return table(("table", "columns"), sorted(rows))


# --- method ----------------------------------------------------------------------------------------------------------

# The numbers in the text of method.md: (module in autosel, constant, meaning). The values come from the code.
CONSTANTS: Sequence[tuple[str, str, str]] = (
    ("race.plan", "SAMPLE_NS", "shortest sample of the short form, in the baseline's time, ns"),
    ("race.plan", "LONG_CALL_NS", "baseline call above which the long form is used, ns"),
    ("race.plan", "SESSIONS", "confirming sessions, each in a fresh process"),
    ("race.plan", "AA_SESSIONS", "A/A sessions that calibrate a device and time class"),
    ("race.plan", "DELTA_CALIBRATED", "minimum effect delta once calibrated"),
    ("race.plan", "DELTA_UNCALIBRATED", "minimum effect delta before calibration"),
    ("race.plan", "MAX_TAIL_SAMPLES", "samples after which a tail without a verdict is `undecided`"),
    ("race.plan", "VOIDS_ALLOWED", "void sessions before an attempt ends"),
    ("race.evidence", "ALPHA_SESSION", "alpha_s: error probability of one session"),
    ("race.evidence", "E_PAIRS", "1 / alpha_s: evidence a session needs against each rival"),
    ("race.evidence", "E_TAIL", "evidence the tail gate needs"),
    ("race.evidence", "TAIL_RATE_INVERSE", "1 / p0: allowed rate of slow samples"),
    ("race.judge", "ROLLING", "baseline samples in the rolling median of the tail gate"),
    ("race.judge", "TAIL_SLACK", "tail threshold, relative to the baseline's p95"),
    ("race.session", "MAX_DROPPED_SHARE", "dropped pairs, relative to clean ones, above which a session is void"),
    ("race.session", "MOST_BUSY", "pairs dropped on a busy machine that are allowed in addition to that share"),
    ("race.waits", "TOLERATED", "allowed wait of threads for a core, as a share of a sample"),
    ("race.waits", "MOST_LOST_NS", "most time that a visit spends on samples that are repeated for such waits, ns"),
    ("race.worker", "WARM_NS", "longest warm-up of a workload in a session, ns"),
    ("race.run", "CEILING_SLACK", "a session is void if an arm is faster than this times the read probe"),
    ("race.run", "FAR_ABOVE_FLOOR", "a session is void if one arm's slowdown is more than this times another's"),
    ("race.run", "MAX_ATTEMPTS", "finalists of one attempt, each with its own debit"),
    ("race.worker", "CHECK_SHARE", "share of pairs whose outputs are checked"),
    ("race.contest", "CHECKED_ROWS", "rows of a checked output that are compared in float64"),
    ("race.drawn", "KEPT", "timed calls of a sample whose results are compared in full"),
    ("race.drawn", "SLOTS", "sets of outputs that a sample's calls write into"),
    ("race.kept", "SPREAD", "distance of two results of an arm in a pair, in largest bounds"),
    ("race.kept", "APART", "distance from the baseline's result above which float64 decides, in largest bounds"),
    ("ledger.key", "LIFETIME_BUDGET", "total error probability of all attempts at one key"),
    ("parity.stage", "GUARD_BYTES", "guard on each side of every operand, bytes"),
    ("parity.battery", "REPEATS", "runs on the same inputs, with other work in between"),
    ("parity.battery", "FRESH_SEEDS", "fresh inputs at the same addresses"),
    ("parity.battery", "LEAK_CALLS", "maximum number of calls over which memory growth is measured"),
    ("parity.calls", "PASSES", "most calls of a thread on the same operands while another thread also calls"),
    ("parity.fullsize", "ROWS", "rows checked in float64 at full size, each time"),
    ("parity.whole", "JUDGED", "elements of a whole result, furthest from the baseline's, that are judged in float64"),
    ("parity.whole", "MOST_FLOPS", "operations of a baseline up to which the whole result is compared"),
    ("tuning.crossover", "BRACKET", "ratio of lengths to which a crossover is narrowed"),
    ("devices.device", "DRIFT_LIMIT", "relative change, in three measurements, above which a rate has drifted"),
    ("devices.cpu.identity", "SPREAD_LIMIT", "spread of the read windows above which a machine is `contended`"),
    ("values", "CONTENDED_CORES", "cores busy with other processes above which a machine is `contended`"),
    ("values", "CONTENDED_STEAL", "share of stolen CPU time above which a machine is `contended`"),
    ("dispatch.board", "LOOK_EVERY_S", "seconds between checks of the snapshot"),
)


def constants() -> str:
    rows = []
    for module, name, what in CONSTANTS:
        value = getattr(import_module(f"autosel.{module}"), name)
        rows.append(
            (
                code(name),
                short(value) if isinstance(value, float) else f"{value:,}".replace(",", " "),
                what,
                code(module),
            )
        )
    return table(("constant", "value", "meaning", "module"), rows)


def gpu_rates() -> str:
    from autosel.devices.cuda.rates import MEASURED

    return table(("rate", "method"), [(code(name), how) for name, how in MEASURED.items()])


def crossings() -> str:
    """Return a table of the wins needed for E >= 20."""
    from autosel.race.evidence import crossed, e_pairs, futile

    first = next(n for n in range(1, 100) if crossed(n, n))
    rows = []
    for n in (first, 10, 12, 20, 30, 60, 100, 200):
        least = next(k for k in range(n + 1) if crossed(n, k))
        most = next((k for k in range(n, -1, -1) if futile(n, k)), None)
        rows.append((n, least, f"{e_pairs(n, least):.1f}", f"{most} or fewer" if most is not None else "not yet"))
    return table(("pairs", "wins needed", "E at that count", "futile at"), rows)


def guard() -> str:
    """Return the docstrings of the guard's modules."""
    folder = ROOT / "autosel" / "guard"
    files = [folder / f"{name}.py" for name in ("rate", "spot", "call", "judge", "replay", "detector", "watch", "held")]
    return "\n\n".join(f"### guard/{f.name}\n\n{ast.get_docstring(ast.parse(f.read_text()))}" for f in files)


# --- formulas --------------------------------------------------------------------------------------------------------

# The example CPU of the documentation: two cores of a Zen 4 server in a cloud, with rounded measurements. It is not a
# known device.
EXAMPLE_CPU = Fingerprint(
    kind="cpu",
    name="example: 2 cores of Zen 4, AVX-512-BF16",
    identity={
        "isa": [
            "avx", "avx2", "avx512_bf16", "avx512bw", "avx512dq", "avx512f", "avx512vbmi", "avx512vl", "bmi2", "f16c",
            "fma",
        ],
        "cpus": 2, "l1d_bytes": 32 << 10, "l2_bytes": 1 << 20, "l3_bytes": 32 << 20, "l3_domains": 1,
    },
    environment={},
    rates={
        name: Rate(value=value, unit=unit, spread=0.0, source="example")
        for name, value, unit in (
            ("read_bytes_per_s@1", 30e9, "B/s"), ("read_bytes_per_s@2", 45e9, "B/s"), ("fork_join_s@2", 0.5e-6, "s"),
            ("fma_flops@1", 118e9, "FLOP/s"), ("bf16_dot_flops@1", 236e9, "FLOP/s"), ("exp_per_s@1", 5.6e9, "1/s"),
            ("dram_latency_s", 130e-9, "s"),
        )
    },
    source="docs/generate.py",
)  # fmt: skip
EXAMPLE_GPUS = ("h200", "rtx-5070-ti")
MODEL = "llama-8b"


def cpu_formulas() -> str:
    """Return the knobs of every C++ kernel on the example CPU."""
    from autosel.candidates.cpp.base import CppKernel
    from autosel.candidates.registry import own_candidates

    parts = [_example_cpu()]
    kernels = [c for c in own_candidates() if isinstance(c, CppKernel)]
    for kernel in sorted(kernels, key=lambda c: c.name):
        w = next((w for w in _workloads(kernel.op) if not kernel.limits(w)), None)
        if w is None:
            continue
        parts += [
            f"### {kernel.name}",
            f"Knobs of `{kernel.op}` at {w.shape_text}, {w.dtype}; kernels/cpu/{kernel.source}.cpp.",
        ]
        words = promise(kernel.formula.__doc__)
        parts += [words] if words else []
        parts.append(_knob_table(kernel.knobs(w, EXAMPLE_CPU)))
    return "\n\n".join(parts)


def _example_cpu() -> str:
    rows = [(code(k), short(v) if not isinstance(v, list) else " ".join(v)) for k, v in EXAMPLE_CPU.identity.items()]
    rows += [(code(k), f"{r.value:.4g} {r.unit}") for k, r in EXAMPLE_CPU.rates.items()]
    return "The example CPU:\n\n" + table(("input", "value"), rows)


def _knob_table(knobs: Knobs) -> str:
    rows = [
        (
            code(k.name),
            short(k.value),
            code(k.formula),
            ", ".join(f"{n} {short(v)}" for n, v in k.inputs.items()),
            k.reason,
        )
        for k in knobs.settings
    ]
    return table(("knob", "value", "formula", "inputs", "reason"), rows)


def _workloads(op: str) -> list[Workload]:
    """Return the example workloads of an op: llama-8b's decode step at batch 1 (longest context first), then at batch
    64."""
    from autosel import models
    from autosel.models.workloads import ASKED_OPS, STEP_OPS, workloads

    shape = models.load("gemma3-4b" if op == "geglu" else MODEL)
    found: list[Workload] = []
    for batch in (1, 64):
        found += reversed(workloads(shape, batch=batch, context=8192, ops=[*STEP_OPS, *ASKED_OPS]))
    return [w for w in found if w.op == op]


def gpu_formulas() -> str:
    """Return the knobs of every kernel family on two known devices, side by side."""
    from autosel import ops
    from autosel.fingerprint import known
    from autosel.knobs import gpu

    facts = [gpu.facts(known.load(name)) for name in EXAMPLE_GPUS]
    parts, seen = [], set()
    for op in ops.OPS:
        for w in _workloads(op):
            derived = [gpu.derive(w, f) | _cutlass(w, f) for f in facts]
            if w["M" if "M" in dict(w.dims) else "B"] == 64 and op != "linear":
                continue
            for family in derived[0]:
                if family == "route" or (family, op) in seen:
                    continue
                seen.add((family, op))
                parts += [f"### {family} for {op}", f"At {w.shape_text}, {w.dtype}."]
                parts.append(_side_by_side([d.get(family) for d in derived]))
    return "\n\n".join(parts)


def _cutlass(w: Workload, f: Any) -> dict[str, Knobs]:
    """Return the knobs of the CUTLASS products, which race in addition to the route's own kernel."""
    from autosel.knobs.gpu import cutlass

    if w.op != "linear" or w["M"] == 1:
        return {}
    hopper = {"cutlass gemm_sm90": cutlass.hopper(w, f)} if f.cc == (9, 0) else {}
    return {**hopper, "cutlass gemm_sm80": cutlass.ampere(w, f)}


def _side_by_side(knobs: Sequence[Knobs | None]) -> str:
    first = next(k for k in knobs if k is not None)
    values = [k.values if k is not None else {} for k in knobs]
    rows = [
        (code(k.name), *(short(v.get(k.name, "another route")) for v in values), code(k.formula))
        for k in first.settings
    ]
    return table(("knob", *EXAMPLE_GPUS, "formula"), rows)


def gpu_words() -> str:
    """Return the derivations, from the docstrings of the formula modules."""
    from autosel.knobs import gpu

    parts = []
    for name in ("facts", "gemv", "gemm", "cutlass", "attention", "rows", "sampling", "step"):
        module = import_module(f"{gpu.__name__}.{name}")
        parts += [f"### knobs/gpu/{name}.py", prose(module.__doc__)]
        for function in _own_functions(module):
            words = promise(function.__doc__)
            if words and not function.__name__.startswith("_"):
                parts.append(f"- `{function.__name__}`: " + " ".join(words.split()))
    return "\n\n".join(parts)


def _own_functions(module: Any) -> list[Callable[..., Any]]:
    return [f for f in vars(module).values() if inspect.isfunction(f) and f.__module__ == module.__name__]


def gpu_facts() -> str:
    """Return the results of the three laws for each known device."""
    from autosel.fingerprint import known
    from autosel.knobs import gpu
    from autosel.knobs.gpu import gemm, gemv

    rows = []
    for name in known.names():
        f = gpu.facts(known.load(name))
        rows.append(
            (
                name,
                f"{f.in_flight / 2**10:.0f} KiB",
                f"{f.sms_needed:.0f} of {f.sms}",
                f"{f.overhead_s * 1e6:.2f} us",
                gemv.cc_limit("bf16", f),
                gemm.large_from("bf16", f),
            )
        )
    return table(("device", "X in flight", "SMs that saturate DRAM", "overhead a", "M1, bf16", "M2, bf16"), rows)


# --- known devices ---------------------------------------------------------------------------------------------------


def devices() -> str:
    from autosel.fingerprint import known

    rows = []
    for name in known.names():
        fp = known.load(name)
        i, r = fp.identity, fp.rates
        measured = [k for k, rate in r.items() if not rate.source.startswith("estimate") and not k.startswith("peak")]
        rows.append(
            (
                code(name), fp.name, i["cc"], i["sm_count"], f"{i['l2_bytes'] / 2**20:.0f} MiB",
                f"{i['memory_bytes'] / 2**30:.0f} GiB", f"{r['peak_read_bytes_per_s'].value / 1e12:.2f}",
                f"{r['read_bytes_per_s'].value / 1e12:.2f}", f"{r['peak_bf16_flops'].value / 1e12:.0f}",
                f"{r['bf16_matrix_flops'].value / 1e12:.0f}", len(measured) or "none",
            )
        )  # fmt: skip
    headers = (
        "name", "device", "cc", "SMs", "L2", "memory", "peak read TB/s", "read TB/s", "peak bf16 TFLOP/s",
        "bf16 TFLOP/s", "figures measured by autosel",
    )  # fmt: skip
    return table(headers, rows)


def device_sources() -> str:
    from autosel import resources

    parts = []
    for path in sorted(resources.fingerprints().glob("*.json")):
        data = json.loads(path.read_text())
        sections = {
            "datasheet, limits": data["datasheet"]["limits"],
            "datasheet, peaks": data["datasheet"]["peaks"],
            "estimated": data["estimated"],
            "measured": {k: v for k, v in data["measured"].items() if v is not None},
        }
        rows = [
            (kind, code(key), short(figure["value"]), figure["unit"], figure["source"])
            for kind, figures in sections.items()
            for key, figure in figures.items()
        ]
        parts += [f"### {path.stem}", table(("kind", "figure", "value", "unit", "source"), rows)]
    return "\n\n".join(parts)


# --- kernel authors --------------------------------------------------------------------------------------------------


def op_table() -> str:
    """Return the arguments and results of every op, in calling order."""
    from autosel.ops import OPS

    rows = []
    for op in OPS.values():
        arguments = ", ".join(f"{a.name}{_mark(a)}" for a in op.args)
        traits = ", ".join(f"{n} {v}" for n, v in op.trait_defaults.items())
        rows.append((code(op.name), arguments, ", ".join(op.output_names), " ".join(op.dim_names), traits))
    return table(("op", "arguments", "results", "dimensions", "traits and their defaults"), rows)


def _mark(arg: Any) -> str:
    optional = "?" if arg.kind == "optional" else ""
    return optional + {"streamed": " (s)", "inout": " (io)", "resident": ""}[arg.role]


def cases(op_name: str) -> str:
    """Return the hostile cases of an op at llama-8b's shape."""
    from autosel.ops import OPS

    op, w = OPS[op_name], _workloads(op_name)[0]
    return table(
        ("case", "shape", "mistake that it finds"),
        [(c.name, c.workload.shape_text, c.covers) for c in op.cases(w)],
    )


def case_counts() -> str:
    from autosel.ops import OPS

    return table(
        ("op", "hostile cases, bf16"), [(code(op.name), len(op.cases(_workloads(op.name)[0]))) for op in OPS.values()]
    )


def rmsnorm_kernel() -> str:
    return fence((ROOT / "kernels" / "cpu" / "rmsnorm.cpp").read_text(), "cpp")


# --- figures and transcripts -----------------------------------------------------------------------------------------


def figures() -> str:
    """Return the stored tables of `benchmarks/figures.py --write`, one per machine."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from figures import markdown, stored

    return "\n\n".join(map(markdown, stored())) or "No results of `benchmarks/figures.py --write` are stored yet."


def _state(rows: Sequence[Mapping[str, Any]], seed: int = 0) -> str:
    """Return the seed of all rows and the state of the checks that they are of, or those of groups of rows."""
    states: dict[str, list[str]] = {}
    for row in rows:
        checks = f"checks {row['battery']}" if "battery" in row else "an earlier state of the checks"
        states.setdefault(f"seed {row.get('seed', seed)}, {checks}", []).append(row.get("op") or row["kernel"])
    told = [f"{state}: {', '.join(names)}" if len(states) > 1 else state for state, names in states.items()]
    return "; ".join(told).capitalize()


def _stored(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / "cpu" / f"{name}.json").read_text())


def mutants() -> str:
    """Return the last stored output of `python -m autosel.testing.mutants --json`."""
    found = _stored("mutants")
    reasons = [
        f"- `{op['op']}`, {name}: {why} ({op['points']:,} points)"
        for op in found["ops"]
        for name, why in op["equivalent"].items()
    ]
    state = _state(found["ops"], found.get("seed", 0))
    told = f"{state}. An equivalent mutant agreed with the reference at so many points of the domains:"
    return "\n".join([_killed("op", {op["op"]: op for op in found["ops"]}), "", told, "", *reasons])


def _killed(what: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a table of the mutants of ops or kernels, and their sums."""
    rows = []
    for name, one in found.items():
        checks = ", ".join(f"{check} {n}" for check, n in one["killed"].items())
        killed = sum(one["killed"].values())
        rows.append((name, one["mutants"], killed, len(one["equivalent"]), len(one["survived"]), checks))
    totals = [sum(int(row[i]) for row in rows) for i in range(1, 5)]
    rows.append(("**all**", *totals, ""))
    return table((what, "mutants", "killed", "equivalent", "survived", "by which check"), rows)


def mutants_source() -> str:
    """Return the last stored output of `python -m autosel.testing.mutants --source --json`."""
    found = _stored("mutants-source")
    reasons = dict.fromkeys((name, why) for k in found["kernels"] for name, why in k["equivalent"].items())
    same, refused = (sum(k[what] for k in found["kernels"]) for what in ("same", "refused"))
    from autosel.testing.mutants.source import KERNELS

    state = _state(found["kernels"], found.get("seed", 0))
    told = (
        f"{state}; on {found['isa']}; {len(found['kernels'])} of {len(KERNELS)} kernels. Not counted: "
        f"{refused} changes that do not compile, {same} that compile to the same machine code. Equivalent:"
    )
    lines = [f"- `{name.partition(' | ')[0]}`, {name.partition(' | ')[2]}: {why}" for name, why in reasons]
    killed = _killed("kernel", {code(k["kernel"]): k for k in found["kernels"]})
    return "\n".join([killed, "", told, "", *lines])


def mutants_reverse() -> str:
    """Return the last stored output of `python -m autosel.testing.mutants --reverse --json`."""
    found = _stored("mutants-reverse")
    rows = []
    for op in found["ops"]:
        for name, survivor in op["survivors"].items():
            rows.append((op["op"], f"`{name}`", survivor or f"none: {op['redundant'][name] or 'not explained'}"))
    cases = sum(op["cases"] for op in found["ops"])
    alone = [f"{op['op']}: {name}" for op in found["ops"] for name in op["hand_made"]]
    state = _state(found["ops"], found.get("seed", 0))
    told = f"{state}. {len(alone)} of {cases} hand-made cases alone kill some mutant"
    head = ("op", "domain removed", "a mutant that survives then")
    return "\n".join([table(head, rows), "", f"{told}: {'; '.join(alone)}." if alone else f"{told}."])


def regret() -> str:
    """Return the stored tables of `benchmarks/bench_regret.py --write` and `./run gpu --keep`, one per device."""
    from benchmarks.bench_regret import kept, markdown

    found = kept(ROOT / "benchmarks" / "results")
    return "\n\n".join(map(markdown, found)) or "No results of `benchmarks/bench_regret.py --write` are stored yet."


def ran_on() -> str:
    """Return the compile targets of each family of GPU sources, then each source with its checks without a GPU and its
    result in `./run gpu`."""
    right = _parities()
    met: dict[str, set[str]] = {}
    for device, name, _ in _outcomes():
        met.setdefault(name, set()).add(device)
    rows = []
    for path in gpu_sources():
        name, checked = f"{path.parent.name}:{path.stem}", _checked_by(path.parent.name, path.stem)
        if checked:
            passed, failed = right.get(name, set()), met.get(name, set()) - right.get(name, set())
            told = [f"{word} on {', '.join(sorted(on))}" for word, on in (("passed", passed), ("failed", failed)) if on]
            rows.append((code(f"{path.parent.name}/{path.name}"), checked, "; ".join(told) or NEVER_RAN))
    return f"{_compiled_for()}\n\n{table(('kernel', 'checked without a GPU', 'parity on a GPU'), rows)}"


def _compiled_for() -> str:
    """Return the compile targets of the tests in tests/compile/."""
    from tests.compile import targets

    known = "known devices"
    rows = [
        ("`cuda/*.cu`", targets.CUDA, "all targets of a build"),
        ("`triton/*.py`", targets.of_known_devices(), known),
    ]
    for path in (p for p in gpu_sources() if p.parent.name == "cutlass"):
        rows.append((code(f"cutlass/{path.name}"), targets.of_cutlass(path.stem), f"{known} that it supports"))
    shown = [(name, ", ".join(f"{a}.{b}" for a, b in capabilities), which) for name, capabilities, which in rows]
    return table(("kernels", "compiled for compute capability", "selection"), shown)


def _checked_by(folder: str, name: str) -> str:
    """Return the checks of a source by the tests in tests/compile/; "" for a file that is not a kernel."""
    from tests.compile import targets

    if folder == "triton":
        from autosel.candidates.registry import own_candidates

        kernels = {getattr(c, "source", "") for c in own_candidates() if c.backend == "TRITON"}
        return "compiled; interpreted; PTX run" if name in kernels else ""
    told = []
    for what, pattern in (("compiled", "test_machine_code*.py"), ("emulated", "test_emulated_*.py")):
        texts = [p.read_text() for p in (ROOT / "tests" / "compile").glob(pattern)]
        if any(f'"{name}"' in text or f"cuda/{name}.cu" in text for text in texts):
            told.append(what)
    return "; ".join([*told, *(["PTX run"] if name in targets.run_as_ptx() else [])])


def _parities() -> dict[str, set[str]]:
    """Return, for each candidate, the GPUs on which all its units of `./run gpu` passed, from the committed results."""
    failed: dict[str, set[str]] = {}
    passed: dict[str, set[str]] = {}
    for device, name, right in _outcomes():
        (passed if right else failed).setdefault(name, set()).add(device)
    return {name: devices - failed.get(name, set()) for name, devices in passed.items()}


def _outcomes() -> Iterator[tuple[str, str, bool]]:
    """Yield (GPU, candidate, passed) of every proof.

    The whole step and the probes are not candidates of an op: the step passes by its logits under the sanitizers, the
    probes by the rates that they measured.
    """
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/*.json")):
        if path.stem not in ("parity", "sanitizer", "fingerprint"):
            continue
        record = json.loads(path.read_text())
        device = record["device"]
        if device["kind"] != "cuda":
            continue
        for unit, found in record["units"].items():
            words = unit.split(" ")
            if path.stem == "parity" and found.get("outcome") in ("passed", "failed"):
                yield device["name"], words[1].partition("@")[0], found["outcome"] == "passed"
            elif path.stem == "sanitizer" and words[1] == "step" and found.get("cases") != 0:
                yield device["name"], words[2], found.get("outcome") == "clean"
            elif path.stem == "fingerprint" and unit == "take":
                yield device["name"], "cuda:probes", bool(found["ok"])


def silicon() -> str:
    """Return goals and results of every GPU with committed results; without any, the goals."""
    from benchmarks.gpu import goals
    from benchmarks.gpu.kept import RunFolder
    from benchmarks.gpu.stages import NAMES

    parts = []
    for path in sorted((ROOT / "benchmarks" / "results").glob("*/fingerprint.json")):
        records = {record.stage: record for record in RunFolder(path.parent).records(NAMES)}
        device = records["fingerprint"].device
        if device["kind"] != "cuda":
            continue
        gaps = path.with_name("gaps.json")
        reasons = json.loads(gaps.read_text()) if gaps.is_file() else {}
        shas = sorted({r.git_sha[:12] for r in records.values() if r.git_sha})
        told = f"{device['name']}, {records['fingerprint'].started[:10]}, commit {', '.join(shas)}"
        parts += [f"## {device['name']}", told, table(goals.COLUMNS, list(goals.lines(records, reasons)))]
    if parts:
        return "\n\n".join(parts)
    nothing = "No results of `./run gpu` on a GPU are committed yet. These are the goals."
    return "\n\n".join([nothing, table(goals.COLUMNS, list(goals.lines({}, {})))])


def gpu_stages() -> str:
    """Return the description of each stage of `./run gpu`, from its docstring."""
    from benchmarks.gpu.stages import STAGES

    rows = []
    for name, module in STAGES.items():
        words = prose(import_module(module).__doc__).split(": ", 1)[1]
        rows.append((code(name), words.replace("\n", " ")))
    return table(("stage", "task"), rows)


def libraries() -> str:
    """Return the candidates of each library, by op."""
    from autosel.candidates.libraries.base import LibraryKernel, spelled
    from autosel.candidates.registry import own_candidates

    kernels = [c for c in own_candidates() if isinstance(c, LibraryKernel)]
    rows = []
    for name in sorted({k.library.distribution for k in kernels}):
        own = [k for k in kernels if k.library.distribution == name]
        least = spelled(min(k.library.least_version for k in own))
        renamed = own[0].library.renamed
        by_op = {k.op: [code(c.name) for c in own if c.op == k.op] for k in own}
        names = f"{code(name)}, {code(renamed)}" if renamed else code(name)
        rows.append((names, least, "; ".join(f"{op}: {', '.join(found)}" for op, found in by_op.items())))
    return table(("package", "minimum version", "candidates, by op"), rows)


def gpu_help() -> str:
    """Return the options in `./run gpu --help`."""
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "__main__.py"), "--help"]
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    return fence("options:" + said.partition("options:")[2].rstrip())


def certificate_fields() -> str:
    """Return the certificate's fields under the headings of its source, then the types of their values."""
    from autosel.certify import certificate, slo, statistics

    parts = []
    kinds = (certificate.Measured, certificate.Derived, certificate.Certificate)
    groups = [group for kind in kinds for group in _commented_fields(kind)]
    declared = [name for _, rows in groups for name, _, _ in rows]
    for heading, rows in groups:
        last = []  # where a later class narrows a field's type
        for row in rows:
            declared.remove(row[0])
            last += [] if row[0] in declared else [row]
        parts += [f"**{heading[0].upper()}{heading[1:]}**", table(("field", "type", "meaning"), last)]
    inside = (*(getattr(certificate, n) for n in _INSIDE), slo.Judged, statistics.Interval)
    rows = []
    for kind in inside:
        fields = [(name, text) for _, group in _commented_fields(kind) for name, _, text in group]
        said = "; ".join(f"{name}: {text}" if text else name for name, text in fields)
        rows.append((code(kind.__name__), " ".join(prose(kind.__doc__).split()), said))
    return "\n\n".join([*parts, "**Types of the values**", table(("type", "meaning", "fields"), rows)])


_INSIDE = (
    "Latency", "Gaps", "Layers", "Shape", "Prompt", "ArmProof", "RunnerUp", "OpFigures", "FormTime", "Samples",
    "Verification", "Paid", "Cost", "Signature",
)  # fmt: skip


def _commented_fields(kind: Any) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return [(heading, [(field, type, comment)])] of a dataclass. A heading is a comment on a separate line."""
    found: list[tuple[str, list[tuple[str, str, str]]]] = []
    for line in inspect.getsource(kind).splitlines():
        heading = re.fullmatch(r" {4}# (.+)", line)
        field = re.fullmatch(r" {4}(\w+): ([^=#]+?)(?: = [^#]+?)?(?:  # (.+))?", line)
        if heading:
            found.append((heading[1], []))
        elif field:
            found = found or [("", [])]
            found[-1][1].append((code(field[1]), code(field[2]), field[3] or ""))
    return found


def transcript(name: str) -> str:
    """Return the recorded output of a command, without its lines in CUTS."""
    path = TRANSCRIPTS / f"{name}.txt"
    text = path.read_text() if path.is_file() else f"$ {COMMANDS[name]}\n(not recorded yet)"
    for pattern in CUTS.get(name, ()):
        text = re.sub(pattern, "...\n", text, flags=re.MULTILINE)
    return fence(re.sub(r"(?:\.\.\.\n)+", "...\n", text))


def record(arguments: Sequence[str]) -> None:
    """Run documented commands in a terminal of 80 columns, and store the final screen."""
    wanted = {arguments[0]: shlex.join(arguments[1:])} if len(arguments) > 1 else {n: COMMANDS[n] for n in arguments}
    TRANSCRIPTS.mkdir(exist_ok=True)
    for name, command in (wanted or COMMANDS).items():
        _say(f"recording {name}: {command}")
        text = screen(_on_terminal(shlex.split(command)))
        (TRANSCRIPTS / f"{name}.txt").write_text(f"$ {command}\n{text}\n")


def _on_terminal(command: Sequence[str]) -> str:
    """Return all that a command writes to a terminal, run in the user's default home."""
    import pty

    written = bytearray()

    def read(descriptor: int) -> bytes:
        data = os.read(descriptor, 1 << 16)
        written.extend(data)
        return data

    os.environ.pop("AUTOSEL_HOME", None)
    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "40", "NO_COLOR": "1"}
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        pty.spawn(list(command), read)
    finally:
        os.chdir(here)
    return written.decode(errors="replace")


def screen(written: str) -> str:
    """Return the final screen, without colours and overwritten lines, with `~` for the home folder."""
    lines = []
    for raw in written.replace("\r\n", "\n").split("\n"):
        wiped = "\r" in raw or "\x1b[2K" in raw
        left = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.rsplit("\x1b[2K", 1)[-1].rsplit("\r", 1)[-1]).rstrip()
        if left or not wiped:
            lines.append(left.replace(str(Path.home()), "~"))
    return "\n".join(lines).strip("\n")


BLOCKS: Mapping[str, Callable[..., str]] = {
    "cli": cli,
    "settings": settings_table,
    "passed-names": passed_names,
    "errors": errors_table,
    "packages": packages,
    "story": story,
    "choosing": choosing,
    "ledger-tables": ledger_tables,
    "constants": constants,
    "gpu-rates": gpu_rates,
    "guard": guard,
    "crossings": crossings,
    "cpu-formulas": cpu_formulas,
    "gpu-formulas": gpu_formulas,
    "gpu-words": gpu_words,
    "gpu-facts": gpu_facts,
    "devices": devices,
    "device-sources": device_sources,
    "ops": op_table,
    "cases": cases,
    "case-counts": case_counts,
    "kernel": rmsnorm_kernel,
    "figures": figures,
    "mutants": mutants,
    "mutants-source": mutants_source,
    "mutants-reverse": mutants_reverse,
    "regret": regret,
    "ran-on": ran_on,
    "silicon": silicon,
    "certificate-fields": certificate_fields,
    "gpu-stages": gpu_stages,
    "libraries": libraries,
    "gpu-help": gpu_help,
    "transcript": transcript,
}

if __name__ == "__main__":
    sys.exit(main())
