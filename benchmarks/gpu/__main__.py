"""Everything that only the device itself can show, with one command: `./run gpu`.

    fingerprint   who the device is, and how fast it was found to be
    parity        every candidate against the float64 reference, on hostile inputs and at full size
    sanitizer     every kernel of ours under the vendor's checkers, while its results are compared
    graph         every candidate captured in a CUDA graph and replayed on changed inputs; a whole step, likewise
    containment   an illegal access, an endless kernel, all memory taken: the next candidate is judged as if alone
    bench         every candidate of every op, operands cold, as a fraction of the read rate
    regret        the closed forms against an exhaustive sweep of the knobs
    profile       the two slowest kernels of ours under Nsight Compute
    tune          `autosel tune` on what the decodes run
    decode        `autosel run`: certified decodes of the models
    sweep         `autosel sweep`: the model over contexts and over batches
    engines       what is decided inside the engines that are installed

A stage is a list of units. Each unit runs in the stage's child process within a deadline, and is written down as soon
as it is done: what was interrupted goes on where it stopped, and a unit that takes its process with it costs itself
alone. Exit code 1: something failed, or was left undone.
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
from benchmarks.gpu.kept import Kept
from benchmarks.gpu.runner import run_stage
from benchmarks.gpu.scope import Scope, refuse_absent_device, scope_of
from benchmarks.gpu.stages import NAMES, STAGES
from benchmarks.gpu.summary import write_summary


def main(arguments: list[str]) -> int:
    """As a process: for good, it takes a scheduler's stop for a Ctrl-C, which keeps what was measured."""
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
        kept = Kept(Path(scope.out))
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
    parser.add_argument("--device", default="cuda", metavar="DEVICE", help="cuda, cuda:1, or cpu: a dry run, for real")
    parser.add_argument("--out", default="", metavar="DIR", help="where results go  [default: ./gpu-<device>]")
    parser.add_argument("--stage", action="append", default=[], choices=NAMES, help="only this; may be repeated")
    parser.add_argument("--unit", action="append", default=[], metavar="WORD", help="only units whose name has it")
    parser.add_argument("--from", dest="start", default="", choices=NAMES, help="this stage and all after it")
    parser.add_argument("--budget", type=seconds, default=0.0, metavar="TIME", help="for each stage: 90s, 5m, 1h")
    parser.add_argument(
        "--unit-seconds", type=seconds, default=0.0, metavar="TIME", help="deadline of one unit  [default: the stage's]"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    parser.add_argument("--retry", action="store_true", help="try again what failed")
    parser.add_argument(
        "--keep",
        nargs="?",
        const=str(CHECKOUT),
        default="",
        metavar="CHECKOUT",
        help="write benchmarks/results/<device>/ and fingerprints/ there  [default: this checkout]",
    )
    parser.add_argument("--model", default="", metavar="NAME|DIR", help="[default: llama-8b; on the cpu llama-1b]")
    parser.add_argument("--op", action="append", default=[], metavar="OP", help="only this op; may be repeated")
    parser.add_argument("--dtype", action="append", default=[], choices=("bf16", "fp16", "fp32"), help="of parity")
    parser.add_argument("--seq", type=int, default=0, metavar="N", help="context  [default: 8192; on the cpu 1024]")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="of the decode run  [default: all; cpu 2]")
    parser.add_argument("--contexts", default="", metavar="A:B", help="of the sweep  [default: 256:131072]")
    parser.add_argument("--batches", default="", metavar="A:B", help="of the sweep  [default: 1:512]")
    parser.add_argument("--serve", default="", choices=("", *NAMES), help=argparse.SUPPRESS)
    parser.add_argument("--scope", default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def seconds(text: str) -> float:
    """`90s`, `5m`, `1h` or a plain number, in seconds."""
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(text[-1:])
    try:
        found = float(text[:-1]) * unit if unit else float(text)
    except ValueError:
        found = -1.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90s, 5m or 1h")
    return found


def chosen(named: list[str], start: str) -> list[str]:
    """The stages to run, in their order. Raises UsageError."""
    if named and start:
        raise UsageError("--stage with --from", why="each says which stages to run")
    if start:
        return list(NAMES[NAMES.index(start) :])
    return [name for name in NAMES if name in named] if named else list(NAMES)


assert tuple(STAGES) == NAMES

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
