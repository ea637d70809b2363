"""Patch a tiny model of every class of transformers that generates text, and compare it with the unpatched model.

    python benchmarks/sweep_transformers.py [--only LlamaForCausalLM ...] [--jobs 2] [--json] [--write]

Each model has two or three layers and random fp32 weights of a fixed seed. A prompt and two further tokens run through
the unpatched model and through the patched model, in which autosel's C++ kernels serve the shapes that they support,
and the baseline all others, without a race.

`served` is the share of calls of linear and norm modules that a decision serves. The bound of the logits comes from
the ops' bounds: the same passes run again with the result of each served call moved by its whole bound, with random
signs, by element and by row. The bound is twice the largest change of a logit, since each of the two models may err. A
token must be equal if the two largest logits are further apart than both bounds.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
import io
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import command_line
import torch
from kept import keep
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import autosel
from autosel import dispatch
from autosel.candidates import registry
from autosel.dispatch.board import this_device
from autosel.dispatch.signature import inputs_of
from autosel.errors import UsageError
from autosel.guard import Policy
from autosel.testing.serving import serve
from autosel.values import Accepted, Workload

RESULT = Path(__file__).parent / "results" / "cpu" / "transformers-classes.json"
ENDING = "ForCausalLM"
LIMIT_S = 120  # for one class
SERVED_GOAL, CLASSES_GOAL = 0.8, 0.6
PROMPT, STEPS, MOVES = 9, 2, 4
VOCABULARY = 128
KERNELS = {"linear": "cpp:gemv", "attn": "cpp:attn_decode", "rmsnorm": "cpp:rmsnorm", "rope": "cpp:rope"}
KERNELS |= {"swiglu": "cpp:swiglu", "geglu": "cpp:geglu"}
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
COUNTED = ("linear", "rmsnorm")  # ops that count as one call of a linear or a norm each

Outcome = Literal["patched", "refused", "wrong", "not built", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassResult:
    """Hold the result of one class. `worst` is the largest logit difference divided by its bound."""

    name: str
    outcome: Outcome
    reason: str = ""
    calls: int = 0  # of linear and norm modules in all passes
    served: int = 0
    passes: int = 0
    difference: float = 0.0
    bound: float = 0.0
    tokens: int = 0
    open_tokens: int = 0  # tokens whose top logits are within both bounds
    left: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        return self.served / self.calls if self.calls else 0.0

    @property
    def worst(self) -> float:
        return self.difference / self.bound if self.bound else 0.0

    @property
    def reaches(self) -> bool:
        return self.outcome == "patched" and self.share >= SERVED_GOAL


def names() -> list[str]:
    """Return the classes of the installed transformers that generate text, by name."""
    import transformers

    found = [n for n in dir(transformers) if n.endswith(ENDING) and not n.startswith(("Auto", "TF", "Flax"))]
    return sorted(found)


# --- one class -------------------------------------------------------------------------------------------------------


def swept(name: str) -> ClassResult:
    """Compare a model of this class before and after `patch`. Errors are returned as a row."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(name)
            own, calls = _counted(model)
        except Exception as error:  # transformers' error, or a configuration that this file cannot shrink
            return ClassResult(name=name, outcome="not built", reason=_line(error))
        try:
            return _compared(name, model, own, calls)
        except UsageError as error:
            return ClassResult(name=name, outcome="refused", reason=f"{error.what}: {error.why}", calls=calls)
        except Exception as error:
            return ClassResult(name=name, outcome="failed", reason=_line(error), calls=calls)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:240]


def _compared(name: str, model: Any, own: list[Tensor], calls: int) -> ClassResult:
    with tempfile.TemporaryDirectory() as folder:
        wanted = _wanted(model, Path(folder) / "empty", len(own))
        board = Moving(serve(Path(folder) / "pinned", wanted), Policy(on=False))
        with dispatch.Use(board):
            with _quietly():
                patched = autosel.patch(model)
            before = _served_calls(board)
            ours = passes(model, len(own))
            served = _served_calls(board) - before
            bounds = _bounds(model, board, ours)
            autosel.unpatch(model)
    if not all(torch.equal(a, b) for a, b in zip(own, passes(model, len(own)), strict=True)):
        return ClassResult(name=name, outcome="wrong", reason="after unpatch the logits differ", calls=calls)
    pairs = list(zip(own, ours, bounds, strict=True))
    worst = max(pairs, key=lambda pair: _distance(pair[0], pair[1]) / pair[2])
    tokens = [_tokens(*pair) for pair in pairs]
    row = ClassResult(
        name=name,
        outcome="patched",
        calls=calls,
        served=served,
        passes=len(own),
        difference=_distance(worst[0], worst[1]),
        bound=worst[2],
        tokens=sum(t[0] for t in tokens),
        open_tokens=sum(t[1] for t in tokens),
        left=tuple(sorted({f"{x.kind}: {x.reason}" for x in patched.left})),
    )
    if not row.worst <= 1.0:
        return dataclasses.replace(row, outcome="wrong", reason="a logit differs by more than its bound")
    if any(t[2] for t in tokens):
        return dataclasses.replace(row, outcome="wrong", reason="a token differs beyond the bounds")
    return row


def _distance(own: Tensor, ours: Tensor) -> float:
    """Return the largest difference; infinite if only one of the two is finite."""
    if not torch.equal(own.isfinite(), ours.isfinite()):
        return float("inf")
    finite = own.isfinite()
    return (own.double() - ours.double())[finite].abs().max().item() if finite.any() else 0.0


def _tokens(own: Tensor, ours: Tensor, bound: float) -> tuple[int, int, int]:
    """Return the numbers of tokens, of tokens within the bounds, and of other tokens that differ."""
    top = own.double().topk(2, dim=-1).values
    decided = top[..., 0] - top[..., 1] > 2 * bound
    differ = own.argmax(-1) != ours.argmax(-1)
    return decided.numel(), int((~decided).sum()), int((differ & decided).sum())


# --- passes ----------------------------------------------------------------------------------------------------------


def passes(model: Any, count: int) -> list[Tensor]:
    """Return the logits of a prompt, then of one more token in each of `count` - 1 passes over the cache."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, VOCABULARY - 5, (1, PROMPT + STEPS), generator=generator)
    torch.manual_seed(11)  # some models draw random numbers in their forward
    cached = {"use_cache": True} if "use_cache" in _parameters(model) else {}
    found, cache = [], {}
    for step in range(count):
        part = ids[:, :PROMPT] if step == 0 else ids[:, PROMPT + step - 1 : PROMPT + step]
        out = model(input_ids=part, **cached, **cache)
        found.append(out.logits.clone())
        cache = {_cache_name(model): out.past_key_values} if count > 1 else {}
    return found


def _parameters(model: Any) -> Sequence[str]:
    return [*inspect.signature(type(model).forward).parameters]


def _cache_name(model: Any) -> str:
    """Return the name of the cache's argument, which changed in transformers 5.24."""
    return next((name for name in CACHE_NAMES if name in _parameters(model)), CACHE_NAMES[-1])


def _counted(model: Any) -> tuple[list[Tensor], int]:
    """Return the logits of the unpatched model, and the calls of its linear and norm modules."""
    count, found = 0, _own_passes(model)

    def called(*_: Any) -> None:
        nonlocal count
        count += 1

    hooks = [m.register_forward_hook(called) for m in model.modules() if is_linear(m) or is_norm(m)]
    again = passes(model, len(found))
    for hook in hooks:
        hook.remove()
    if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
        raise RuntimeError("two runs of the same model differ")
    if not all(t.isfinite().any() for t in found):
        raise RuntimeError("no logit is finite")
    return found, count


def _own_passes(model: Any) -> list[Tensor]:
    """Return the logits of all passes, or of the prompt alone if the class cannot continue from its cache."""
    try:
        return passes(model, 1 + STEPS)
    except Exception:
        return passes(model, 1)


def is_linear(module: nn.Module) -> bool:
    """Return True for a linear layer, including types other than PyTorch's, such as transformers' Conv1D."""
    return (
        isinstance(module, nn.Linear)
        or type(module).__name__ == "Conv1D"
        or ("Linear" in type(module).__name__ and not any(True for _ in module.children()))
    )


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


# --- serving ---------------------------------------------------------------------------------------------------------


class Moving(dispatch.Board):
    """Serves like a board; while `signs` is set, each result is the reference moved by its bound."""

    signs: Callable[[Tensor], Tensor] | None = None

    def selection(self, op: Any) -> Any:
        inner = super().selection(op)

        def moved(*values: Any) -> Any:
            made = inner(*values)
            if self.signs is None:
                return made
            inputs = inputs_of(op, values)
            reference = op.reference(inputs)
            bounds = op.bound(inputs, reference)
            several = made if isinstance(made, tuple) else (made,)
            found = tuple(
                (r + self.signs(b) * b).to(m.dtype) for r, b, m in zip(reference, bounds, several, strict=True)
            )
            return found if isinstance(made, tuple) else found[0]

        return moved


def _signs(generator: torch.Generator, *, by_row: bool) -> Callable[[Tensor], Tensor]:
    def drawn(bound: Tensor) -> Tensor:
        shape = (*bound.shape[:-1], 1) if by_row else bound.shape
        return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0

    return drawn


def _bounds(model: Any, board: Moving, ours: list[Tensor]) -> list[float]:
    """Return the bound of the logits of each pass."""
    found = [0.0] * len(ours)
    for draw in range(MOVES):
        board.signs = _signs(torch.Generator().manual_seed(draw), by_row=bool(draw % 2))
        for i, moved in enumerate(passes(model, len(ours))):
            found[i] = max(found[i], 2 * _distance(ours[i], moved))
    board.signs = None
    return found


def _wanted(model: Any, home: Path, count: int) -> list[tuple[Workload, str]]:
    """Return each workload of the patched model, with autosel's kernel if it supports it, else the baseline."""
    with dispatch.use(home) as board, _quietly():
        autosel.patch(model)
        passes(model, count)
        autosel.unpatch(model)
        asked = list(board.asked())
    device = this_device()

    def chosen(w: Workload) -> str:
        kernel = KERNELS.get(w.op)
        if kernel is None or not isinstance(registry.find(w.op, kernel).supports(w, device), Accepted):
            return registry.baseline(w.op).name
        return kernel

    return [(w, chosen(w)) for w in asked]


def _served_calls(board: dispatch.Board) -> int:
    return sum(u.calls for u in board.uses() if u.op in COUNTED and u.decision_id is not None)


@contextmanager
def _quietly() -> Iterator[None]:
    with redirect_stdout(io.StringIO()):
        yield


# --- a tiny model of a class ------------------------------------------------------------------------------------------

WIDTH, INNER, HEADS, KV_HEADS, HEAD = 64, 96, 4, 2, 16
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim",
                     "embedding_size", "attention_hidden_size", "backbone_hidden_size", "lru_width"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "n_inner",
                     "d_inner", "dim_ff", "dff", "intermediate_size_mlp", "mlp_hidden_size",
                     "shared_intermediate_size"), INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
                     "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
                     "encoder_attention_heads", "attention_heads", "swa_num_attention_heads"), HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "n_kv_heads"), KV_HEADS),
    **dict.fromkeys(("head_dim", "swa_head_dim", "attention_head_dim", "v_head_dim", "qk_nope_head_dim", "d_kv",
                     "dim_head", "global_head_dim", "index_head_dim", "kv_channels", "qk_rope_head_dim",
                     "linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "mamba_d_head"), HEAD),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts",
                     "linear_num_value_heads", "index_topk", "time_step_rank"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "top_k_experts", "moe_k", "moe_top_k", "linear_num_key_heads",
                     "type_vocab_size", "index_n_heads"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "n_shared_experts",
                     "first_k_dense_replace"), 1),
    **dict.fromkeys(("num_kv_shared_layers", "num_nextn_predict_layers"), 0),
    **dict.fromkeys(("vocab_size", "text_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_source_positions",
                     "max_target_positions", "n_ctx", "context_length", "max_sequence_length"), 256),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "sliding_window", "sliding_window_size",
                     "attention_window_size", "rotary_dim", "mamba_n_heads", "state_size", "ssm_state_size",
                     "mamba_d_state"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "image_size"), 32),
    **dict.fromkeys(("hidden_size_per_layer_input", "patch_size"), 16),
    "mamba_d_ssm": 2 * WIDTH,
}  # fmt: skip
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers", "layers",
          "depth")  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Values that the sizes above contradict, by the configuration's name.
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MORE: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "CohereCompassTextConfig": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROPE)},
    "DbrxConfig": {
        "attn_config": {"kv_n_heads": KV_HEADS, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": WIDTH, "ffn_hidden_size": INNER, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "DoryConfig": {
        "num_hidden_layers": 3,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_loops": 2,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "Dots1Config": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteTextConfig": {"num_key_value_heads": HEADS},
    "Gemma4TextConfig": {"hidden_size_per_layer_input": 0},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "HunYuanDenseV1Config": {"head_dim": HEAD},
    "HunYuanMoEV1Config": {"head_dim": HEAD, "num_experts": 4, "moe_topk": [2, 2], "moe_intermediate_size": [48, 48]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8, "head_dim": HEAD},
    "MinistralConfig": {"head_dim": HEAD},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "NemotronConfig": {"head_dim": HEAD, "num_key_value_heads": KV_HEADS},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "ngram_vocab_size_base": 64,
        "split_ngram_parts": 2,
        "hc_lowrank": 8,
    },
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "xLSTMConfig": {"qk_dim_factor": 1.0, "max_inference_chunksize": 8},
}


def tiny_model(name: str) -> Any:
    """Return a small model of the class in fp32 with seeded weights. Passes on the exceptions of transformers."""
    import transformers

    kind = getattr(transformers, name)
    torch.manual_seed(7)
    with _quietly():
        model = kind(tiny_config(kind.config_class)).float().eval()
    generator = torch.Generator().manual_seed(7)
    for part, tensor in model.named_parameters():
        if part.endswith("weight") and tensor.dim() >= 2:
            tensor.data.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
        elif part.endswith("weight") and tensor.is_floating_point():
            tensor.data += torch.randn(tensor.shape, generator=generator) * 0.1
    return model


def tiny_config(kind: Any) -> Any:
    """Return a small configuration: all known sizes reduced, one layer of each kind, at least two layers."""
    from transformers import PretrainedConfig

    given = dict(vars(kind()))
    aliases = {target: alias for alias, target in kind.attribute_map.items()}
    values: dict[str, Any] = {}
    for name, value in given.items():
        known = SIZES.get(name, SIZES.get(aliases.get(name, "")))
        if known is not None and value is not None and not isinstance(value, (list, dict, bool)):
            values[name] = known
        elif name in TOKENS:
            values[name] = TOKENS[name]
        elif isinstance(value, PretrainedConfig):
            values[name] = tiny_config(type(value))
    layers, lists = _layers(given, aliases)
    values |= lists
    values |= {n: layers for n in given if n in LAYERS or aliases.get(n) in LAYERS}
    values |= {"is_decoder": True} if "is_decoder" in given else {}
    if "kv_lora_rank" in given:  # keys and values exist for every head
        values["num_key_value_heads"] = HEADS
    values |= MORE.get(kind.__name__, {})
    return kind(**values)


def _layers(given: dict[str, Any], aliases: dict[str, str]) -> tuple[int, dict[str, list[Any]]]:
    """Return the number of layers, and the lists with one entry a layer, shortened to that number."""
    counts = [given[n] for n in given if (n in LAYERS or aliases.get(n) in LAYERS) and isinstance(given[n], int)]
    lists = {n: v for n, v in given.items() if isinstance(v, list) and v and len(v) in counts}
    kinds = {n: list(dict.fromkeys(v)) for n, v in lists.items() if all(isinstance(x, str) for x in v)}
    layers = max([2, *map(len, kinds.values())])
    short = {n: [kinds[n][i % len(kinds[n])] for i in range(layers)] for n in kinds}
    return layers, {n: short.get(n, v[:layers]) for n, v in lists.items()}


# --- all classes ------------------------------------------------------------------------------------------------------


def sweep(
    wanted: Sequence[str], jobs: int, heard: Callable[[ClassResult], None] = lambda row: None
) -> list[ClassResult]:
    """Return a row for each class. Each runs in its own process, forked from one that has imported transformers."""
    processes = get_context("forkserver")
    processes.set_forkserver_preload(["transformers", "autosel"])

    def alone(name: str) -> ClassResult:
        near, far = processes.Pipe(duplex=False)
        child = processes.Process(target=_answer, args=(name, far))
        child.start()
        far.close()
        row = ClassResult(name=name, outcome="failed", reason=f"no answer in {LIMIT_S} s, or its process ended")
        if near.poll(LIMIT_S):
            with suppress(EOFError):
                row = near.recv()
        child.kill()
        child.join()
        heard(row)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        return sorted(pool.map(alone, wanted), key=lambda row: row.name)


def _answer(name: str, far: Connection) -> None:
    far.send(swept(name))


# --- the table --------------------------------------------------------------------------------------------------------


def table(rows: Sequence[ClassResult]) -> str:
    lines = [f"{'class':<36} {'outcome':<9} {'served':>7} {'error':>9} {'/bound':>7} tokens  reason"]
    for row in rows:
        figures = (
            f"{row.share:7.0%} {row.difference:9.2e} {row.worst:7.3f} {row.tokens - row.open_tokens:3}/{row.tokens:<3}"
        )
        reason = row.reason or "; ".join(row.left)
        lines.append(f"{row.name:<36} {row.outcome:<9} {figures if row.passes else ' ' * 32} {reason[:150]}")
    return "\n".join([*lines, summary(rows)])


def summary(rows: Sequence[ClassResult]) -> str:
    counts = {o: sum(r.outcome == o for r in rows) for o in ("patched", "refused", "not built", "wrong", "failed")}
    reached = sum(r.reaches for r in rows)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
    share = reached / max(1, len(rows))
    return (
        f"{len(rows)} classes: {told}\n"
        f"{reached} ({share:.0%}) with at least {SERVED_GOAL:.0%} of their linear and norm calls served; "
        f"goal {CLASSES_GOAL:.0%}"
    )


def main() -> int:
    parser = command_line.parser(__doc__, write="store the rows in benchmarks/results/cpu/")
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="only these classes")
    parser.add_argument("--jobs", type=int, default=2, help="worker processes")
    options = parser.parse_args()
    began = time.monotonic()

    def heard(row: ClassResult) -> None:
        print(f"{time.monotonic() - began:5.0f} s  {row.name}  {row.outcome}  {row.reason}", file=sys.stderr)

    rows = sweep(options.only or names(), options.jobs, heard)
    told = {
        "transformers": importlib.metadata.version("transformers"),
        "torch": torch.__version__,
        "rows": [{**dataclasses.asdict(r), "share": r.share, "worst": r.worst} for r in rows],
    }
    command_line.show(options, told, lambda _: table(rows))
    if options.write:
        keep(RESULT, told)
    return int(any(r.outcome in ("wrong", "failed") for r in rows))


if __name__ == "__main__":
    sys.exit(main())
