"""Test checkpoints that `quantise` writes: the documented bits, the same weights when read, nothing half-written."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from autosel import models
from autosel.cli.main import run
from autosel.cli.quantise import FORMATS as SPELT
from autosel.decode import checkpoint
from autosel.decode.checkpoint import FORMATS, PROJECTION, write_checkpoint
from autosel.decode.run import Plan
from autosel.decode.safetensors import open_folder
from autosel.decode.weights import load_weights
from autosel.errors import BadConfig, UsageError
from autosel.ops.weight import Weight, quantise
from tests import steps
from tests.null.checkpoints import UP, edit_config

GROUP = {name: int(name.partition("-g")[2] or 0) for name in FORMATS}


def write_model(folder: Path, dtype: str = "bfloat16") -> Path:
    """Write a model with rows of 128 and 256 weights, in two files, with a tokenizer and a licence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "WIDTH", 128)
        patch.setattr(steps, "INNER", 256)
        patch.setattr(steps, "HEAD", {"llama": 32})
        steps.write_model(folder, "llama")
    kind = getattr(torch, dtype)
    tensors = {name: t.to(kind) for name, t in load_file(folder / "model.safetensors").items()}
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    edit_config(folder, torch_dtype=dtype)
    for name in ("tokenizer.json", "tokenizer_config.json", "LICENSE", "pytorch_model.bin", "notes.md"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m")


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def code(words: Tensor, row: int, k: int, bits: int) -> int:
    """Return a code by the documented layout: the first in the lowest bits of a word, plus half the range."""
    per = 32 // bits
    word = int(words[row, k // per]) & 0xFFFFFFFF
    return (word >> bits * (k % per) & (1 << bits) - 1) - (1 << bits - 1)


def test_the_command_offers_what_is_written() -> None:
    assert SPELT == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_every_bit_has_its_documented_place(tmp_path: Path, source: Path, name: str) -> None:
    made = write_checkpoint(source, name, tmp_path / "q")
    plain, found = stored(source), stored(tmp_path / "q")
    bits, group, zeros = int(name.partition("-")[0][-1]), GROUP[name], name.startswith("u")
    words, scales = found[f"{UP}.weight_packed"], found[f"{UP}.weight_scale"]
    w = plain[f"{UP}.weight"].double()
    n, k = w.shape
    assert (words.dtype, words.shape) == (torch.int32, (n, k * bits // 32))
    assert (scales.dtype, scales.shape) == (torch.bfloat16, (n, k // (group or k)))
    assert found[f"{UP}.weight_shape"].tolist() == [n, k]
    for row in (0, n - 1):
        for at in (0, 1, 7, 8, 31, 32, k - 1):
            scale = float(scales[row, at // (group or k)])
            most = (1 << bits - 1) - 1
            zero = code(found[f"{UP}.weight_zero_point"].T, at // group, row, bits) if zeros else 0
            assert code(words, row, at, bits) == max(-most - 1, min(most, round(float(w[row, at]) / scale) + zero))
    others = {n: t for n, t in plain.items() if not PROJECTION.search(n)}
    assert all(torch.equal(found[n], t) for n, t in others.items())
    assert len(found) == len(others) + (4 if zeros else 3) * (len(plain) - len(others))
    each = 16 / group + (bits / group if zeros else 0) if group else 16 * (n + 0.0) / (n * k)
    assert made.bits_per_weight == pytest.approx(bits + each, abs=0.2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_written_checkpoint_is_read_with_the_codes_of_a_rounding_run(tmp_path: Path, name: str, dtype: str) -> None:
    source = write_model(tmp_path / "m", dtype)
    write_checkpoint(source, name, tmp_path / "q")
    read, plain = models.load(tmp_path / "q"), models.load(source)
    assert (read.stored, read.table) == (name, "plain")
    found = load_weights(Plan(model=read, weights=str(tmp_path / "q"), dtype=read.dtype))
    other = load_weights(Plan(model=plain, weights=str(source), dtype=plain.dtype))
    for i, layer in enumerate(found.layers):
        for part in ("qkv", "o", "gate", "up", "down"):
            ours, rounded = getattr(layer, part), quantise(getattr(other.layers[i], part), name)
            assert isinstance(ours, Weight) and isinstance(rounded, Weight)
            if GROUP[name]:  # a scale per row is fp32 in a run, and the model's dtype in a file
                assert torch.equal(ours.codes, rounded.codes) and torch.equal(ours.scales, rounded.scales)
            assert float((ours.exact() - rounded.exact()).abs().max()) <= float(rounded.scales.double().max())
    assert torch.equal(found.embedding, other.embedding) and torch.equal(found.head, other.head)  # type: ignore[arg-type]


def test_the_folder_is_complete_and_no_other_file_is_copied(tmp_path: Path, source: Path) -> None:
    made = write_checkpoint(source, "int4-g32", tmp_path / "q")
    names = sorted(path.name for path in (tmp_path / "q").iterdir())
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names == sorted(
        [*shards, "LICENSE", "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    )
    index = json.loads((tmp_path / "q" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.bytes == sum(t.nbytes for t in stored(tmp_path / "q").values())
    assert set(index["weight_map"]) == set(stored(tmp_path / "q"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "q"]
    for entry in open_folder(tmp_path / "q").entries.values():
        assert entry.start % 8 == 0 or entry.dtype != "I64"  # elements lie at multiples of their size


def test_one_file_stays_one_file(tmp_path: Path, source: Path) -> None:
    save_file(stored(source), tmp_path / "one.safetensors")
    for path in source.glob("model*"):
        path.unlink()
    (tmp_path / "one.safetensors").rename(source / "model.safetensors")
    write_checkpoint(source, "int8-row", tmp_path / "q")
    assert [path.name for path in (tmp_path / "q").glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_a_stopped_writer_leaves_nothing(tmp_path: Path, source: Path, error: Any) -> None:
    seen: list[str] = []

    class Stops:
        def stage(self, name: str, detail: str, done: int, total: int) -> None:
            seen.append(detail)
            if done == 5:
                raise error

    with pytest.raises(type(error) if isinstance(error, OSError) else error):
        write_checkpoint(source, "int4-g32", tmp_path / "q", Stops())
    assert len(seen) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_existing_folder_is_refused_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_model(tmp_path / "m")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "kept").write_text("x")
    assert run(["quantise", str(source), "--format", "int4-g32", "-o", str(tmp_path / "q")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "q").iterdir()] == ["kept"]


def test_the_command_writes_and_tells_sizes(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantise", str(source), "--format", "int4-g128", "-o", str(tmp_path / "q")]
    assert run(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "int4-g128, 4.125 bits per weight in layers" in out and "run --model" in out
    assert run([*words[:-1], str(tmp_path / "r"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"folder", "format", "source_bytes", "bytes", "bits_per_weight"}
    assert told["bytes"] < told["source_bytes"]


def changed(folder: Path, name: str, tensor: Tensor) -> None:
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        if name in held:
            save_file(held | {name: tensor}, file)


def without(folder: Path, name: str) -> None:
    for file in folder.glob("*.safetensors"):
        held = load_file(file)
        if held.pop(name, None) is not None:
            save_file(held, file)
    index = folder / "model.safetensors.index.json"
    named = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {n: f for n, f in named.items() if n != name}}))


def with_scheme(folder: Path) -> None:
    edit_config(folder, quantization_config=checkpoint.scheme(checkpoint.find_weight_format("int4-g32")))


@pytest.mark.parametrize(
    ("spoil", "format", "told"),
    [
        (with_scheme, "int4-g32", "is in codes already"),
        (lambda m: changed(m, f"{UP}.weight", torch.full((256, 128), float("nan"))), "int8-row", "has the weight nan"),
        (lambda m: (m / "model-00002-of-00002.safetensors").unlink(), "int8-row", "lacks model-00002-of-00002"),
        (lambda m: without(m, f"{UP}.weight"), "int8-row", "lacks model.layers.1.mlp.up_proj.weight"),
    ],
    ids=["in codes", "not finite", "no file", "no tensor"],
)
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, spoil: Any, format: str, told: str) -> None:
    source = write_model(tmp_path / "m")
    spoil(source)
    with pytest.raises(BadConfig, match=told):
        write_checkpoint(source, format, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_a_pipe_is_no_file_of_a_tokenizer_and_is_never_opened(tmp_path: Path, source: Path) -> None:
    (source / "tokenizer.json").unlink()
    os.mkfifo(source / "tokenizer.json")
    write_checkpoint(source, "int8-row", tmp_path / "q")
    assert not (tmp_path / "q" / "tokenizer.json").exists()


def test_groups_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = steps.write_model(tmp_path / "m", "llama")  # rows of 64 and 96
    with pytest.raises(BadConfig, match="not whole groups of 128"):
        write_checkpoint(source, "int4-g128", tmp_path / "q")
    write_checkpoint(source, "int8-row", tmp_path / "q")


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "m")
    usage = checkpoint.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UsageError, match="are free on its disk"):
        write_checkpoint(source, "int4-g32", tmp_path / "q")


def test_the_new_files_can_be_read_by_others_as_the_umask_allows(tmp_path: Path, source: Path) -> None:
    write_checkpoint(source, "int4-g32", tmp_path / "q")
    umask = os.umask(0)
    os.umask(umask)
    mode = stat.S_IMODE((tmp_path / "q" / "config.json").stat().st_mode)
    assert mode == 0o666 & ~umask
