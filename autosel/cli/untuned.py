"""Tell before a measurement which ops of the step are not tuned, and the command that tunes them."""

from __future__ import annotations

from collections.abc import Collection

import click

from autosel import settings
from autosel.cli.best import serving
from autosel.cli.options import given_options
from autosel.cli.output import paragraph
from autosel.decode.run import WHOLE, Plan
from autosel.models.workloads import workloads
from autosel.values import WHOLE_STEP

SAME = ("model", "dtype", "weight_format", "batch", "seq", "device")  # options that `run` and `tune` share
SEQ = 8192  # the default of `tune`
MOST_OPS = 4


def show_untuned(ctx: click.Context, plan: Plan) -> None:
    """Print on stderr what is not tuned for this plan, with the command; nothing if all ops are decided, or the step
    is decided to run whole.

    With AUTOSEL_DISABLE the baseline runs anyway.
    """
    from autosel.decode.question import form_of

    if settings.get("disable"):
        return
    fresh = [n.decision for n in serving(None, plan.device) if not n.stale]
    decided = {d.bucket for d in fresh if d.op != WHOLE_STEP or form_of(d.arm.candidate) in WHOLE}
    if told := untuned_text(plan, decided):
        click.echo(paragraph(f"note: {told}", hang="  "), err=True)
        click.echo(f"  tune first:  {tune_command_of(ctx, plan)}", err=True)


def untuned_text(plan: Plan, decided: Collection[str]) -> str:
    """Return which ops of the step have no decision in `decided`, the buckets that are decided; "" if all have one, or
    the whole step has."""
    from autosel.decode.question import workload_of

    if plan.step == "auto" and workload_of(plan.shape, plan.dtype, plan.batch, plan.seq).bucket in decided:
        return ""
    step = workloads(plan.shape, batch=plan.batch, context=plan.seq, dtype=plan.dtype)
    asked = [w for w in step if w.op != "attn" or w["L"] == plan.seq]  # a step runs attention at one length
    left = [w for w in asked if w.bucket not in decided]
    if not left:
        return ""
    what = f"{plan.model.name}, batch {plan.batch}, context {plan.seq}"
    if len(left) == len(asked):
        return f"nothing is tuned for {what}: PyTorch's kernels run where no decision is stored"
    ops = list(dict.fromkeys(w.op for w in left))
    names = ", ".join(ops[:MOST_OPS]) + (" ..." if len(ops) > MOST_OPS else "")
    return f"{len(left)} of {len(asked)} ops are not tuned for {what} ({names}): PyTorch's kernels run for them"


def tune_command_of(ctx: click.Context, plan: Plan) -> str:
    """Return the `tune` command for the options of a `run`."""
    words = given_options(ctx, SAME)
    if "--model" not in words:
        words = ["--model", plan.model.name, *words]
    if plan.batch > 1 and "--batch" not in words:  # --small-batch
        words += ["--batch", str(plan.batch)]
    if "--seq" not in words and plan.seq != SEQ:
        words += ["--seq", str(plan.seq)]
    return " ".join([settings.spelling(), "tune", *words])
