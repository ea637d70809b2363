"""Estimate the duration of a run from the device's rates, as a start value for the ETA.

    a step    bytes that must cross the memory bus / read rate, and a factor for eager PyTorch
    prefill   arithmetic of the prompt / peak rate, for each arm

Only the displayed ETA depends on it, and measured times correct it.
"""

from __future__ import annotations

from autosel.certify.issue import peak_flops, read_rate
from autosel.decode.account import OP_ROUNDS
from autosel.decode.chain import ROUNDS
from autosel.decode.quality import MOST_TOKENS
from autosel.decode.run import FEWEST_TOKENS, FORMS, HALVES, Plan, Text
from autosel.models.cost import bytes_per_step, flops_per_step
from autosel.values import Fingerprint

# Measured on two cores with llama-1b and 4 layers of llama-8b.
OURS, EAGER = 1.3, 2.6  # step time over its bytes at the read rate
MATRIX = 0.6  # share of the peak arithmetic rate in a prompt's products
LOADED_BYTES_PER_S = 1.5e9  # for weights drawn or read
BETWEEN_S = 0.03  # between the arms of a pair: the memory probe, and the wait until the other arm's threads sleep
UNKNOWN = 1e10, 1e11  # bytes/s and FLOP/s assumed for an unmeasured device


def forecast(
    plan: Plan, fp: Fingerprint, text: Text | None = None, *, loads: bool = True, compared: bool = False
) -> dict[str, float]:
    """Return the seconds of each stage by its name in progress, in order; `loads` includes the weights, `compared` the
    original that the text is also scored against.
    """
    shape, rate = plan.shape, read_rate(fp) or UNKNOWN[0]
    middle = plan.seq + plan.iters // 2 if plan.advance else plan.seq
    step_s = bytes_per_step(shape, plan.dtype, plan.batch, middle) / rate
    arms = 2 if plan.baseline else 1
    pair_s = (OURS + (EAGER if plan.baseline else 0.0)) * step_s
    races = (len(HALVES) + 1) * len(FORMS) * (ROUNDS + 1)
    against = min(len(text.tokens), FEWEST_TOKENS) if text is not None and compared else 0
    found = {
        "original": 2 * prompt_s(plan, against, fp) if against else 0.0,
        "weights": shape.weight_bytes(plan.dtype) / LOADED_BYTES_PER_S if loads else 0.0,
        "prefill": 0.0 if plan.prompt == "synthetic" else arms * prompt_s(plan, plan.batch * (plan.seq - 1), fp),
        "chain": races * OURS * step_s if plan.prealloc and not plan.speculate else 0.0,
        "warmup": plan.warmup * pair_s,
        "decode": plan.iters * (pair_s + BETWEEN_S),
        "ops": OP_ROUNDS * OURS * step_s,
    }
    if text is not None:
        tokens = min(len(text.tokens), MOST_TOKENS)
        found["quality"] = (tokens + against) / plan.batch * OURS * step_s + 2 * prompt_s(plan, tokens, fp)
    return {stage: seconds for stage, seconds in found.items() if seconds}


def prompt_s(plan: Plan, tokens: int, fp: Fingerprint) -> float:
    """Return the seconds of one pass of the tokens through the layers, without the output head."""
    shape = plan.shape
    head_flops = 2 * shape.V * shape.d
    each = flops_per_step(shape, 1, max(1, tokens // plan.batch // 2)) - head_flops
    return tokens * each / (MATRIX * (peak_flops(fp, plan.dtype) or UNKNOWN[1]))
