"""Write Inductor's lookup table, and find each row by Inductor's own lowering of its product."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from autosel import models, ops
from autosel.cli.main import run
from autosel.errors import BadConfig, UsageError
from autosel.fingerprint import known
from autosel.integrations.engines import ask, inductor
from autosel.integrations.engines import folder as folders
from autosel.integrations.engines.rows import Target, products
from autosel.values import Arm, Decision, PythonRecipe
from tests.null import test_dispatch

MODEL = models.load("llama-1b")


def target(*decisions: Decision, derives: bool = True, dtype: str = "bf16") -> Target:
    return Target(fp=known.load("h200"), decisions=decisions, model=MODEL, dtype=dtype, derives=derives)


def decision(number: int, m: int, candidate: str, backend: str, knobs: dict[str, int], **traits: bool) -> Decision:
    """Return a decision for llama-1b's qkv product on the device of `target`."""
    qkv = products(MODEL)[0]
    w = ops.find("linear").workload("bf16", {"M": m, "N": qkv.n, "K": qkv.k}, **traits)
    recipe = PythonRecipe(target="x:x")
    arm = Arm(candidate=candidate, backend=backend, recipe=recipe, knobs=knobs, digest=candidate)
    return test_dispatch.decision(w, arm, id=number)


def test_inductors_own_lowering_finds_every_row(tmp_path: Path) -> None:
    """Compare each key with the one that Inductor makes of the product, and each template and hash with Inductor's."""
    qkv = decision(7, 1, "torch:linear", "TORCH", {})
    made = inductor.export(target(qkv), tmp_path)
    assert made.counts["measured"] == 1 and made.counts["derived"] == len(made.rows) - 1
    heard = ask.ask("inductor", tmp_path, folders.read(tmp_path))
    assert heard.version == torch.__version__ == made.engine_version
    assert heard.there == len(made.rows)
    if not torch.cuda.is_available():
        assert heard.here == 0 and all("CUDA" in row.why for row in heard.rows)


def test_rows_that_inductor_would_not_find_are_not_counted(tmp_path: Path) -> None:
    """Miss three rows: a renamed key, a removed template, and a stale hash."""
    made = inductor.export(target(), tmp_path)
    table = json.loads((tmp_path / inductor.FILE).read_text())
    keys = list(table)
    table["moved"] = table.pop(keys[0])
    table[keys[1]][0]["template_id"] = "triton::gone"
    table[keys[2]][0]["template_hash"] = "0" * 64
    (tmp_path / inductor.FILE).write_text(json.dumps(table))
    few = dataclasses.replace(made, rows=made.rows[:4])
    assert folders.changed(tmp_path, made) == (inductor.FILE,)
    assert [row.there for row in ask.ask("inductor", tmp_path, few).rows] == [False, False, False, True]


def test_each_row_has_a_source(tmp_path: Path) -> None:
    tiles = {"tile_rows": 128, "tile_depth": 64, "columns": 16, "stages": 4, "split_k": 2}
    decisions = (
        decision(1, 1, "torch:linear", "TORCH", {}),
        decision(2, 16, "triton:gemm", "TRITON", tiles, residual=True),
        decision(3, 32, "cutlass:gemm", "CUTLASS", {}),
    )
    made = inductor.export(target(*decisions, derives=False), tmp_path)
    said = {row.label: row for row in made.rows}
    qkv = products(MODEL)[0]
    one, carried, other, none = (said[f"qkv M{m} N{qkv.n} K{qkv.k}"] for m in (1, 16, 32, 64))
    assert (one.source, one.decision, one.value) == ("measured", 1, {"template_id": "aten::mm"})
    assert (carried.source, carried.decision) == ("carried", 2)
    assert carried.value["BLOCK_N"] == 128 and carried.value["num_stages"] == 4 and carried.value["BLOCK_M"] == 16
    assert (other.source, other.value) == ("default", {"template_id": "aten::mm"}) and "cutlass:gemm" in other.reason
    assert (none.source, none.value, none.decision) == ("default", {"template_id": "aten::mm"}, None)
    assert json.loads((tmp_path / folders.MANIFEST).read_text())["sources"]["derived"] == (
        "derived by formula, not measured"
    )


def test_tiles_fit_the_shared_memory_of_the_device(tmp_path: Path) -> None:
    for name in ("h200", "rtx-5070-ti", "l4"):
        asked = dataclasses.replace(target(), fp=known.load(name))
        for row in inductor.export(asked, tmp_path / name).rows:
            v = row.value
            assert (v["BLOCK_M"] + v["BLOCK_N"]) * v["BLOCK_K"] * 2 * v["num_stages"] <= asked.facts.smem_per_cta
            assert v["EVEN_K"] == (row.ask["k"] % v["BLOCK_K"] == 0)


def test_use_has_inductor_read_the_table_and_refuses_a_folder_without_one(tmp_path: Path) -> None:
    from torch._inductor import config
    from torch._inductor.lookup_table import LookupTableChoices
    from torch._inductor.virtualized import V

    with pytest.raises(BadConfig, match="no export"):
        inductor.use(tmp_path)
    assert config.lookup_table.table is None
    made = inductor.export(target(), tmp_path)
    with config.patch({"lookup_table.table": None, "max_autotune_gemm": False}):
        before = V.choices
        try:
            assert inductor.use(tmp_path) == len(made.rows)
            assert isinstance(V.choices, LookupTableChoices) and config.max_autotune_gemm
            assert config.lookup_table.table == json.loads((tmp_path / inductor.FILE).read_text())
        finally:
            V.set_choices_handler(before)


def test_an_fp8_model_has_no_rows_in_inductors_table(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fp8_e4m3"):
        inductor.export(target(dtype="fp8_e4m3"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_doctor_counts_what_inductor_would_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "x")
    assert run(["export", "--to", "inductor", "--fingerprint", "h200", "--model", "llama-1b", folder]) == 0
    assert "derived by formula, not measured" in capsys.readouterr().err
    code = run(["doctor", "--engine", "inductor", folder])
    said = capsys.readouterr().out
    rows = len(folders.read(Path(folder)).rows)
    if not torch.cuda.is_available():
        assert code == 1 and f"0 of {rows} rows would be loaded here" in said
    assert f"{rows} of {rows} rows are found on NVIDIA H200" in said
