"""Compare our decoder with Hugging Face's model classes, on tiny random checkpoints saved and loaded as safetensors.

Tokens must be identical. As in a measured run, the RMS error of logits against the same model in float64 must be at
most twice Hugging Face's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autosel import dispatch, models
from autosel.candidates import registry
from autosel.candidates.base import support_of
from autosel.candidates.load import load
from autosel.certify.issue import IssueRequest, issue
from autosel.certify.verify import wrong
from autosel.decode import generate as generation
from autosel.decode.cache import make_cache
from autosel.decode.eager import Eager
from autosel.decode.generate import Generated, generate, prefill
from autosel.decode.measure import measure
from autosel.decode.model import Decoder
from autosel.decode.run import Chain, Plan, Sampling
from autosel.decode.scene import judged
from autosel.decode.step import Place, write_step
from autosel.decode.weights import load_weights
from autosel.dispatch.resolve import Resolution
from autosel.native.compile import compile_source
from autosel.values import Accepted, DTypeName, Fingerprint, NativeRecipe, Workload

transformers = pytest.importorskip("transformers", reason="the oracle needs the extra `hf`")

FAMILIES = ("llama", "mistral", "qwen3", "gemma3")
WINDOW = 24
PROMPTS = (40, 17, 29)  # tokens: one past the window, two that reach it while decoding
COUNT = 70
VOCABULARY = 199  # prime: no kernel's tile divides it
NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # makes logits differ; at the usual 0.02 all tokens are about equally likely
    **NO_SPECIAL,
}
LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def hugging_face(family: str) -> Any:
    """Return a random model of the family with norm weights other than one."""
    t = transformers
    config = {
        "llama": lambda: t.LlamaConfig(**COMMON, rope_scaling=LLAMA31),
        "mistral": lambda: t.MistralConfig(**COMMON, sliding_window=WINDOW),
        "qwen3": lambda: t.Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True),
        "gemma3": lambda: t.Gemma3TextConfig(
            **(COMMON | {"num_hidden_layers": 7}), head_dim=32, sliding_window=WINDOW, query_pre_attn_scalar=24
        ),
    }[family]()
    torch.manual_seed(FAMILIES.index(family))
    model = t.AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Hold Hugging Face's results: greedy tokens of each prompt, logits [COUNT, V] in fp32 and, for the same input, in
    float64."""

    model: Any
    folder: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[Tensor]
    exact: list[Tensor]

    def decoder(self, dtype: DTypeName = "fp32") -> Decoder:
        shape = models.load(self.folder)
        return Decoder(load_weights(Plan(model=shape, weights=str(self.folder), dtype=dtype)))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: waking a second one takes longer than the work on tensors this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    model, folder = hugging_face(request.param), tmp_path_factory.mktemp(request.param)
    # Llama comes in shards with an index, the others as one file.
    model.save_pretrained(folder, max_shard_size="100KB" if request.param == "llama" else "1GB")
    prompts = [torch.randint(VOCABULARY, (n,)).tolist() for n in PROMPTS]
    said = [greedy(model, prompt) for prompt in prompts]
    double = copy.deepcopy(model).double()
    with torch.inference_mode():
        fed = [torch.tensor([p + tokens[:-1]]) for p, (tokens, _) in zip(prompts, said, strict=True)]
        exact = [double(row).logits[0, -COUNT:] for row in fed]
    return Oracle(
        model=model,
        folder=folder,
        prompts=prompts,
        tokens=[tokens for tokens, _ in said],
        logits=[logits for _, logits in said],
        exact=exact,
    )


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    tokens: list[int] = []
    logits = []
    past, fed = None, prompt
    with torch.inference_mode():
        for _ in range(COUNT):
            out = model(torch.tensor([fed]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            logits.append(out.logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
            fed = tokens[-1:]
    return tokens, torch.stack(logits)


def assert_same(oracle: Oracle, made: Generated, rows: list[int]) -> None:
    assert made.tokens == [oracle.tokens[r] for r in rows]
    ours = torch.stack(made.logits, 1)  # [B, COUNT, V]
    for b, r in enumerate(rows):
        error, bound = judged(ours[b], oracle.logits[r], oracle.exact[r], "fp32")
        assert error <= bound
        assert rms(ours[b] - oracle.exact[r]) <= 2 * rms(oracle.logits[r] - oracle.exact[r])


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [0, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize("rows", [[0], [0, 1, 2]], ids=["one", "three of different lengths"])
def test_greedy_tokens_and_logits_are_those_of_transformers(oracle: Oracle, page: int, rows: list[int]) -> None:
    prompts = [oracle.prompts[r] for r in rows]
    assert_same(oracle, generate(oracle.decoder(), prompts, COUNT, page=page, keep_logits=True), rows)


def test_every_chain_of_ops_gives_the_same_logits(oracle: Oracle) -> None:
    decoder = oracle.decoder()
    added = () if decoder.shape.sandwich else (Chain(attn="added", mlp="added"), Chain(attn="added", mlp="normed"))
    for chain in (Chain(attn="normed", mlp="normed"), Chain(attn="fused", mlp="normed"), *added):
        assert_same(oracle, generate(decoder, oracle.prompts, COUNT, chain=chain, keep_logits=True), [0, 1, 2])


def test_a_prompt_in_chunks_gives_the_same_logits(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "CHUNK", 13)
    monkeypatch.setattr("autosel.models.passes.PASS", 26)  # two rows, then the third
    for page in (0, 16):
        made = generate(oracle.decoder(), oracle.prompts, COUNT, page=page, keep_logits=True)
        assert_same(oracle, made, [0, 1, 2])


def test_generation_ends_a_row_at_its_stop_token(oracle: Oracle) -> None:
    stop = oracle.tokens[1][9]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in oracle.tokens]
    assert generate(oracle.decoder(), oracle.prompts, COUNT, stop=frozenset({stop})).tokens == expected


@pytest.mark.parametrize("chunk", [2048, 7])
def test_the_eager_baseline_is_transformers_to_the_last_roundings(
    oracle: Oracle, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autosel.decode.eager.CHUNK", chunk)
    decoder = oracle.decoder()
    cache = make_cache(decoder.shape, "fp32", rows=1, room=PROMPTS[0] + COUNT)
    eager, fed, logits = Eager(decoder.weights), oracle.prompts[0], []
    with torch.inference_mode():
        held = 0
        for token in oracle.tokens[0]:
            logits.append(eager.logits(torch.tensor([fed]), cache, held)[0])
            held, fed = held + len(fed), [token]
    error, bound = judged(torch.stack(logits), oracle.logits[0], oracle.exact[0], "fp32")
    assert error <= bound
    assert torch.stack(logits).argmax(-1).tolist() == oracle.tokens[0]


# --- half precision, and the kernels that are served -----------------------------------------------------------------


def teacher_forced(decoder: Decoder, oracle: Oracle, count: int) -> Tensor:
    """Return logits [B, count, V] of the written step, fed with Hugging Face's fp32 tokens."""
    cache = make_cache(decoder.shape, decoder.weights.dtype, rows=3, room=max(PROMPTS) + count)
    with torch.inference_mode():
        found = [prefill(decoder, cache, oracle.prompts)]
        place = Place.at(torch.tensor([row[0] for row in oracle.tokens]), list(PROMPTS))
        step = write_step(decoder, cache, place)
        for i in range(1, count):
            step.run()
            found.append(step.logits.clone())
            place.tokens.copy_(torch.tensor([row[i] for row in oracle.tokens]))
            place.advance()
    return torch.stack(found, 1)


def in_bf16(oracle: Oracle, count: int) -> tuple[Tensor, Tensor]:
    """Return the same from Hugging Face in bf16, and from its float64 model with weights rounded to bf16."""
    half = copy.deepcopy(oracle.model).bfloat16()
    exact = copy.deepcopy(half).double()
    theirs, truth = [], []
    with torch.inference_mode():
        for prompt, tokens in zip(oracle.prompts, oracle.tokens, strict=True):
            fed = torch.tensor([prompt + tokens[: count - 1]])
            theirs.append(half(fed).logits[0, -count:])
            truth.append(exact(fed).logits[0, -count:])
    return torch.stack(theirs), torch.stack(truth)


def test_bf16_errs_no_more_than_transformers_does(oracle: Oracle) -> None:
    count = 12
    theirs, exact = in_bf16(oracle, count)
    error, bound = judged(teacher_forced(oracle.decoder("bf16"), oracle, count), theirs, exact, "bf16")
    assert error <= bound


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[set[str]]:
    """Serve every op's C++ kernel as if it had been promoted; return the names of the bound ones."""
    served: set[str] = set()
    board = import_module("autosel.dispatch.board")  # the package has a function of that name
    standing_in = board.resolve

    def resolve(op: Any, w: Workload, serving: Any, guarded: Any, *, kind: str) -> Resolution:
        device: Fingerprint = serving.device
        for candidate in registry.all_candidates(op.name):
            if candidate.backend == "CPP" and isinstance(support_of(candidate, w, device), Accepted):
                knobs = candidate.knobs(w, device)
                recipe = candidate.recipe(w, device, knobs)
                assert isinstance(recipe, NativeRecipe)
                # all dtypes: the same build as in the kernels' own tests; that of one format has one dtype
                of_format = any(f.startswith("-DAUTOSEL_FORMATS") for f in recipe.flags)
                flags = tuple(f for f in recipe.flags if of_format or not f.startswith("-D"))
                run = load(op, recipe, compile_source(recipe.source, flags).digest, knobs.values)
                served.add(candidate.name)
                return Resolution(workload=w, run=run, candidate=candidate.name, decision=None, reason="for the test")
        made: Resolution = standing_in(op, w, serving, guarded)
        return made

    monkeypatch.setattr(board, "resolve", resolve)
    with dispatch.use(tmp_path):
        yield served


def test_compiled_kernels_give_the_same_tokens_and_logits(oracle: Oracle, compiled: set[str]) -> None:
    assert_same(oracle, generate(oracle.decoder(), oracle.prompts, COUNT, keep_logits=True), [0, 1, 2])
    assert_same(oracle, generate(oracle.decoder(), oracle.prompts[:1], COUNT, page=16, keep_logits=True), [0])
    assert {"cpp:norm_qkv", "cpp:gate_up", "cpp:attn_decode", "cpp:rope", "cpp:kv_append", "cpp:lm_head"} <= compiled
    count = 12
    theirs, exact = in_bf16(oracle, count)
    error, bound = judged(teacher_forced(oracle.decoder("bf16"), oracle, count), theirs, exact, "bf16")
    assert error <= bound


# --- the measurement on a real checkpoint ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 3, "cache": "paged", "page": 16, "advance": True},
        {"prealloc": False, "batch": 3, "advance": True, "sampling": Sampling(temperature=0.8, top_k=20, top_p=0.9)},
        {"speculate": 3, "advance": True},
        {"speculate": 3, "advance": True, "cache": "paged", "page": 16},
        {"prompt": "synthetic", "dtype": "bf16", "layers": 2},
    ],
    ids=["fixed context", "paged batch", "sampled, no buffers", "speculating", "speculating on pages", "synthetic"],
)
def test_a_measured_run_gives_the_baselines_tokens(oracle: Oracle, changes: dict[str, Any]) -> None:
    plan = Plan(
        **({"model": models.load(oracle.folder), "weights": str(oracle.folder), "dtype": "fp32"} | changes),
        seq=30,
        iters=8,
        warmup=1,
    )
    missed = dict(dispatch.board()._handover._missed)
    run = measure(plan, load_weights(plan))
    assert dispatch.board()._handover._missed == missed, "a daemon would tune what only a run calls"
    assert run.max_logit_error <= run.logit_bound
    assert run.baseline is not None and len(run.optimised_ns) == len(run.read_probes)
    assert len(run.optimised_ns) == len(run.baseline.ns) == len(run.baseline.optimised_first)
    assert run.tokens_per_step * len(run.optimised_ns) == plan.iters
    assert run.tokens_checked == plan.iters * plan.batch  # with speculation, all tokens that were kept
    if plan.dtype == "fp32":
        assert run.tokens_equal == run.tokens_checked, run.choices
    assert (run.ttft_ns is None) == (plan.prompt == "synthetic")
    assert wrong(issue(run, {}, IssueRequest(repro_cmd="autosel run"))) == "", "the figures differ from the model's"
    once = {c.op: c.count_per_step for c in run.choices}
    assert once["lm_head"] == 1
    assert any("attn" in c.op for c in run.choices)
    if plan.prealloc and not plan.speculate:
        assert sum(c.count_per_step for c in run.choices if "attn" in c.op) == plan.layers_run
        assert sum(t.count_per_step for t in run.per_op if "attn" in t.op) == plan.layers_run


def test_a_certificate_has_the_note_of_its_weights(oracle: Oracle) -> None:
    plan = Plan(model=models.load(oracle.folder), weights=str(oracle.folder), seq=8, iters=2, warmup=0, step="ops")
    weights = replace(load_weights(plan), note="weights: Q4_1 in x.gguf, dequantised to bf16 when loaded")
    made = issue(measure(plan, weights), {}, IssueRequest(repro_cmd="autosel run"))
    assert weights.note in made.notes
