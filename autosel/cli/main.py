"""The command line: verbs load on first use, errors have at most three lines, and exit codes have meanings.

Results go to stdout (`--json`: one JSON document, also for an error), progress and logs to stderr. 0 ok, 1 failure, 2
usage, 3 a comparison came out worse, 4 parity failure, 5 too noisy to decide, 6 broken environment, 130 stopped by
Ctrl-C or SIGTERM (docs/errors.md).
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from autosel import settings
from autosel.cli.options import show_examples
from autosel.cli.output import error_json, report
from autosel.errors import AutoselError, EnvironmentFault, Stopped, UsageError, out_of_memory
from autosel.version import __version__
from autosel.workers.environment import torch_fault

# task -> verb -> (module below autosel.cli, its line in the overview); the command object has the verb's name
TASKS: dict[str, dict[str, tuple[str, str]]] = {
    "Measure": {
        "demo": ("demo", "a real model answers with PyTorch and with autosel, certified"),
        "fingerprint": ("fingerprint", "this device's identity and measured rates"),
        "knobs": ("knobs", "every kernel's settings, each with its formula"),
        "tune": ("tune", "prove and race the eligible kernels, decide, keep the evidence"),
        "race": ("race", "prove and time one candidate, also your own"),
        "record": ("record", "run a program and count the workloads it calls"),
    },
    "Decide": {
        "best": ("best", "the kernel that serves an op now"),
        "explain": ("explain", "the reasons: parity, race, effect, limit, history, failures"),
        "decide": ("decide", "by hand: promote a candidate, demote, pin or release a decision"),
    },
    "Models": {
        "quantise": ("quantise", "a checkpoint in int8 or int4, for transformers and vLLM too"),
    },
    "Certify": {
        "run": ("run", "tokens per second of a real decode, certified"),
        "sweep": ("sweep", "the decode over contexts and batches; where winners change"),
        "verify": ("verify", "check a certificate; measure it again; compare two"),
    },
    "Serve": {
        "serve": ("serve", "the daemon: records, tunes when idle, demotes on faults"),
        "status": ("serve", "the daemon, its serving kernels and current tune"),
        "doctor": ("doctor", "check compiler, settings, ledger and plug-ins; suggest fixes"),
    },
    "Fleet": {
        "export": ("transfer", "decisions as a file, a lock to commit, an image, a script"),
        "import": ("transfer", "decisions from an exported file"),
        "db": ("db", "the ledger: place, size, check, backup, restore"),
    },
}
VERBS = {verb: told for verbs in TASKS.values() for verb, told in verbs.items()}
# verbs of earlier versions -> what does the same now
FORMER = {
    "start": "tune",
    "history": "explain --history",
    "promote": "decide OP --promote CANDIDATE",
    "demote": "decide OP --demote",
    "pin": "decide OP --pin",
    "config": "doctor --settings",
    "lock": "export --lock",
    "whatif": "tune with AUTOSEL_HOME=DIR and the other environment's Python, and then explain",
}

EXAMPLES = (
    "tune --model llama-8b --seq 8192",
    "explain attn",
    "race rmsnorm --candidate mykernels:fast_rmsnorm",
)


class Verbs(click.Group):
    """Group of verbs that imports a verb's module only when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = import_module(f"autosel.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            now = FORMER.get(args[0])
            todo = f"use {ctx.command_path} {now}" if now else _nearest(args[0], VERBS)
            raise UsageError(f"no verb {args[0]!r}", todo=todo or f"{ctx.command_path} --help")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, VERBS))
        formatter.write_paragraph()
        for task, verbs in TASKS.items():
            formatter.write_heading(task)
            with formatter.indentation():
                formatter.write_dl([(verb.ljust(width), line) for verb, (_, line) in verbs.items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        show_examples(EXAMPLES, formatter)


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Which kernel should run here, and can you prove it?",
)
@click.version_option(__version__, prog_name="autosel", message="%(prog)s %(version)s")
@click.option("-v", "--verbose", count=True, help="print more (commands that are run); twice: debug")
def cli(verbose: int) -> None:
    wipe = "\r\x1b[2K" if sys.stderr.isatty() and settings.colour() is None else ""  # clears the progress line
    logging.basicConfig(stream=sys.stderr, format=f"{wipe}%(name)s: %(message)s")
    logging.getLogger("autosel").setLevel(_log_level(verbose))  # autosel's logger only: libraries log a lot


def _log_level(verbose: int) -> str:
    if verbose:
        return ("INFO", "DEBUG")[min(verbose, 2) - 1]
    try:
        return str(settings.get("log")).upper()
    except AutoselError:  # a verb that needs a setting reports the error itself; --help and doctor still work
        return "WARNING"


AT_ONCE = (Stopped.exit_code, EnvironmentFault.exit_code)


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    gc.set_threshold(100_000)  # importing PyTorch makes a million objects that stay: a tenth of its time
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks "≥" prints "?" instead of an exception
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is handled like Ctrl-C
    code = run(argv)
    if code in AT_ONCE:  # a thread may still wait for a proof; workers end with this process
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def run(argv: list[str] | None = None) -> int:
    """Run a command line; turn every exception into a message and an exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        result = cli.main(args=arguments, prog_name=settings.spelling(), standalone_mode=False, color=settings.colour())
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        return _failed(_in_our_words(error), arguments)
    except (click.Abort, KeyboardInterrupt):
        return _failed(Stopped("stopped"), arguments)
    except AutoselError as error:
        return _failed(error, arguments)
    except SystemExit:  # click exits like this when the reader of a pipe closes it, as `| head` does
        return 0
    except OSError as error:
        return _failed(_no_room(error), arguments) if error.errno in NO_ROOM else _unexpected(error, arguments)
    except Exception as error:
        return _unexpected(error, arguments)


def _unexpected(error: Exception, arguments: Sequence[str]) -> int:
    """Report an exception that no verb handles: out of memory, an environment without PyTorch, or a bug in autosel."""
    told = out_of_memory(error) or torch_fault()
    return _failed(told, arguments) if told else _our_bug(error, arguments)


def _failed(error: AutoselError, arguments: Sequence[str]) -> int:
    if "--json" in arguments:
        click.echo(json.dumps({"error": error_json(error)}))
    report(error)
    return error.exit_code


def _in_our_words(error: click.ClickException) -> AutoselError:
    """Turn click's error for a wrong command line into a UsageError that names a fix."""
    ctx = getattr(error, "ctx", None)
    todo = f"{ctx.command_path if ctx else settings.spelling()} --help"
    what = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption):
        what = f"no option {error.option_name}"
        todo = _nearest(error.option_name, error.possibilities or ()) or todo
    elif isinstance(error, click.exceptions.NoSuchCommand):
        what = f"no command {error.command_name!r}"
        todo = _nearest(error.command_name, error.possibilities or ()) or todo
    return UsageError(what[:1].lower() + what[1:], todo=todo)


def _nearest(name: str, known: Sequence[str] | dict[str, Any]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else ""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.ENOMEM)


def _no_room(error: OSError) -> AutoselError:
    reason = os.strerror(error.errno or 0)
    if error.errno == errno.ENOMEM:
        return AutoselError(
            f"not enough memory: {reason}",
            todo="use a smaller model, batch or context; all acknowledged results are safe",
        )
    return AutoselError(
        f"cannot write{f' {error.filename}' if error.filename else ''}: {reason}",
        todo="free some space, or set AUTOSEL_HOME (or TMPDIR) to another disk; all acknowledged results are safe",
    )


def _our_bug(error: Exception, arguments: Sequence[str]) -> int:
    text = "".join(traceback.format_exception(error))
    try:
        path = settings.home() / "crash.log"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(f"autosel {__version__}\n{' '.join(arguments)}\n{text}")
        where = f"the details are in {path}"
    except (OSError, AutoselError):
        where = text
    summary = f"{type(error).__name__}: {error}"
    return _failed(AutoselError("this is a bug in autosel", why=summary, todo=where), arguments)


if __name__ == "__main__":
    main()
