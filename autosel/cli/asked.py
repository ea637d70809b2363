"""The parsed command line of `run`: its plan, its files, and what a run needs besides."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autosel import devices, models, settings
from autosel import ledger as ledgers
from autosel.certify import compare, plots, sign, slo, store
from autosel.cli.device import refuse_absent
from autosel.cli.writable import refuse_file, refuse_folder
from autosel.decode.run import AskedStep, Plan, Sampling, Text
from autosel.errors import LedgerError, UsageError

if TYPE_CHECKING:
    from autosel.ledger.store import Ledger

DEFAULT_MODEL = "llama-8b"
DEFAULT_SEQ = 8192
# Options that a rerun needs. Output files, prices and objectives do not affect the measurement.
MEASURED = (
    "model", "weights", "weight_format", "prompt", "dtype", "batch", "seq", "iters", "warmup", "layers", "step",
    "persistent", "weights_layout", "small_batch", "no_prealloc", "paged", "advance", "temperature", "top_k", "top_p",
    "repetition_penalty", "speculate", "device", "seed", "score",
    "original", "accept_quality", "no_baseline",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """The parsed command line. Each property refuses impossible values."""

    ctx: click.Context

    def __getitem__(self, name: str) -> Any:
        return self.ctx.params[name]

    @property
    def model(self) -> str:
        return self["model"] or DEFAULT_MODEL

    @property
    def repro(self) -> str:
        """Return the command that repeats this measurement."""
        words = [settings.spelling(), "run", *(w for p in self.ctx.command.params for w in self._words(p))]
        return shlex.join(words)

    def _words(self, parameter: click.Parameter) -> list[str]:
        """Return an option as command-line words; empty if it has its default.

        A default device other than the CPU is written out, because another machine may have another default.
        """
        name = str(parameter.name)
        value = self.ctx.params.get(name)
        default = parameter.get_default(self.ctx)
        implied = value == default and (name != "device" or default == devices.HOST)
        if name not in MEASURED or value is None or implied:
            return []
        return [parameter.opts[0]] if value is True else [parameter.opts[0], str(value)]

    @property
    def certificates(self) -> Path:
        return self["certify"] or settings.home() / "certificates.jsonl"

    def plan(self) -> Plan:
        """Return the plan of the run. Raises UsageError, UnknownName, BadConfig."""
        refuse_absent(self["device"])
        model = models.stored_as(models.load(self.model), self["weight_format"])
        if self["small_batch"] and self["batch"] != 1:
            raise UsageError(
                "--small-batch and --batch are mutually exclusive", why="each sets the number of sequences in a step"
            )
        if (self["layers"] or 0) > model.layers:
            raise UsageError(f"--layers {self['layers']} is too large", why=f"{model.name} has {model.layers} layers")
        return Plan(
            model=model,
            layers=0 if self["layers"] == model.layers else self["layers"] or 0,
            weights=str(self["weights"] or models.weights_of(self.model)),
            prompt=self["prompt"],
            dtype=self["dtype"] or model.dtype,
            batch=self["small_batch"] or self["batch"],
            seq=self["seq"] or self._longest(model.max_context),
            iters=self["iters"],
            warmup=self["warmup"],
            advance=self["advance"] or bool(self["speculate"]),
            step=self._step(),
            layout=self["weights_layout"],
            cache="paged" if self["paged"] else "contiguous",
            page=self["paged"] or 64,
            prealloc=not self["no_prealloc"],
            small_batch=bool(self["small_batch"]),
            sampling=Sampling(
                temperature=self["temperature"],
                top_k=self["top_k"],
                top_p=self["top_p"],
                repetition_penalty=self["repetition_penalty"],
                seed=self["seed"],
            ),
            speculate=drafted(self["speculate"]),
            device=self["device"],
            seed=self["seed"],
            baseline=not self["no_baseline"],
        )

    def _step(self) -> AskedStep:
        asked: AskedStep = self["step"]
        if self["persistent"] and asked not in ("auto", "whole"):
            raise UsageError(
                f"--persistent and --step {asked} are mutually exclusive",
                why="--persistent is --step whole",
                todo="remove one of them",
            )
        return "whole" if self["persistent"] else asked

    def _longest(self, most: int) -> int:
        """Return DEFAULT_SEQ, or the model's limit minus the tokens that the run adds."""
        advances = self["advance"] or self["speculate"]
        return max(2, min(DEFAULT_SEQ, most - (self["iters"] if advances else 0) - drafted(self["speculate"])))

    def text(self, plan: Plan) -> Text | None:
        """Return the text that --quality scores. Raises UsageError, BadConfig."""
        if self["score"] is None:
            return None
        from autosel.decode.prompt import text_to_score

        return text_to_score(self["score"], plan)

    def objectives(self) -> tuple[slo.Objective, ...]:
        if not self["slo"]:
            return ()
        if self["layers"]:
            raise UsageError(
                "--slo and --layers are mutually exclusive",
                why="objectives are for the whole model",
                todo="remove one of them",
            )
        found = slo.parse(self["slo"])
        if self["prompt"] == "synthetic" and any(o.metric == "ttft" for o in found):
            raise UsageError(
                "--slo ttft and --prompt synthetic are mutually exclusive",
                why="a synthetic prompt is not run",
                todo="use another --prompt, or remove ttft",
            )
        return found

    def key(self) -> Any:
        """Return the signing key, or None. The default key is made on first use."""
        if not self["sign"]:
            if self["key"]:
                raise UsageError("--key needs --sign", todo="add --sign")
            return None
        path = self["key"] or settings.home() / "keys" / "certificates.pem"
        if self["key"] or path.exists():
            return sign.private_key(path)
        made = sign.make_key(path)
        click.echo(f"created the key {path}; its public key is {sign.public_hex(made)}", err=True)
        return made


def drafted(text: str) -> int:
    """Return the number of drafted tokens: `ngram:4` gives 4. Raises UsageError."""
    kind, _, count = text.partition(":")
    if text and (kind != "ngram" or not count.isdigit() or not 1 <= int(count) <= 64):
        raise UsageError(
            f"--speculate {text!r} is invalid",
            why="ngram:K with K from 1 to 64 is expected",
            todo="--speculate ngram:4",
        )
    return int(count) if text else 0


def earlier(asked: Asked) -> Sequence[compare.Figure]:
    """Return the figures of --compare."""
    return compare.read(asked["compare"]) if asked["compare"] is not None else ()


def refuse_unwritable(asked: Asked) -> None:
    """Refuse places that cannot be written and a missing plotting package, before minutes of measuring."""
    for path in (asked["audit_to"], asked["trace_to"], asked["certify"] and Path(os.path.realpath(asked["certify"]))):
        if path is not None:
            refuse_file(path)
    if asked["certify"] is None:
        refuse_folder(asked.certificates.parent)
    if asked["report_to"] is not None:
        if not asked["suite"]:  # a suite's report has no plots
            plots.refuse_without()
        refuse_folder(asked["report_to"])
    store.head(asked.certificates)


@contextlib.contextmanager
def ledger_or_none() -> Iterator[Ledger | None]:
    """Yield the ledger, or None if it cannot be opened: decisions about whole steps are then made for this run only."""
    with contextlib.ExitStack() as stack:
        ledger = None
        try:
            ledger = stack.enter_context(ledgers.open_ledger())
        except LedgerError as error:
            click.echo(f"{error.what}: the form of the step is raced for this run only", err=True)
        yield ledger
