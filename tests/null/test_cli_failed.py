"""Test the text of `explain --failed`: failures in a table, and the candidates that cannot run here in groups."""

from __future__ import annotations

from autosel.cli.failed import Found, failed_text

WRONG: Found = {
    "op": "rmsnorm",
    "workload": "rmsnorm/M1.d64/fp32",
    "candidate": "user:norm",
    "stage": "parity",
    "check": "elements",
    "case": "strided",
    "reason": "row 3 differs",
}


def absent(op: str, candidate: str, reason: str) -> Found:
    return {"op": op, "workload": f"{op}/M1", "candidate": candidate, "stage": "eligible", "reason": reason}


GPU_ONLY = [absent(op, f"cuda:{op}", "a CUDA kernel; the device is a CPU") for op in ("rmsnorm", "attn", "linear")]
GPU_ONLY += [absent("attn", f"triton:{n}", "a Triton kernel; the device is a CPU") for n in ("one", "two")]
ONE_M = absent("linear", "torch:compiled", "compiled for one M; buckets above M = 16 hold several")


def test_candidates_that_cannot_run_here_are_counted_by_what_they_need() -> None:
    text = failed_text([*GPU_ONLY, ONE_M])
    assert text.startswith("no candidate has failed")
    assert "6 candidates cannot run here" in text
    assert "\n  5 need a CUDA device (cuda 3, triton 2)\n" in text
    assert "1: compiled for one M; buckets above M = 16 hold several (torch:compiled)" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 80


def test_failures_are_shown_apart_from_what_cannot_run_here() -> None:
    table, _, groups = failed_text([*GPU_ONLY, WRONG]).partition("\n\n")
    assert "user:norm" in table and "case strided" in table and "cuda" not in table
    assert "need a CUDA device" in groups and "user:norm" not in groups


def test_an_empty_list_is_one_sentence() -> None:
    assert len(failed_text([]).splitlines()) == 1


def test_kernels_of_a_cpu_are_grouped_on_a_gpu() -> None:
    found = [absent("linear", "cpp:gemv", "a CPU kernel; the device is a GPU")]
    assert "  1 need a CPU (cpp:gemv)" in failed_text(found)
