"""Run decode steps of tiny models, and store digests of logits and cache, by instruction set and libraries.

    python -m tests.steps         record them for this machine in tests/stored/steps/<instruction set>.json

Weights and tokens come from a closed form in integers, so that every machine has the same ones. Digests are compared if
instruction set, PyTorch and compiler are equal to a record's; logits are compared with it by value on every machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from autosel import dispatch, fingerprint, models
from autosel.candidates import registry
from autosel.candidates.load import load
from autosel.decode.cache import Cache, make_cache
from autosel.decode.eager import Eager
from autosel.decode.generate import prefill
from autosel.decode.model import Decoder
from autosel.decode.reference import Reference
from autosel.decode.run import Plan
from autosel.decode.step import Place, write_step
from autosel.decode.team import write_team
from autosel.decode.weights import load_weights
from autosel.dispatch.resolve import Resolution
from autosel.json_rows import in_rows
from autosel.native.compile import compile_source
from autosel.native.isa import best_isa
from autosel.ops.one_thread import one_thread
from autosel.values import Accepted, DTypeName, Fingerprint, NativeRecipe, Workload

RECORDS = Path(__file__).parent / "stored" / "steps"
FAMILIES = ("llama", "qwen3", "gemma3")
DTYPES: tuple[DTypeName, ...] = ("bf16", "fp32")
ARMS = ("torch", "kernels", "team of 1", "team of 5")
PROMPTS = (29, 17)  # tokens: one prompt past Gemma's window, and one that reaches it while decoding
STEPS, ROOM, VOCABULARY = 8, 64, 61
WIDTH, HEADS, KV_HEADS, INNER, WINDOW = 64, 4, 2, 96, 24
# "team of 5": more threads than KV heads, so that the keys of one head fall to several and are merged
HEAD = {"llama": 16, "qwen3": 32, "gemma3": 32}
LAYERS = {"llama": 3, "qwen3": 3, "gemma3": 7}
ARCHITECTURE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma3": "Gemma3ForCausalLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Hold one arm's results: logits after the prompt and after each step, and the cache at the end."""

    logits: tuple[Tensor, ...]  # [B, V]
    cache: str  # digest

    def record(self) -> dict[str, Any]:
        return {"logits": [digest(x) for x in self.logits], "cache": self.cache}


def digest(*tensors: Tensor) -> str:
    """Return sixteen hex digits of the tensors' bytes."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        hasher.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def names() -> list[str]:
    return [f"{family} {dtype} batch {rows}" for family in FAMILIES for dtype in DTYPES for rows in (1, 2)]


def here() -> dict[str, str]:
    """Return what the bits of a step depend on, besides the code."""
    stack = fingerprint.take("cpu")
    made_by = {name: str(stack.environment[name]) for name in ("torch", "compiler")}
    return {"isa": best_isa(stack.identity["isa"]), "processor": str(stack.identity["model"]), **made_by}


def records() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]


# --- a model --------------------------------------------------------------------------------------------------------


def write_model(folder: Path, family: str, layers: int = 0) -> Path:
    """Write a checkpoint of the family, with its usual number of layers or so many."""
    layers = layers or LAYERS[family]
    gemma = family == "gemma3"
    config = {
        "architectures": [ARCHITECTURE[family]],
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD[family],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": family != "llama",
        "torch_dtype": "float32",
        "hidden_activation" if gemma else "hidden_act": "gelu_pytorch_tanh" if gemma else "silu",
        **({"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "rope_local_base_freq": 1e4} if gemma else {}),
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: drawn(shape, salt, 1 - gemma) for salt, (name, shape) in enumerate(shapes(family, layers).items())}
    save_file(tensors, folder / "model.safetensors")
    return folder


def shapes(family: str, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint, by Hugging Face's names."""
    d, head = WIDTH, HEAD[family]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, d), "model.norm.weight": (d,)}
    if family == "llama":
        found["lm_head.weight"] = (VOCABULARY, d)
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if family == "gemma3" else []
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found |= {f"{at}{name}.weight": (d,) for name in norms}
        if family != "llama":
            found |= {f"{at}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        found |= {
            f"{at}self_attn.q_proj.weight": (HEADS * head, d),
            f"{at}self_attn.k_proj.weight": (KV_HEADS * head, d),
            f"{at}self_attn.v_proj.weight": (KV_HEADS * head, d),
            f"{at}self_attn.o_proj.weight": (d, HEADS * head),
            f"{at}mlp.gate_proj.weight": (INNER, d),
            f"{at}mlp.up_proj.weight": (INNER, d),
            f"{at}mlp.down_proj.weight": (d, INNER),
        }
    return found


def drawn(shape: tuple[int, ...], salt: int, norm: int) -> Tensor:
    """Return matrices in -0.35 to 0.35, and norms within 0.1 of `norm`: the same on every machine."""
    n = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + (salt << 24)
    for factor in (0x45D9F3B, 0x119DE1F3):
        n = ((n ^ (n >> 16)) * factor) & 0xFFFFFFFF
    half = (((n ^ (n >> 16)) >> 8).float() * 2.0**-24 - 0.5).view(shape)
    return norm + 0.2 * half if len(shape) == 1 else 0.7 * half


def prompt(row: int) -> list[int]:
    return [(7 * at + 13 * row + at * at) % VOCABULARY for at in range(PROMPTS[row])]


# --- its steps ------------------------------------------------------------------------------------------------------


@contextmanager
def kernels(served: set[str], home: Path) -> Iterator[None]:
    """Serve every op by its C++ kernel, as if it had been promoted; their names are added to `served`."""
    board = import_module("autosel.dispatch.board")  # the package has a function of that name
    standing_in = board.resolve

    def resolve(op: Any, w: Workload, serving: Any, guarded: Any, *, kind: str) -> Resolution:
        device: Fingerprint = serving.device
        for candidate in registry.all_candidates(op.name):
            if candidate.backend == "CPP" and isinstance(candidate.supports(w, device), Accepted):
                knobs = candidate.knobs(w, device)
                recipe = candidate.recipe(w, device, knobs)
                assert isinstance(recipe, NativeRecipe)
                flags = tuple(f for f in recipe.flags if not f.startswith("-D"))  # of all dtypes: one build
                run = load(op, recipe, compile_source(recipe.source, flags).digest, knobs.values)
                served.add(candidate.name)
                return Resolution(workload=w, run=run, candidate=candidate.name, decision=None, reason="for the test")
        made: Resolution = standing_in(op, w, serving, guarded)
        return made

    with pytest.MonkeyPatch.context() as patch, dispatch.use(home):
        patch.setattr(board, "resolve", resolve)
        yield


def runs(name: str, folder: Path) -> dict[str, Run]:
    """Return the results of each arm for a case; its model and an empty home are made below `folder`."""
    family, dtype, _, rows = name.split()
    model = models.load(write_model(folder / "model", family))
    decoder = Decoder(load_weights(Plan(model=model, weights=str(folder / "model"), dtype=dtype)))  # type: ignore[arg-type]
    prompts, fp = [prompt(row) for row in range(int(rows))], fingerprint.take("cpu")
    found: dict[str, Run] = {}
    with one_thread(), torch.inference_mode():
        with dispatch.use(folder / "home"):
            found["torch"] = decoded(decoder, prompts)
        with kernels(set(), folder / "kernels"):
            found["kernels"] = decoded(decoder, prompts)
            for threads in (1, 5):
                found[f"team of {threads}"] = decoded(decoder, prompts, team=fp, threads=threads)
    assert tuple(found) == ARMS
    return found


def decoded(
    decoder: Decoder, prompts: Sequence[list[int]], *, team: Fingerprint | None = None, threads: int = 0
) -> Run:
    """Run the prompts, then steps that are fed given tokens; `team` takes each step whole."""
    cache = make_cache(decoder.shape, decoder.weights.dtype, rows=len(prompts), room=ROOM)
    logits = [prefill(decoder, cache, prompts).clone()]
    place = Place.at(torch.zeros(len(prompts), dtype=torch.int64), [len(p) for p in prompts])
    step: Any = write_step(decoder, cache, place)
    if team is not None:
        step = write_team(step, team)
        step = replace(step, threads=threads, times=torch.zeros(threads, len(step.tasks), 2, dtype=torch.int64))
    for at in range(STEPS):
        place.tokens.copy_(torch.tensor([fed(row, at) for row in range(len(prompts))]))
        step.run()
        logits.append(step.logits.clone())
        place.advance()
    return Run(logits=tuple(logits), cache=digest(*held(cache, [len(p) + STEPS for p in prompts])))


def fed(row: int, at: int) -> int:
    return (11 * at + 5 * row + 3) % VOCABULARY


def held(cache: Cache, counts: Sequence[int]) -> list[Tensor]:
    """Return the keys and values of each layer that the sequences have written."""
    layers = [x for pair in zip(cache.k, cache.v, strict=True) for x in pair]
    return [x[row, :, :count] for x in layers for row, count in enumerate(counts)]


def reference(name: str, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the baseline's logits of the last step, and logits of a pass in higher precision: each [B, V]."""
    _, dtype, _, rows = name.split()
    model = models.load(folder / "model")
    weights = load_weights(Plan(model=model, weights=str(folder / "model"), dtype=dtype))  # type: ignore[arg-type]
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    with one_thread(), torch.inference_mode():
        for row in range(int(rows)):
            text = torch.tensor([[*prompt(row), *(fed(row, at) for at in range(STEPS))]])
            wide = torch.float64 if dtype == "fp32" else torch.float32
            for made, eager in zip(found, (Eager(weights), Reference(weights, wide)), strict=True):
                cache = make_cache(model, dtype, rows=1, room=ROOM)  # type: ignore[arg-type]
                made.append(eager.logits(text, cache, 0)[0])
    return found


# --- recording ------------------------------------------------------------------------------------------------------


def record() -> Path:
    """Write the results of this machine."""
    where, cases, values = here(), {}, {}
    for name in names():
        with tempfile.TemporaryDirectory() as folder:
            found = runs(name, Path(folder))
        cases[name] = {arm: run.record() for arm, run in found.items()}
        values[name] = {arm: found[arm].logits[-1].double().tolist() for arm in ("torch", "kernels")}
    path = RECORDS / f"{where['isa']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(in_rows({"recorded_on": where, "cases": cases, "values": values}) + "\n")
    return path


if __name__ == "__main__":
    sys.stdout.write(f"{record()}\n")
