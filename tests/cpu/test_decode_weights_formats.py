"""Test decoding on weights in a format: PyTorch's tokens on the same codes, op by op and as a whole step, and a
certificate with the format's bytes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from autosel import devices, dispatch, fingerprint, models
from autosel.certify.certificate import decode
from autosel.certify.model import trouble
from autosel.decode import weights as loading
from autosel.decode.cache import make_cache
from autosel.decode.eager import Eager
from autosel.decode.generate import prefill
from autosel.decode.measure import measure
from autosel.decode.model import Decoder
from autosel.decode.reference import Reference
from autosel.decode.run import FORMS, AskedStep, Chain, Plan
from autosel.decode.scene import judged
from autosel.decode.step import Place, write_step
from autosel.decode.team import write_team
from autosel.decode.weights import Weights, arena_bytes, baseline_bytes, load_weights, memory_need
from autosel.formats import WEIGHT_FORMATS
from autosel.models.config import read_config
from autosel.models.shape import ModelShape
from autosel.models.workloads import step as listed_step
from autosel.ops import eager_stored, weight
from autosel.ops.weight import Weight
from autosel.values import Workload
from tests import drawn
from tests.null.test_decode_gguf import MIXES, mixed
from tests.verbs import verb

FORMATS = [name for name in WEIGHT_FORMATS if name != "plain"]
TINY = Path(__file__).resolve().parents[1] / "stored" / "462cf5c" / "tiny" / "config.json"
HELD = 40
HALF = drawn.share([(1, 1.0), (1, 3.5), (3, 3.5), (3, 1.0)], days=2)  # rows and scales, both of each every day


def model(name: str, **changes: Any) -> ModelShape:
    return dataclasses.replace(read_config(TINY), weight=name, **changes)


def weights(name: str, **changes: Any) -> Weights:
    return load_weights(Plan(model=model(name, **changes), seq=64))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_stored_in_the_format_and_norms_are_not(name: str, tied: bool) -> None:
    found = weights(name, tied=tied)
    assert all(isinstance(w, Weight) == (len(w.shape) == 2) for w in found.named.values())
    held = sum(w.nbytes for w in found.named.values())
    assert held == found.bytes == found.shape.weight_bytes("bf16")
    assert held <= arena_bytes(found.shape, "bf16")
    plain = weights("plain", tied=tied)
    half_filled = found.shape.d < 256 and "6_k" in name  # blocks of 256
    assert held < (0.9 if half_filled else 0.6) * plain.bytes
    embedding = found.look_up("embedding", torch.tensor([3, 1]))
    assert torch.allclose(embedding.float(), plain["embedding"][[3, 1]].float(), atol=0.05)


def test_weights_that_are_rounded_when_loaded_take_little_more_memory_than_their_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Load a model with large tables: some rows at a time are in bf16."""
    monkeypatch.setattr(loading, "BLOCK", 65521)  # random weights are repeated from a block of them
    shape = model("int4-g128", V=16384, d=1024, I=2048, layers=12, layer_types=("full",) * 12, tied=False)
    host = devices.named(devices.HOST)
    host.forget_peak()
    before = host.peak_bytes()
    found = load_weights(Plan(model=shape, seq=64))
    table = shape.V * shape.d * 2
    assert 0.9 * found.bytes <= host.peak_bytes() - before <= found.bytes + 0.6 * table


@pytest.mark.parametrize("form", ["ops", "whole"])
@pytest.mark.parametrize(("rows", "scale"), HALF)
def test_logits_are_within_the_bound_of_the_exact_weights(form: str, rows: int, scale: float) -> None:
    check_logits(form, rows, weights("int8-row", embedding_scale=scale))


def check_logits(form: str, rows: int, found: Weights) -> None:
    decoder, fp = Decoder(found), fingerprint.take("cpu")
    prompts = [[(7 * i + r) % found.shape.V for i in range(HELD)] for r in range(rows)]
    with torch.inference_mode():
        caches = [make_cache(found.shape, "bf16", rows=rows, room=HELD + 8) for _ in range(2)]
        for cache in caches:
            prefill(decoder, cache, prompts)
        place = Place.at(torch.arange(rows), [HELD] * rows)
        listed = write_step(decoder, caches[0], place)
        step = write_team(listed, fp) if form == "whole" else listed
        step.run()
        tokens = place.tokens[:, None]
        theirs = Eager(found).logits(tokens, caches[1], HELD)
        exact = Reference(found, torch.float32).logits(tokens, caches[0], HELD)
    error, bound = judged(step.logits, theirs, exact, "bf16")
    assert error <= bound


@pytest.mark.parametrize("step", ["ops", "whole"])
@pytest.mark.parametrize("name", drawn.share(["int4-g128", "q4_1", "int8-row", "uint4-row"], days=2))
def test_a_run_without_a_baseline_makes_no_form_of_a_weight_for_it(
    name: str, step: AskedStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    monkeypatch.setattr(eager_stored, "_held", lambda w, dtype: made.append(w.format.name))
    widened = Weight.dequantised

    def dequantised(self: Weight, dtype: torch.dtype) -> torch.Tensor:
        made.extend(["a whole matrix"] if self.shape[0] > 80 else [])  # more rows than the prompt has tokens
        return widened(self, dtype)

    monkeypatch.setattr(weight, "PART", 4096)
    monkeypatch.setattr(Weight, "dequantised", dequantised)
    plan = Plan(model=model(name), seq=80, iters=3, warmup=1, step=step, baseline=False)
    run = measure(plan, load_weights(plan))
    assert made == [] and run.baseline is None and run.tokens_equal == run.tokens_checked == 3
    assert run.max_logit_error <= run.logit_bound


def test_a_whole_step_serves_undecided_ops_whose_weights_pytorch_would_convert() -> None:
    plan = Plan(model=model("int4-g128"), seq=24, iters=2, warmup=0, baseline=False)
    run = measure(plan, load_weights(plan))
    assert run.chosen.form == "whole" and "PyTorch would convert" in run.chosen.note
    told = measure(dataclasses.replace(plan, step="ops"), load_weights(plan)).chosen
    assert told.form == "ops" and "converts the weights of undecided ops" in told.note


def test_without_a_baseline_less_memory_is_needed() -> None:
    plan = Plan(model=model("int4-g128"), seq=24)
    saved = memory_need(plan) - memory_need(dataclasses.replace(plan, baseline=False))
    assert saved == baseline_bytes(plan) > 0


Others = tuple[tuple[str, str], ...]
# The default format, and the matrices in others: as in a file of llama.cpp, and as no file has it. One a day: the tests
# of a mix share a build of the team, which takes long.
MIX: tuple[str, Others] = drawn.todays(
    (
        ("q4_k", (("embedding", "q8_0"), ("0.qkv", "q6_k-m"), ("0.down", "q6_k"), ("1.o", "plain"))),
        (
            "int4-g32",
            (("embedding", "q8_0"), ("0.o", "plain"), ("1.gate", "q4_1"), ("1.up", "q4_1"), ("1.down", "uint4-g64")),
        ),
    )
)
MIXED = sorted({MIX[0], *(name for _, name in MIX[1])} - {"plain"})


@pytest.mark.parametrize(("rows", "scale"), HALF)
def test_a_step_on_a_mix_of_formats_is_within_the_bound_of_the_exact_weights(rows: int, scale: float) -> None:
    """Run matrices in several formats, by one build of the team; each thread counts in one of them at a time."""
    check_logits("whole", rows, weights(MIX[0], embedding_scale=scale, others=MIX[1]))


@pytest.mark.parametrize("name", MIXED)
def test_a_table_of_codes_is_read_with_one_rounding(name: str) -> None:
    found = weights(MIX[0], others=(*MIX[1][1:], ("head", "q8_0"), ("embedding", name)), tied=False)
    decoder, fp = Decoder(found), fingerprint.take("cpu")
    with torch.inference_mode():
        cache = make_cache(found.shape, "bf16", rows=1, room=HELD)
        prefill(decoder, cache, [[1, 2, 3]])
        step = write_team(write_step(decoder, cache, Place.at(torch.tensor([7]), [3])), fp)
        for token in range(64):
            step.ops.place.tokens.fill_(token)
            step.part(0, 1)
            assert torch.equal(step.ops.calls[0]["out"], found.look_up("embedding", torch.tensor([token]))), token


@pytest.mark.parametrize("rows", [1, 3])
def test_tune_lists_every_op_that_a_mixed_file_uses(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a prompt and a step in every chain on a file like Q4_K_M, and compare the ops with those that tune lists."""
    path = mixed(tmp_path / "wide.gguf", *MIXES["Q4_K_M"][:2])
    shape, used, board = models.load(path), set[Workload](), import_module("autosel.dispatch.board")
    resolve = board.resolve

    def heard(op: Any, w: Workload, *rest: Any, **more: Any) -> Any:
        used.add(w)
        return resolve(op, w, *rest, **more)

    monkeypatch.setattr(board, "resolve", heard)
    decoder = Decoder(load_weights(Plan(model=shape, weights=str(path), seq=64)))
    with torch.inference_mode(), dispatch.use(tmp_path):
        cache = make_cache(shape, "bf16", rows=rows, room=HELD + 8)
        prefill(decoder, cache, [list(range(HELD))] * rows)
        place = Place.at(torch.arange(rows), [HELD] * rows)
        for attn, mlp in itertools.product(FORMS, FORMS):
            write_step(decoder, cache, place, Chain(attn=attn, mlp=mlp)).run()
    found = {w.bucket for w in used}
    assert {
        n.workload.bucket for n in listed_step(shape, batch=rows, context=HELD + 1, dtype="bf16", prompt=HELD)
    } >= found
    assert {w.weight_format.name for w in used} == {"plain", "q4_k", "q6_k", "q6_k-m"}
    for op in ("linear", "norm_qkv"):
        assert len({w.weight_format.name for w in used if w.op == op and w["M"] == rows}) > 1, op


def test_a_run_is_certified_with_the_bytes_of_its_format(tmp_path: Path) -> None:
    home, file = tmp_path / "home", tmp_path / "mine.jsonl"
    common = ("--seq", "32", "--iters", "10", "--warmup", "2", "--certify", str(file))
    for name in ("plain", "int8-row"):
        verb("run", "--model", str(TINY), "--format", name, *common, home=home)
    plain, made = (json.loads(line) for line in file.read_text().splitlines())
    assert "weight" not in plain["architecture"] and made["architecture"]["weight"] == "int8-row"
    assert made["weights_bytes"] < 0.6 * plain["weights_bytes"]
    assert made["bytes_per_step"] < 0.6 * plain["bytes_per_step"]
    assert all("weight=int8-row" in o["workload"] for o in made["per_op"].values() if o["op"] in ("linear", "lm_head"))
    assert "--format int8-row" in made["repro_cmd"]
    assert verb("verify", str(file), home=home)
    stated = decode(file.read_bytes().splitlines()[1])
    assert trouble(stated) == ""
    assert "bytes_per_step" in trouble(dataclasses.replace(stated, architecture=plain["architecture"]))


def test_a_checkpoint_rounded_to_a_format_requires_a_text(tmp_path: Path) -> None:
    from autosel.certify.derive import lossy

    assert lossy("bf16", "int8-row", "random") == ""
    assert lossy("bf16", "int8-row", "/some/checkpoint") == "int8-row"
    assert lossy("bf16", "plain", "/some/checkpoint") == ""
    assert lossy("fp8_e4m3") == "fp8_e4m3"
