"""Test known devices: every figure has a source and is consistent; a malformed file is refused by field."""

from __future__ import annotations

import json

import pytest

from autosel import resources
from autosel.errors import BadConfig, UnknownName
from autosel.fingerprint import known

DEVICES = ("a100-80", "b200", "h100", "h200", "l4", "l40s", "rtx-4090", "rtx-5070-ti", "rtx-5080")


def figures(name):
    """Return (section, field, figure or None) of a file, read without `known`."""
    data = json.loads((resources.fingerprints() / f"{name}.json").read_text())
    sections = {**data["datasheet"], "estimated": data["estimated"], "measured": data["measured"]}
    for section, fields in sections.items():
        for field, figure in fields.items():
            yield section, field, figure


def test_the_nine_devices_load_and_differ():
    assert known.names() == DEVICES
    for name in DEVICES:
        fp = known.load(name)
        assert fp.kind == "cuda" and fp.source == f"{name}.json" and len(fp.hw_id) == 64
    assert len({known.load(name).hw_id for name in DEVICES}) == len(DEVICES), "two share an identity"


@pytest.mark.parametrize("name", DEVICES)
def test_every_figure_has_a_source_and_no_estimate_is_filed_as_measured(name):
    for section, field, figure in figures(name):
        if section == "measured" and figure is None:
            continue
        assert set(figure) - {"spread"} == {"value", "unit", "source"}, field
        if section == "estimated":
            assert figure["source"].startswith(("estimate: ", "derived: ")), field
        assert section != "measured" or "estimate" not in figure["source"], field


@pytest.mark.parametrize("name", DEVICES)
def test_figures_agree_with_each_other(name):
    fp = known.load(name)
    rate = {key: r.value for key, r in fp.rates.items()}
    assert 0.8 <= rate["read_bytes_per_s"] / rate["peak_read_bytes_per_s"] <= 0.99
    assert rate["l2_bytes_per_s"] > 1.5 * rate["read_bytes_per_s"]
    assert 0.35e-6 <= rate["dram_latency_s"] <= 1.2e-6
    # Tensor rate = SMs x FLOP a clock x a clock between base and a little above boost.
    clock = rate["peak_bf16_flops"] / (fp.identity["sm_count"] * fp.identity["matrix_flop_per_clock_sm"])
    assert 0.9 <= clock / fp.identity["sm_clock_max_hz"] <= 1.01
    assert rate["sm_clock_hz"] <= fp.identity["sm_clock_max_hz"]
    if "peak_fp8_flops" in rate:
        assert rate["peak_fp8_flops"] == pytest.approx(2 * rate["peak_bf16_flops"], rel=0.02)
    # Datasheet bandwidth = bus width x a data rate that the memory of that year has (2.4 to 9.6 Gbit/s a pin for HBM,
    # up to 30 for GDDR).
    pin = rate["peak_read_bytes_per_s"] * 8 / fp.identity["memory_bus_bits"]
    assert (2.4e9 <= pin <= 9.6e9) if fp.identity["memory_bus_bits"] >= 4096 else (12e9 <= pin <= 30e9)
    assert fp.identity["smem_per_cta_bytes"] == fp.identity["smem_per_sm_bytes"] - 1024


def test_a_measured_figure_replaces_the_estimate(tmp_path):
    data = json.loads((resources.fingerprints() / "h200.json").read_text())
    data["measured"]["read_bytes_per_s"] = {"value": 4.4e12, "unit": "B/s", "source": "a probe", "spread": 0.01}
    (tmp_path / "h200.json").write_text(json.dumps(data))
    fp = known.read(tmp_path / "h200.json")
    assert fp.rates["read_bytes_per_s"].value == 4.4e12 and fp.rates["read_bytes_per_s"].spread == 0.01
    assert fp.rates["l2_bytes_per_s"].source.startswith("estimate: ")
    assert fp.hw_id == known.load("h200").hw_id


def test_a_wrong_name_suggests_the_near_one():
    with pytest.raises(UnknownName) as caught:
        known.load("rtx5080")
    assert "rtx-5080" in caught.value.todo and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: d.pop("cc"), "cc"),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.update(schema=2), "schema 2"),
        (lambda d: d.update(kind="cpu"), "'cpu'"),
        (lambda d: d.update(name=" "), "name"),
        (lambda d: d.update(estimated=[]), "estimated"),
        (lambda d: d["measured"].pop("graph_node_s"), "graph_node_s"),
        (lambda d: d["estimated"]["graph_node_s"].pop("source"), "estimated.graph_node_s"),
        (lambda d: d["estimated"]["graph_node_s"].update(source=""), "estimated.graph_node_s.source"),
        (lambda d: d["estimated"]["graph_node_s"].update(value="1"), "estimated.graph_node_s"),
        (lambda d: d["estimated"]["graph_node_s"].update(value=True), "estimated.graph_node_s"),
        (lambda d: d["estimated"]["graph_node_s"].update(value=-1.0), "estimated.graph_node_s"),
        (lambda d: d["estimated"].update(graph_node_s=1.0), "estimated.graph_node_s"),
        (lambda d: d["datasheet"].pop("peaks"), "peaks"),
        (lambda d: d["datasheet"]["limits"].update(sm_count=None), "datasheet.limits.sm_count"),
    ],
)
def test_a_malformed_file_is_refused_by_field(tmp_path, spoil, says):
    data = json.loads((resources.fingerprints() / "h200.json").read_text())
    spoil(data)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(BadConfig) as caught:
        known.read(path)
    assert says in caught.value.why and str(path) in caught.value.what


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": NaN}', '{"schema": 1, "schema": 1}', "\xff"])
def test_invalid_json_is_refused(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadConfig):
        known.read(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(BadConfig, match="cannot be read"):
        known.read(tmp_path / "none.json")
