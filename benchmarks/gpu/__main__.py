"""Run every check that needs the real device, with one command: `./run gpu`.

    fingerprint   identify the device and measure its rates
    parity        check every candidate against the float64 reference, on hostile inputs and at full size
    sanitizer     run every kernel of autosel under the vendor's checkers and compare its results
    graph         capture every candidate and a whole step in CUDA graphs; replay them on changed inputs
    containment   illegal access, endless kernel, exhausted memory: check that the next candidate is unaffected
    bench         time every candidate of every op with cold operands, as a fraction of the read rate
    regret        compare the closed forms with an exhaustive sweep of the knobs
    tune          run `autosel tune` on the workloads of the decodes
    decode        run `autosel run`: certified decodes of the models
    sweep         run `autosel sweep`: the model over contexts and over batches
    engines       serve the decisions inside the installed engines

A stage is a list of units. Each unit runs in the stage's child process with a deadline, and its result is stored as
soon as it ends. So an interrupted run continues where it stopped, and a unit that crashes its process loses only its
own result. The exit code is 1 if a unit failed or was left undone.
"""

# ruff: noqa: E402  (the checkout first: this file is run by path)

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from autosel.errors import AutoselError, UsageError
from benchmarks.gpu import child
from benchmarks.gpu.keeping import ROOT as CHECKOUT
from benchmarks.gpu.keeping import keep
from benchmarks.gpu.kept import RunFolder
from benchmarks.gpu.runner import run_stage
from benchmarks.gpu.scope import Scope, refuse_absent_device, scope_of
from benchmarks.gpu.stages import NAMES, STAGES
from benchmarks.gpu.summary import write_summary


def main(arguments: list[str]) -> int:
    """Run the command line as a process.

    SIGTERM is handled like Ctrl-C from here on, so that a scheduler's stop keeps the results measured so far.
    """
    options = parsed(arguments)
    if options.serve:
        return child.serve(options.serve, Scope.from_text(options.scope))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(options)


def run(options: argparse.Namespace) -> int:
    def wanted(unit: str) -> bool:
        return not options.unit or any(word in unit for word in options.unit)

    try:
        refuse_absent_device(options.device)
        scope = scope_of(options)
        kept = RunFolder(Path(scope.out))
        for stage in chosen(options.stage, options.start):
            again = {"fresh": options.fresh, "retry": options.retry}
            run_stage(stage, scope, kept, wanted, budget_s=options.budget, unit_s=options.unit_seconds, **again)
        text, clean = write_summary(kept, wanted)
        for line in keep(kept, Path(options.keep)) if options.keep else ():
            print(f"kept {line}", file=sys.stderr)
    except AutoselError as error:
        print(f"error: {error}".replace("\n", "\n  "), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    print(text)
    return 0 if clean else 1


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./run gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", metavar="DEVICE", help="cuda, cuda:1, or cpu for a dry run")
    parser.add_argument("--out", default="", metavar="DIR", help="folder for results  [default: ./gpu-<device>]")
    parser.add_argument("--stage", action="append", default=[], choices=NAMES, help="run only this stage; repeatable")
    parser.add_argument(
        "--unit", action="append", default=[], metavar="WORD", help="run only units with WORD in their name"
    )
    parser.add_argument("--from", dest="start", default="", choices=NAMES, help="run this stage and all later ones")
    parser.add_argument("--budget", type=seconds, default=0.0, metavar="TIME", help="a stage's limit: 90s, 5m, 1h")
    parser.add_argument(
        "--unit-seconds", type=seconds, default=0.0, metavar="TIME", help="deadline of one unit  [default: the stage's]"
    )
    parser.add_argument("--fresh", action="store_true", help="ignore stored results and measure again")
    parser.add_argument("--retry", action="store_true", help="rerun units that failed")
    parser.add_argument(
        "--keep",
        nargs="?",
        const=str(CHECKOUT),
        default="",
        metavar="CHECKOUT",
        help="write benchmarks/results/<device>/ and fingerprints/ there  [default: this checkout]",
    )
    parser.add_argument("--model", default="", metavar="NAME|DIR", help="[default: llama-8b; on the cpu llama-1b]")
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="only this op; repeatable")
    parser.add_argument(
        "--dtype", action="append", default=[], choices=("bf16", "fp16", "fp32"), help="of parity and sanitizer"
    )
    parser.add_argument("--seq", type=int, default=0, metavar="N", help="context  [default: 8192; on the cpu 1024]")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="decoder layers  [default: all; cpu 2]")
    parser.add_argument("--contexts", default="", metavar="A:B", help="contexts of the sweep  [default: 256:131072]")
    parser.add_argument("--batches", default="", metavar="A:B", help="batches of the sweep  [default: 1:512]")
    parser.add_argument("--serve", default="", choices=("", *NAMES), help=argparse.SUPPRESS)
    parser.add_argument("--scope", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def seconds(text: str) -> float:
    """Parse `90s`, `5m`, `1h` or a plain number; return seconds."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        found = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration; write 90s, 5m or 1h")
    return found


def chosen(named: list[str], start: str) -> list[str]:
    """Return the stages to run, in order. Raises UsageError."""
    if named and start:
        raise UsageError("--stage with --from", why="both select stages")
    if start:
        return list(NAMES[NAMES.index(start) :])
    return [name for name in NAMES if name in named] if named else list(NAMES)


assert tuple(STAGES) == NAMES

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
