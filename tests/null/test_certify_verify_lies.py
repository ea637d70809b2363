"""Test forged certificates in which every sum and the seal are recomputed: the model, the device and the clock reveal
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel import models
from autosel.certify import certificate as c
from autosel.certify import rerun
from autosel.certify.certificate import Certificate, encode
from autosel.certify.device import ceiling
from autosel.certify.store import BadCertificate
from autosel.certify.verify import not_checkable, verify, wrong
from autosel.fingerprint import known
from autosel.values import Workload
from tests.null import certificates
from tests.null.certificates import DRAFTED, READ, certificate, decode_run

HONEST = certificate(decode_run(iters=3))
rewritten = partial(certificates.rewritten, HONEST)


def times(made: Certificate, factor: float) -> dict[str, Any]:
    """Return samples and times to the first token of a run this many times as fast."""
    s = made.samples
    faster = {n: tuple(int(ns / factor) for ns in getattr(s, n)) for n in ("optimised_ns", "baseline_ns")}
    return {
        "samples": dataclasses.replace(s, **faster),
        "ttft_ms": made.ttft_ms / factor if made.ttft_ms else None,
        "baseline_ttft_ms": made.baseline_ttft_ms / factor if made.baseline_ttft_ms else None,
    }


def op(label: str, **fields: Any) -> dict[str, Any]:
    return {"per_op": {**HONEST.per_op, label: dataclasses.replace(HONEST.per_op[label], **fields)}}


def test_an_honest_certificate_is_believed() -> None:
    assert wrong(rewritten()) == ""


def test_two_layers_cannot_be_sold_as_the_whole_model_a_thousand_times_as_fast(tmp_path: Path) -> None:
    """Rewrite layers, name, samples and bytes: an earlier version verified 2,550 tok/s as the whole model's."""
    part = certificate(decode_run(layers=2, step_ms=22.0, iters=20))
    whole = c.Layers(run=16, of=16)
    faster = {"bytes_per_step": part.bytes_per_step // 1000, **times(part, 1000)}
    lie = certificates.rewritten(part, layers=whole, model="llama-1b", **faster)
    assert lie.tokens_per_sec > 40_000
    path = tmp_path / "lie.jsonl"
    path.write_bytes(encode(lie) + b"\n")
    with pytest.raises(BadCertificate) as refused:
        verify(path)
    assert refused.value.why.startswith("bytes_per_step: ") and "16 layers of llama-1b give 2538" in refused.value.why


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "all layers": ({"layers": c.Layers(run=32, of=32)}, "layers: 32; "),
    "fewer bytes": ({"bytes_per_step": HONEST.bytes_per_step - 2}, "bytes_per_step: "),
    "more FLOPs": ({"flops_per_step": 2 * HONEST.flops_per_step}, "flops_per_step: "),
    "smaller weights": ({"weights_bytes": HONEST.weights_bytes // 2}, "weights_bytes: "),
    "a smaller cache": ({"kv_cache_bytes": HONEST.kv_cache_bytes // 2}, "kv_cache_bytes: "),
    "another size": ({"shape": dataclasses.replace(HONEST.shape, I=4096)}, "shape.I: 4096; "),
    "another prompt": ({"shape": dataclasses.replace(HONEST.shape, prompt=1)}, "shape.prompt: 1; "),
    "a smaller model of that name": (
        {"architecture": {**(HONEST.architecture or {}), "I": 4096}},
        "architecture: I differs from llama-1b's",
    ),
    "no model": ({"architecture": {**(HONEST.architecture or {}), "Hkv": 5}}, "architecture: not a possible model"),
    "a nameless device": ({"identity": {"kind": "cpu"}}, "identity: it does not describe a device"),
    "other hardware": ({"hw_id": "ab" * 32}, "hw_id: "),
    "other software": ({"environment": {"torch": "9.9"}}, "env_id: "),
    "another device": ({"device": "A faster CPU"}, "device: "),
    "another instruction set": ({"sm": "avx512bf16"}, "sm: "),
    "more cache": ({"cache_bytes": 1 << 40}, "cache_bytes: "),
    "more cache, by its identity": (
        {"cache_bytes": 1 << 40, "identity": {**(HONEST.identity or {}), "l3_bytes": 1 << 40}},
        "cache_bytes: 1099511627776; no such device",
    ),
    "faster memory": (
        {**times(HONEST, 100), "read_bytes_per_s": 100 * READ, "read_probes": (99 * READ,)},
        "read_bytes_per_s: 4e+03 GB/s; no such device reads 400 GB/s",
    ),
    "faster arithmetic": ({"peak_flops": 1e13}, "peak_flops: "),
    "tokens from nowhere": (
        {"samples": dataclasses.replace(HONEST.samples, kept=(4, 4, 4))},
        "samples: 3 counts of kept tokens, with 0 drafted a step",
    ),
    "more equal than checked": (
        {"verification": dataclasses.replace(HONEST.verification, tokens_equal=4, tokens_open=-1)},
        "verification: 4 equal and -1 open of 3",
    ),
    "more checked than made": (
        {"verification": dataclasses.replace(HONEST.verification, tokens_checked=30, tokens_equal=30)},
        "verification: 30 tokens checked",
    ),
    "packed weights without a team": ({"options": {**HONEST.options, "saved_bytes": 1000}}, "bytes_per_step: "),
    "a page that is none": ({"options": {**HONEST.options, "page": "x"}}, "options: no run has these"),
    "a prompt in no time": ({"ttft_ms": 1.0}, "latency_ms: the prompt would read"),
    "no time at all": ({"ttft_ms": 0.0}, "ttft_ms"),
    "a time whose seconds are none": ({"ttft_ms": 5e-324}, "ttft_ms"),
    "calls that were not made": (op("gate_up", calls=8, served={"cpp:gate_up": 24}), "per_op: its calls multiply"),
    "a layer that does not attend": (op("attn", calls=15, served={"cpp:attn": 45}), "per_op: 15 calls of attention"),
    "an op by another name": (op("attn", op="rope"), "per_op: 'attn' runs 'rope'"),
    "no workload": (op("attn", workload="attn"), "per_op: 'attn' is not a workload's key"),
    "an op's bytes": (op("gate_up", bytes=100), "per_op: 'gate_up' bytes: 100"),
    "an op's FLOPs": (op("gate_up", flops=10**12), "per_op: 'gate_up' flops: "),
    "a wider weight": (
        op("lm_head", workload="lm_head/M1.V1.d2048/bf16", bytes=4096, flops=4096),
        "per_op: its calls multiply",
    ),
    "no zone": ({"timestamp": "2026-11-20T12:00:00"}, "timestamp: '2026-11-20T12:00:00' is not in UTC"),
    "no time of day": ({"timestamp": "yesterday"}, "timestamp: 'yesterday' is not a time"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_field_that_does_not_follow_is_named(lie: str) -> None:
    fields, why = LIES[lie]
    found = wrong(rewritten(**fields))
    assert found.startswith(why), found


@pytest.mark.parametrize("many", [1e308, 0.5, 66.0])
def test_a_number_of_tokens_that_no_step_gives_is_refused_in_an_earlier_version_too(many: float) -> None:
    """Test also versions before 6, which do not state the tokens of each step."""
    found = wrong(dataclasses.replace(HONEST, version=5, tokens_per_step=many))
    assert found.startswith("tokens_per_step: "), found


SAVED = HONEST.bytes_per_step // 5
PACKED: dict[str, Any] = {
    "options": {**HONEST.options, "saved_bytes": SAVED}, "bytes_per_step": HONEST.bytes_per_step - SAVED
}  # fmt: skip


def test_only_a_team_reads_packed_weights() -> None:
    assert wrong(rewritten(**PACKED)).startswith("options: saved_bytes in a step of mode 'eager.")
    assert wrong(rewritten(**PACKED, mode="team.t2.highest")) == ""


def test_packed_weights_are_read_op_by_op_where_a_kernel_has_a_layout_for_them() -> None:
    packed = op("gate_up", candidate="cpp:gate_up_packed", served={"cpp:gate_up_packed": 48})
    assert not wrong(rewritten(**PACKED, **packed)).startswith("options: saved_bytes")
    plain = {**PACKED, "options": {**PACKED["options"], "layout": "plain"}}
    assert wrong(rewritten(**plain, **packed)).startswith("options: saved_bytes")


def test_the_form_that_ran_must_be_the_requested_one() -> None:
    older = {k: v for k, v in HONEST.options.items() if k not in ("step", "layout")}
    assert wrong(rewritten(options=older)) == "", "in earlier versions only the command states them"
    for step in ("graph", "whole"):
        found = wrong(rewritten(options={**older, "step": step}))
        assert found == f"options: step {step!r} was requested, but mode is 'eager.t2.highest'"
    assert wrong(rewritten(options={**older, "step": "ops"})) == ""
    assert "one of auto, ops, graph, whole is expected" in wrong(rewritten(options={**older, "step": "packed"}))
    plain = {**older, "layout": "plain", "saved_bytes": SAVED}
    found = wrong(rewritten(**{**PACKED, "options": plain}, mode="team.t2.highest"))
    assert found.endswith("layout plain packs no weights")


def test_a_batch_that_the_arithmetic_cannot_have_computed_is_refused() -> None:
    """Limit large batches by arithmetic: weights are read once for all sequences, so memory does not limit them."""
    honest = certificate(decode_run(iters=3, batch=64, seq=128, step_ms=2000.0))
    assert wrong(honest) == ""
    assert "FLOP/s of at most" in wrong(certificates.rewritten(honest, samples=times(honest, 24)["samples"]))


def test_a_step_keeps_no_more_than_it_drafted_and_one() -> None:
    made = certificate(decode_run(**DRAFTED))
    assert made.tokens_per_step == 2.5 and wrong(certificates.rewritten(made)) == ""
    more = dataclasses.replace(made.samples, kept=(6, *made.samples.kept[1:]))
    assert wrong(certificates.rewritten(made, samples=more)).startswith("tokens_per_step: ")
    batch = {"shape": dataclasses.replace(made.shape, batch=2)}
    assert wrong(certificates.rewritten(made, **batch)).startswith("options: speculation with a batch")


def test_a_single_step_in_no_time_is_refused() -> None:
    """Refuse it, because peak tokens per second are computed from the fastest step."""
    samples = HONEST.samples
    times = (samples.optimised_ns[0] // 4, *samples.optimised_ns[1:])
    found = wrong(rewritten(samples=dataclasses.replace(samples, optimised_ns=times)))
    assert found.startswith("latency_ms: the fastest step, in twice its time, would read"), found


def test_one_token_compared_of_many_leaves_a_run_unverified() -> None:
    one = dataclasses.replace(HONEST.verification, tokens_checked=1, tokens_equal=1)
    found = rewritten(verification=one)
    assert not found.verification_ok and wrong(found) == ""


def test_a_date_in_the_future_is_refused_by_the_given_clock(tmp_path: Path) -> None:
    began = datetime.fromisoformat(HONEST.timestamp)
    path = tmp_path / "f.jsonl"
    path.write_bytes(encode(HONEST) + b"\n")

    assert verify(path, clock=lambda: began).certificates == 1
    behind = verify(path, clock=lambda: began - timedelta(minutes=9))
    assert behind.certificates == 1, "a clock that is behind must not refuse it"
    with pytest.raises(BadCertificate) as refused:
        verify(path, clock=lambda: began - timedelta(hours=1))
    assert refused.value.why.startswith("timestamp: 2026-11-20T12:00:00+00:00 is in the future; now it is 2026-11-20")
    far = rewritten(timestamp=datetime.max.replace(tzinfo=UTC).isoformat())
    assert "is in the future" in wrong(far)


MINE = dataclasses.replace(models.load("gemma3-1b"), name="mine", layers=6, layer_types=("sliding",) * 5 + ("full",))
SILENT: dict[str, Any] = {"version": 5, "architecture": None, "identity": None}


def of_mine(**changes: Any) -> Certificate:
    """Return a certificate of a model that is not a preset, in a version that does not describe its model."""
    return certificates.rewritten(certificate(decode_run(model=MINE, iters=3, layers=4)), **SILENT, **changes)


def test_a_checkpoints_figures_follow_from_the_architecture_it_states() -> None:
    made = certificate(decode_run(model=MINE, iters=3, layers=4))
    assert wrong(certificates.rewritten(made)) == ""
    half = certificates.rewritten(made, bytes_per_step=made.bytes_per_step // 2)
    assert wrong(half).startswith("bytes_per_step: ")
    assert wrong(rewritten(**SILENT)) == "", "a preset's architecture is known"
    assert wrong(rewritten(**SILENT, bytes_per_step=1000)).startswith("bytes_per_step: ")


@pytest.mark.parametrize("silence", ["architecture", "identity"])
def test_a_version_that_describes_its_model_must_do_so(silence: str) -> None:
    """Refuse it: a forged new certificate could pass as an old one, whose figures cannot all be derived."""
    assert wrong(rewritten(**{silence: None})).startswith(f"{silence}: none, in version 6")


def test_an_earlier_certificate_of_an_unknown_model_is_not_checkable(tmp_path: Path) -> None:
    path, made = tmp_path / "old.jsonl", of_mine()
    path.write_bytes(encode(made) + b"\n")
    found = verify(path)
    (told,) = found.unchecked
    assert (told.line, told.model, told.version) == (1, "mine[4/6 layers]", 5)
    assert told.fields == ("bytes_per_step", "flops_per_step", "weights_bytes")
    trouble = not_checkable(path, found)
    assert trouble is not None and trouble.exit_code == 5 and "1 of 1 certificate not checkable" in trouble.what
    assert "line 1, mine[4/6 layers], version 5: bytes_per_step, flops_per_step, weights_bytes" in trouble.why
    with pytest.raises(BadCertificate) as refused:
        verify(path, strict=True)
    assert refused.value.why.startswith("model: version 5 does not describe 'mine[4/6 layers]': bytes_per")


def test_a_file_of_checkable_certificates_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    for made in (rewritten(), rewritten(**SILENT)):
        path.write_bytes(encode(made) + b"\n")
        found = verify(path, strict=True)
        assert found.unchecked == () and not_checkable(path, found) is None


LIMITED: dict[str, tuple[Callable[[Certificate], dict[str, Any]], str]] = {
    "fewer bytes than its matrices have": (
        lambda made: {"bytes_per_step": made.bytes_per_step // 2, **times(made, 2)},
        "bytes_per_step: ",
    ),
    "more bytes than any family has": (lambda made: {"bytes_per_step": 2 * made.bytes_per_step}, "bytes_per_step: "),
    "fewer FLOPs": (lambda made: {"flops_per_step": made.flops_per_step // 2}, "flops_per_step: "),
    "more FLOPs": (lambda made: {"flops_per_step": 2 * made.flops_per_step}, "flops_per_step: "),
    "smaller weights": (lambda made: {"weights_bytes": made.weights_bytes // 3}, "weights_bytes: "),
    "a smaller cache": (lambda made: {"kv_cache_bytes": made.kv_cache_bytes // 2}, "kv_cache_bytes: "),
    "a smaller model": (lambda made: {"shape": dataclasses.replace(made.shape, I=16)}, "bytes_per_step: "),
    "no heads": (lambda made: {"shape": dataclasses.replace(made.shape, Hkv=0)}, "shape, layers: not a possible model"),
    "a million layers": (
        lambda made: {"layers": c.Layers(run=4, of=10**9), "model": f"mine[4/{10**9} layers]"},
        "shape, layers: not a possible model",
    ),
    "more layers": (lambda made: {"layers": c.Layers(run=6, of=6), "model": "mine"}, "bytes_per_step: "),
    "tokens that no step gives": (lambda _: {"tokens_per_step": 66.0}, "tokens_per_step: "),
}


@pytest.mark.parametrize("lie", LIMITED)
def test_limits_from_its_sizes_apply_to_an_unknown_model(lie: str) -> None:
    fields, why = LIMITED[lie]
    honest = of_mine()
    assert wrong(honest) == ""
    found = wrong(dataclasses.replace(honest, **fields(honest)))
    assert found.startswith(why), found


def test_a_rerun_derives_missing_fields_from_the_local_model() -> None:
    made = of_mine()
    plan = decode_run(model=MINE, layers=4).plan
    rerun.refuse_other_model(made, plan)
    with pytest.raises(rerun.NotReproduced) as refused:  # within the limits of its sizes, but not this model's
        rerun.refuse_other_model(dataclasses.replace(made, bytes_per_step=made.bytes_per_step + 2), plan)
    assert refused.value.why.startswith("bytes_per_step: ")
    rerun.refuse_other_model(HONEST, plan)  # which states its own architecture


@pytest.mark.parametrize("name", ["llama-1b", "qwen3-8b", "gemma3-4b"])
@given(st.data())
def test_every_workload_of_a_step_is_read_back_from_its_key(name: str, data: st.DataObject) -> None:
    batch, context = data.draw(st.integers(1, 64)), data.draw(st.integers(2, 30_000))
    for w in models.workloads(models.load(name), batch=batch, context=context):
        found = Workload.parse(w.key)
        assert (found.key, found.op, found.dims, found.dtype) == (w.key, w.op, w.dims, w.dtype)


@pytest.mark.parametrize(
    "key", ["", "attn", "attn/B1/bf15", "attn/B0/bf16", "a/B1/bf16/x", "attn/B1.C/bf16", "attn//bf16"]
)
def test_an_invalid_key_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="is not a workload's key"):
        Workload.parse(key)


@pytest.mark.parametrize("name", known.names())
def test_a_known_gpu_reaches_no_more_than_its_datasheet(name: str) -> None:
    gpu = known.load(name)
    made = dataclasses.replace(HONEST, sm=f"sm_{gpu.identity['cc'].replace('.', '')}", device=gpu.name)
    most, unknown = ceiling(made), ceiling(dataclasses.replace(made, device="a GPU of tomorrow"))
    assert gpu.rates["read_bytes_per_s"].value < most.read_bytes_per_s < unknown.read_bytes_per_s
    assert gpu.rates["bf16_matrix_flops"].value < most.flops < unknown.flops
    assert gpu.identity["l2_bytes"] < most.cache_bytes
