"""Generate a few greedy tokens in an engine with random weights: `python served.py SCOPE ENGINE`.

The last line of the output is JSON:

    {"tokens": [[...] a prompt], "tokens_per_s": x, "served": [ops that autosel's decisions served]}
        `served` is null if the engine keeps its model in another process
    {"error_share": x, "served": [...]}                     for FlashInfer, a library: its error as a share of the bound

AUTOSEL_DISABLE=1 runs the engine without autosel. Status: no engine has been run on a GPU yet; transformers also runs
on a CPU.
"""

# ruff: noqa: E402  (the checkout first: this file is run by path)

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from autosel import models, settings
from benchmarks import hugging_face
from benchmarks.gpu.scope import Scope

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 32, 16


def main(scope: Scope, engine: str) -> int:
    print(json.dumps(ENGINES[engine](scope)))
    return 0


def vllm(scope: Scope) -> dict[str, Any]:
    """Run vLLM in this process without its compiler, so that autosel's norms and activations are called."""
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        backend = {} if settings.get("disable") or not scope.on_gpu else {"attention_backend": "CUSTOM"}
        asked = LLM(
            model=checkpoint(scope, Path(folder)),
            load_format="dummy",
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=scope.seq,
            seed=1,
            **backend,
        )
        how = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": ids} for ids in prompts(scope)]

        def answer() -> list[list[int]]:
            return [list(out.outputs[0].token_ids) for out in asked.generate(given, how)]

        return timed(answer)


def sglang(scope: Scope) -> dict[str, Any]:
    from sglang import Engine

    with tempfile.TemporaryDirectory() as folder:
        ours = {} if settings.get("disable") or not scope.on_gpu else {"attention_backend": "autosel", "page_size": 16}
        asked = Engine(
            model_path=checkpoint(scope, Path(folder)),
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            context_length=scope.seq,
            random_seed=1,
            **ours,
        )
        how = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

        def answer() -> list[list[int]]:
            return [out["output_ids"] for out in asked.generate(input_ids=prompts(scope), sampling_params=how)]

        try:
            return timed(answer) | {"served": None}  # its model is in another process
        finally:
            asked.shutdown()


def flashinfer(scope: Scope) -> dict[str, Any]:
    """Check FlashInfer's silu_and_mul, which autosel replaces, against the reference."""
    import flashinfer
    import torch

    from autosel.integrations import flashinfer_apply
    from autosel.ops import find

    op = find("swiglu")
    w = next(n.workload for n in scope.workloads(batches=(1,)) if n.workload.op == "swiglu")
    if not settings.get("disable"):
        flashinfer_apply.enable(rms_eps=1e-6)
    inputs = op.inputs(w, 1)
    both = torch.cat([inputs["gate"], inputs["up"]], dim=-1).to(scope.device)
    got = flashinfer.activation.silu_and_mul(both).cpu()
    reference = op.reference(inputs)
    share = (got.double() - reference[0]).abs() / op.bound(inputs, reference)[0]
    return {"error_share": float(share.max()), "served": served()}


def transformers(scope: Scope) -> dict[str, Any]:
    """Run `generate` of the model's own class, one prompt after another, with or without `autosel.patch`."""
    import torch

    import autosel
    from autosel.decode.run import Plan
    from autosel.decode.weights import load_weights

    shape, room = models.load(scope.model), PROMPT_TOKENS + NEW_TOKENS
    weights = load_weights(Plan(model=shape, layers=scope.layers, seq=room, device=scope.device, seed=1))
    with torch.inference_mode():
        asked = hugging_face.model_of(weights).to(scope.device)  # its frequencies are computed on the CPU
        if not settings.get("disable"):
            autosel.patch(asked)
        how = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}

        def answer() -> list[list[int]]:
            given = [torch.tensor([ids], device=scope.device) for ids in prompts(scope)]
            made = [asked.generate(ids, attention_mask=torch.ones_like(ids), **how) for ids in given]
            return [one[0, PROMPT_TOKENS:].tolist() for one in made]

        return timed(answer)


def timed(answer: Callable[[], list[list[int]]]) -> dict[str, Any]:
    answer()
    begin = time.perf_counter()
    tokens = answer()
    rate = sum(map(len, tokens)) / (time.perf_counter() - begin)
    return {"tokens": tokens, "tokens_per_s": round(rate, 1), "served": served()}


def served() -> list[str]:
    """Return the ops that a decision served in this process."""
    import autosel

    return sorted({use.op for use in autosel.uses() if use.calls and use.decision_id is not None})


def prompts(scope: Scope) -> list[list[int]]:
    """Return the token ids, always the same."""
    vocabulary = models.load(scope.model).V
    return [[(7919 * (i + 1) * (j + 1)) % vocabulary for j in range(PROMPT_TOKENS)] for i in range(PROMPTS)]


def checkpoint(scope: Scope, folder: Path) -> str:
    """Return a folder with the model's config.json and no weights."""
    given = Path(scope.model).expanduser()
    if given.is_dir():
        return str(given)
    shape = models.load(scope.model)
    hugging_face.config_of(shape, tied=shape.tied).save_pretrained(folder)
    return str(folder)


ENGINES: dict[str, Callable[[Scope], dict[str, Any]]] = {
    "vllm": vllm,
    "sglang": sglang,
    "flashinfer": flashinfer,
    "transformers": transformers,
}

if __name__ == "__main__":
    sys.exit(main(Scope.from_text(sys.argv[1]), sys.argv[2]))
