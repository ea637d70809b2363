"""The command line: verbs load on first use, errors speak in three lines, exit codes mean something.

Results go to stdout (`--json`: one JSON document), progress and logs to stderr. 0 ok, 1 failure, 2 usage,
3 regression, 4 parity failure, 5 too noisy to decide.
"""

from __future__ import annotations

import json
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from autosel import __version__, settings
from autosel.errors import AutoselError

# verb -> (module below autosel.cli, one line for the overview); the command object has the verb's name, "-" as "_"
VERBS: dict[str, tuple[str, str]] = {
    "start": ("start", "fingerprint, tune llama-8b, show the decisions"),
    "fingerprint": ("fingerprint", "who this device is, and how fast it was measured to be"),
    "knobs": ("knobs", "every kernel's settings, each with the formula that gave it"),
    "tune": ("tune", "race what is eligible, prove it right, decide, and keep the evidence"),
    "best": ("best", "what serves an op now"),
    "explain": ("explain", "why: parity, race, effect, tail, limit, knobs, how to reproduce"),
    "history": ("history", "every decision ever made, newest first"),
    "promote": ("decide", "serve a candidate that passed parity, by your word"),
    "demote": ("decide", "stop serving a decision; the baseline takes over"),
    "pin": ("decide", "serve this candidate whatever later races say"),
    "race": ("race", "prove and time one candidate, yours included, against the baseline"),
    "doctor": ("doctor", "check compiler, noise, ledger and caches; say what to do"),
    "export": ("transfer", "decisions with their evidence, as one file"),
    "import": ("transfer", "decisions from such a file"),
    "config": ("config", "every setting, its value and where it came from"),
    "db": ("db", "the ledger's file: where, how large, check, backup, upgrade"),
}

EXAMPLES = """
\b
Examples:
  {me} fingerprint
  {me} tune --model llama-8b --seq 8192
  {me} explain attn
  {me} race rmsnorm --candidate mykernels:fast_rmsnorm
"""


class Verbs(click.Group):
    """Resolves a verb by importing its module only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = import_module(f"autosel.cli.{VERBS[cmd_name][0]}")
        command: click.Command = getattr(module, f"{cmd_name.replace('-', '_')}_command")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        from difflib import get_close_matches

        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = get_close_matches(args[0], VERBS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" {settings.spelling()} --help lists them."
            raise click.UsageError(f"no verb '{args[0]}'.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


@click.group(
    cls=Verbs,
    invoke_without_command=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="Which kernel should run here, and can you prove it?\n" + EXAMPLES.format(me=settings.spelling()),
)
@click.version_option(__version__, prog_name="autosel")
@click.option("-v", "--verbose", count=True, help="say more (commands run, cases checked); twice: debug")
@click.pass_context
def cli(ctx: click.Context, verbose: int) -> None:
    import logging

    level = ("warning", "info", "debug")[min(verbose, 2)] if verbose else settings.get("log")
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format="%(name)s: %(message)s")
    ctx.obj = {"verbose": verbose}


def main(argv: list[str] | None = None) -> None:
    """Run, and turn whatever is raised into words and an exit code."""
    sys.exit(run(argv))


def run(argv: list[str] | None = None) -> int:
    try:
        result = cli.main(args=argv, prog_name=settings.spelling(), standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        return 130
    except AutoselError as error:
        return _report(error, argv)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except Exception as error:
        return _our_bug(error)


def _report(error: AutoselError, argv: list[str] | None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    if "--json" in arguments:
        document = {"error": {"what": error.what, "why": error.why, "todo": error.todo, "exit_code": error.exit_code}}
        click.echo(json.dumps(document))
    click.echo(click.style("error: ", fg="red", bold=True) + error.what, err=True)
    for line in (*error.why.splitlines(), *error.todo.splitlines()):
        click.echo(f"  {line}", err=True)
    return error.exit_code


def _our_bug(error: Exception) -> int:
    text = "".join(traceback.format_exception(error))
    where = ""
    try:
        path = Path(settings.home()) / "crash.log"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(f"autosel {__version__}\n{' '.join(sys.argv)}\n{text}")
        where = f"\n  the details are in {path}"
    except (OSError, AutoselError):
        where = "\n" + text
    click.echo(f"error: this is a bug in autosel: {type(error).__name__}: {error}{where}", err=True)
    return 1


if __name__ == "__main__":
    main()
