"""Time the whole decode step of autosel and of other servers of the same model, in turn, at the same shapes.

    python benchmarks/bench_peers.py [--model llama-1b] [--layers N] [--seq 128 --seq 2048] [--rounds 12]
                                     [--arm autosel --arm eager --arm compile --arm llama.cpp ...] [--split GB/s]
    python benchmarks/bench_peers.py --file-type q4_k_m         llama.cpp quantises the model; both read that file
    python benchmarks/bench_peers.py --model MODEL.gguf         both read this file
    python benchmarks/bench_peers.py --file-type q4_0 --ik DIR  also ik_llama.cpp, built in DIR
    python benchmarks/bench_peers.py --format int4-g128         transformers with torchao's int4, on the same codes

    autosel     the step of `autosel run --step whole`: one native call, C++ kernels at their formulas' knobs; bf16
                weights in lossless 12 bits (kernels/cpu/packed.h), quantised ones as their codes
    autosel, 16 bits
                the same with plain weights (`--weights-layout plain`)
    eager       Hugging Face's model class, SDPA, DynamicCache, torch.inference_mode
    compile     the same model under torch.compile, StaticCache of exactly the context
    llama.cpp   the package llama-cpp-python, built from source, on a bf16 GGUF of the same tensors, written by the
                package gguf: bf16 weights, fp16 cache, flash attention, mmap off
    llama.cpp as installed
                the same with the package's default, `Llama(flash_attn=False)`: attention in three operations
    ik_llama.cpp
                that fork, from a checkout with its shared library (--ik), on the same file: fp16 cache, flash attention
    ik_llama.cpp, repacked
                the same with the rows of its weights interleaved when it loads them (its option -rtr)
    torchao     eager, with the codes of --format in torchao's tensor for a CPU (`Int4OpaqueTensor`)
    torchao, compiled
                compile, with the same

`autosel` and those of llama.cpp and ik_llama.cpp are the arms of a quantised file. Every arm is one greedy step that
attends to --seq tokens, with one thread a core; the cache is rewound after each step. The arms take turns in random
order. Before each, all threads of this process sleep; an arm takes one step untimed, to wake its threads, then one
timed. Caches hold random keys and values (llama.cpp's and its fork's come from a prompt of random tokens). The figure
is an arm's step over autosel's, median over median, with the interval of resampled rounds; on a shared machine only
ratios within one run are meaningful. There the read rate changes from minute to minute, and the ratios with it, since
arithmetic counts more at a higher rate.
--split 50 makes one row of the rounds below 50 GB/s and one of the others.

llama.cpp is built once, which needs a compiler and several minutes: pip install llama-cpp-python gguf (possibly in a
separate environment with this one's packages on its path). torchao: pip install --no-deps --target DIR torchao, and DIR
in PYTHONPATH.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import command_line
import numpy as np
import torch
from hugging_face import TORCHAO_FORMATS, filled_cache, model_of, rewinding, state
from ik_llama import Stream
from kept import device_of
from torch import Tensor

from autosel import dispatch, fingerprint, models
from autosel.certify.issue import git_sha
from autosel.certify.statistics import median, speedup_interval
from autosel.decode import packed as packing
from autosel.decode.cache import make_cache
from autosel.decode.gguf import LAYER, TOP
from autosel.decode.model import Decoder
from autosel.decode.run import GREEDY, Plan, StepForm
from autosel.decode.sample import Sampler
from autosel.decode.step import Place, write_step
from autosel.decode.team import KERNELS, write_team
from autosel.decode.weights import Weights, load_weights
from autosel.devices.cpu import probe
from autosel.devices.cpu.idle import wait_until_idle
from autosel.devices.stack import version_of
from autosel.formats import PLAIN
from autosel.values import Accepted

FILE_TYPES = ("q8_0", "q4_0", "q4_1", "q4_k_m")  # of llama.cpp; q4_k_m mixes Q4_K and Q6_K
PLAIN_ARMS = ("autosel", "autosel, 16 bits", "eager", "compile", "llama.cpp", "llama.cpp as installed")
OF_CODES = ("autosel", "torchao", "torchao, compiled")
OF_A_FILE = ("autosel", "llama.cpp", "llama.cpp as installed")
IK = ("ik_llama.cpp", "ik_llama.cpp, repacked")
LEAST_ROUNDS = 5  # minimum rounds of a row
KEPT: list[Any] = []
SERVING: dict[int, dict[str, int]] = {}  # context -> candidate -> number of ops that it serves in the autosel step
Step = Callable[[], int]  # one greedy step; returns the token


def main() -> int:
    options = _parsed()
    fp = fingerprint.take("cpu")
    torch.set_num_threads(int(fp.identity["cpus"]))
    rows = []
    with torch.inference_mode(), dispatch.measuring(), tempfile.TemporaryDirectory() as scratch:
        plan, weights, file = _read(options, Path(options.gguf or scratch))
        names = options.arm or _arms(options, weights)
        known = ARM | (_ik_arms(Path(options.ik)) if options.ik else {})
        for seq in options.seq or [128, 2048]:
            arms = {name: known[name](weights, seq, file) for name in names}
            print(f"{options.model} {seq}: {', '.join(arms)}", file=sys.stderr, flush=True)
            about = {"seq": seq, "date": command_line.today(), "serving": SERVING.get(seq, {})}
            rows += [about | found for found in compared(arms, options)]
    found = {
        "date": command_line.today(),
        "commit": git_sha(),
        "device": device_of(fp),
        "torch": torch.__version__,
        **_versions(),
        "model": options.model,
        "file_type": options.file_type or options.format,
        "layers": plan.layers_run,
        "of_layers": plan.model.layers,
        "dtype": plan.dtype,
        "rows": rows,
    }
    command_line.show(options, found, steps)
    return 0


def _read(options: argparse.Namespace, folder: Path) -> tuple[Plan, Weights, Path]:
    """Return the weights that autosel reads, and the file that llama.cpp reads: the same one, if it is quantised."""
    file = Path(options.model)
    if not models.is_gguf(file):
        plan, weights = _loaded(options, options.model)
        if not options.file_type:
            return plan, weights, folder / "model.gguf"
        file = quantised_file(weights, folder, options.file_type)
    return *_loaded(options, str(file), weights=str(file)), file


def _arms(options: argparse.Namespace, weights: Weights) -> tuple[str, ...]:
    if options.format:
        return OF_CODES
    ik = IK if options.ik else ()
    return (*(PLAIN_ARMS if weights.shape.weight == PLAIN else OF_A_FILE), *ik)


def _loaded(options: argparse.Namespace, name: str, weights: str = "random") -> tuple[Plan, Weights]:
    model = models.stored_as(models.load(name), options.format or None)
    layers, seq = min(options.layers, model.layers), max(options.seq or [2048])
    plan = Plan(model=model, layers=layers, seq=seq, weights=weights)
    return plan, load_weights(plan)


def compared(arms: Mapping[str, Step], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all arms; return the figures of all rounds, or with --split one row for each side with enough rounds."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    rates, rng = [], random.Random(options.seed)
    for _ in range(options.rounds):
        rates.append(median(probe.load().read(torch.get_num_threads(), 0.02)))
        for name in rng.sample(list(arms), len(arms)):
            wait_until_idle()
            arms[name]()  # wakes its own threads
            begin = time.perf_counter_ns()
            arms[name]()
            times[name].append((time.perf_counter_ns() - begin) / 1e6)
    slow = [i for i, rate in enumerate(rates) if rate < options.split * 1e9]
    parts = [slow, [i for i in range(len(rates)) if i not in slow]]
    enough = [part for part in parts if len(part) >= min(LEAST_ROUNDS, options.rounds)]
    if not enough:
        print(f"fewer than {LEAST_ROUNDS} rounds on each side of --split: no row", file=sys.stderr)
    return [figures({n: [t[i] for i in part] for n, t in times.items()}, [rates[i] for i in part]) for part in enough]


def figures(times: Mapping[str, list[float]], rates: list[float]) -> dict[str, Any]:
    """Return each arm's median step in milliseconds, its ratio to the first arm with interval, and the read rate."""
    first = next(iter(times))
    found: dict[str, Any] = {"rounds": len(rates), "read_gb_s": median(rates) / 1e9, "arms": {}}
    for name, took in times.items():
        interval = speedup_interval(took, times[first])
        found["arms"][name] = {
            "median_ms": median(took),
            "best_ms": min(took),
            "over_first": median(took) / median(times[first]),
            "interval": [interval.lo, interval.hi],
        }
    return found


# --- the arms --------------------------------------------------------------------------------------------------------


def _autosel(weights: Weights, seq: int, _: Path, *, packed: bool = True) -> Step:
    fp = fingerprint.take("cpu")
    packed &= weights.shape.weight == PLAIN and isinstance(packing.supports(weights.dtype, fp), Accepted)
    decoder, cache = Decoder(weights), _filled(weights, seq)
    place = Place.at(torch.tensor([7]), [seq - 1])
    logits = torch.empty(1, weights.shape.V, dtype=weights.torch_dtype)
    sampler = Sampler(GREEDY, [[7]], seq, logits)
    form: StepForm = "packed" if packed else "whole"
    step = write_team(write_step(decoder, cache, place, sampler=sampler), fp, form)
    SERVING[seq] = dict(Counter(KERNELS.get(call.op, call.op) for call in step.ops.calls))

    def run() -> int:
        step.run()
        assert step.chosen is not None
        return int(step.chosen)

    return run


def _eager(weights: Weights, seq: int, _: Path) -> Step:
    model, token = model_of(weights), torch.tensor([[7]])
    past = filled_cache(model, _filled(weights, seq), seq - 1)
    rewind = rewinding(past)

    def run() -> int:
        found = int(model(token, past_key_values=past, use_cache=True).logits[:, -1].argmax())
        rewind()
        return found

    return run


def _compile(weights: Weights, seq: int, _: Path) -> Step:
    """Use a static cache of the context's size, so that one graph serves; its counter is restored by hand."""
    from transformers import StaticCache

    model, token = model_of(weights), torch.tensor([[7]])
    ours, past = _filled(weights, seq), StaticCache(config=model.config, max_cache_len=seq)
    for i, (k, v) in enumerate(zip(ours.k, ours.v, strict=True)):
        past.update(k[:, :, : seq - 1].clone(), v[:, :, : seq - 1].clone(), i)
    held = [_counter(layer) for layer in past.layers]
    compiled = torch.compile(model, dynamic=False)
    position = torch.tensor([[seq - 1]])

    def run() -> int:
        out = compiled(token, past_key_values=past, use_cache=True, position_ids=position)
        for layer, before in zip(past.layers, held, strict=True):
            _restore(layer, before)
        return int(out.logits[:, -1].argmax())

    for _ in range(3):  # compiles at the first call, settles guards at the second
        run()
    return run


def _counter(layer: Any) -> dict[str, Any]:
    """Return the counters of a static layer, without its keys and values."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in vars(layer).items()
        if "cumulative" in name or "length" in name
    }


def _restore(layer: Any, before: Mapping[str, Any]) -> None:
    for name, value in before.items():
        if isinstance(value, Tensor):
            getattr(layer, name).copy_(value)
        else:
            setattr(layer, name, value)


def _llama_cpp(weights: Weights, seq: int, path: Path, *, flash: bool = True) -> Step:
    import llama_cpp as L  # noqa: N812

    if not path.exists():
        print(f"writing {path}", file=sys.stderr, flush=True)
        write_gguf(weights, path)
    context = L.llama_context_default_params()
    context.n_ctx, context.n_batch, context.n_ubatch = seq + 64, 512, 512
    context.n_threads = context.n_threads_batch = torch.get_num_threads()
    context.flash_attn_type = L.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else L.LLAMA_FLASH_ATTN_TYPE_DISABLED
    made = L.llama_init_from_model(_llama_cpp_model(path), context)
    batch = L.llama_batch_init(512, 0, 1)
    held = _prompt(weights, seq)

    def feed(tokens: Any, start: int, logits: bool) -> None:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), start + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = logits and i == len(tokens) - 1
        if L.llama_decode(made, batch):
            raise RuntimeError("llama_decode failed")

    for start in range(0, seq - 1, 512):
        feed(held[start : start + 512], start, False)

    def run() -> int:
        feed((7,), seq - 1, True)
        logits = np.ctypeslib.as_array(L.llama_get_logits_ith(made, -1), shape=(weights.shape.V,))
        found = int(logits.argmax())
        L.llama_memory_seq_rm(L.llama_get_memory(made), 0, seq - 1, -1)
        return found

    return run


def _prompt(weights: Weights, seq: int) -> Any:
    return np.random.default_rng(0).integers(0, weights.shape.V, seq - 1).astype(np.int32)


def _ik_llama(weights: Weights, seq: int, path: Path, *, built: Path, repack: bool) -> Step:
    threads = torch.get_num_threads()
    stream = Stream(built, path, _prompt(weights, seq), threads=threads, repack=repack)
    return lambda: int(stream.logits(7, weights.shape.V).argmax())


def _ik_arms(built: Path) -> dict[str, Callable[[Weights, int, Path], Step]]:
    plain, repacked = IK
    made = partial(_ik_llama, built=built.expanduser().resolve())
    return {plain: partial(made, repack=False), repacked: partial(made, repack=True)}


@cache
def _llama_cpp_model(path: Path) -> Any:
    """Load the weights, once for all contexts."""
    import llama_cpp as L  # noqa: N812

    L.llama_backend_init()
    _be_quiet(L)
    wanted = L.llama_model_default_params()
    wanted.use_mmap, wanted.n_gpu_layers = False, 0
    return L.llama_model_load_from_file(str(path).encode(), wanted)


def _be_quiet(L: Any) -> None:
    @L.llama_log_callback
    def say_nothing(level: int, text: bytes, data: Any) -> None:
        pass

    KEPT.append(say_nothing)  # the library keeps only a pointer to it
    L.llama_log_set(say_nothing, None)


def _filled(weights: Weights, seq: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    cache = make_cache(weights.shape, weights.dtype, rows=1, room=seq)
    for tensor in (*cache.k, *cache.v):
        tensor.normal_(generator=generator)
    return cache


ARM: Mapping[str, Callable[[Weights, int, Path], Step]] = {
    "autosel": _autosel,
    "autosel, 16 bits": partial(_autosel, packed=False),
    "eager": _eager,
    "compile": _compile,
    "torchao": _eager,
    "torchao, compiled": _compile,
    "llama.cpp": _llama_cpp,
    "llama.cpp as installed": partial(_llama_cpp, flash=False),
}


# --- a GGUF of the same tensors --------------------------------------------------------------------------------------


def quantised_file(weights: Weights, folder: Path, file_type: str) -> Path:
    """Let llama.cpp write the model in one of its FILE_TYPES. It puts tied embeddings in Q6_K unless all is Q8_0."""
    plain, path = folder / "model.gguf", folder / f"model-{file_type}.gguf"
    if path.exists():
        return path
    import llama_cpp as L  # noqa: N812

    print(f"writing {path}", file=sys.stderr, flush=True)
    if not plain.exists():
        write_gguf(weights, plain)
    L.llama_backend_init()
    _be_quiet(L)
    wanted = L.llama_model_quantize_default_params()
    wanted.nthread, wanted.ftype = torch.get_num_threads(), getattr(L, f"LLAMA_FTYPE_MOSTLY_{file_type.upper()}")
    if L.llama_model_quantize(str(plain).encode(), str(path).encode(), wanted):
        raise RuntimeError(f"llama.cpp could not write {path}")
    return path


def write_gguf(weights: Weights, path: Path) -> None:
    """Write a bf16 GGUF file of a Llama model, with a vocabulary size but no vocabulary.

    Rows of queries and keys are reordered for llama.cpp's rope: neighbours in pairs.
    """
    import gguf

    s = weights.shape
    if s.family != "llama":
        raise SystemExit(f"cannot write a GGUF file of {s.family}, only of llama: select other arms with --arm")
    out = gguf.GGUFWriter(str(path), "llama")
    out.add_block_count(s.layers)
    out.add_context_length(s.max_context)
    out.add_embedding_length(s.d)
    out.add_feed_forward_length(s.I)
    out.add_head_count(s.Hq)
    out.add_head_count_kv(s.Hkv)
    out.add_key_length(s.D)
    out.add_value_length(s.D)
    out.add_rope_dimension_count(s.rope.rotary_dim)
    out.add_rope_freq_base(s.rope.theta)
    out.add_layer_norm_rms_eps(s.rms_eps)
    out.add_vocab_size(s.V)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    out.add_tokenizer_model("none")
    for name, tensor in _tensors(weights):
        if tensor.dim() == 1:
            out.add_tensor(name, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.int16).numpy().view(np.uint8)
            out.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _tensors(weights: Weights) -> Iterator[tuple[str, Tensor]]:
    s = weights.shape
    if s.rope.kind == "llama3":
        plain = torch.tensor(s.rope.theta) ** (-torch.arange(0, s.rope.rotary_dim, 2) / s.rope.rotary_dim)
        yield "rope_freqs.weight", plain / torch.tensor(s.rope.inverse_frequencies())
    names, heads = {theirs: name for name, theirs in (TOP | LAYER).items()}, {"attn_q": s.Hq, "attn_k": s.Hkv}
    for theirs, tensor in state(weights, tied=s.tied).items():
        part = theirs.removesuffix(".weight")
        if part in names:
            yield f"{names[part]}.weight", tensor
        else:
            _, _, layer, part = part.split(".", 3)
            name = names[part]
            yield f"blk.{layer}.{name}.weight", _paired(tensor, heads[name]) if name in heads else tensor


def _paired(w: Tensor, heads: int) -> Tensor:
    """Place rows j and j + D/2 of each head next to each other."""
    return w.view(heads, 2, -1, w.shape[-1]).transpose(1, 2).reshape(w.shape)


# --- output ----------------------------------------------------------------------------------------------------------


def steps(found: Mapping[str, Any]) -> str:
    """Format whole decode steps: each arm's median, also relative to autosel's."""
    part = f"{found['layers']} of {found['of_layers']} layers"
    form = found["file_type"] or found["dtype"]
    lines = [f"{Path(found['model']).name} {form}, {part}, on {found['device']}, {found['date']}", ""]
    lines += ["| context | arm | ms a step | over autosel | read rate |", "| --- | --- | --- | --- | --- |"]
    for row in found["rows"]:
        for name, one in row["arms"].items():
            lo, hi = one["interval"]
            ratio = f"{one['over_first']:.2f}x ({lo:.2f} .. {hi:.2f})" if one["over_first"] != 1 else ""
            beside = f"{row['read_gb_s']:.1f} GB/s"
            lines.append(f"| {row['seq']} | {name} | {one['median_ms']:.1f} | {ratio} | {beside} |")
    return "\n".join(lines)


def _versions() -> dict[str, str]:
    packages = ("transformers", "llama_cpp_python", "torchao")
    return {package: found for package in packages if (found := version_of(package))}


def _parsed() -> argparse.Namespace:
    parser = command_line.parser(__doc__)
    command_line.decoding(parser, seqs=(128, 2048), rounds=12)
    parser.add_argument(
        "--arm", action="append", choices=(*ARM, *IK), help="repeatable; ratios are relative to the first"
    )
    parser.add_argument(
        "--split",
        type=float,
        default=0.0,
        metavar="GB/s",
        help="separate rows below and above this read rate",
    )
    parser.add_argument("--gguf", metavar="DIR", help="store the GGUF files in DIR and reuse them (same layers only)")
    parser.add_argument("--file-type", choices=FILE_TYPES, default="", help="let llama.cpp quantise the model")
    parser.add_argument("--format", choices=TORCHAO_FORMATS, default="", help="round the model to codes")
    parser.add_argument("--ik", metavar="DIR", help="a checkout of ik_llama.cpp with its shared library, built in DIR")
    options = parser.parse_args()
    if options.format and (options.file_type or models.is_gguf(Path(options.model))):
        parser.error("--format rounds a model that is not quantised: leave out --file-type, and name no GGUF file")
    if not options.ik and set(IK) & set(options.arm or ()):
        parser.error("the arms of ik_llama.cpp need --ik DIR")
    return options


if __name__ == "__main__":
    sys.exit(main())
