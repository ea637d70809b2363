"""The dearest files in three parts, of eight, four and two minutes of CPU time: one part runs on a day, and all with
--every-target. Their subjects are GPU kernels without a GPU, other projects' engines, and what only saves time.

CI's day runs the last part.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import drawn

PARTS = (
    (
        "compile/test_emulated_attention.py",
        "compile/test_emulated_decode.py",
        "compile/test_emulated_knobs.py",
        "compile/test_emulated_linear.py",
        "compile/test_emulated_overlap.py",
        "compile/test_emulated_probes.py",
        "compile/test_liger.py",
        "compile/test_machine_code.py",
        "compile/test_oldest_triton.py",
        "compile/test_ptx_cutlass.py",
        "compile/test_ptx_probes.py",
        "compile/test_ptx_races.py",
        "flows/test_benchmarks_gpu.py",
        "flows/test_integrations_engines_flashinfer.py",
        "flows/test_integrations_engines_inductor.py",
        "flows/test_integrations_engines_sglang.py",
        "flows/test_integrations_flashinfer_bench.py",
        "flows/test_integrations_sglang_plugin.py",
        "flows/test_integrations_vllm_codes.py",
    ),
    (
        "compile/test_emulated_cutlass.py",
        "compile/test_emulated_far.py",
        "compile/test_emulated_step.py",
        "compile/test_ptx_device.py",
        "compile/test_ptx_machine.py",
        "compile/test_ptx_triton.py",
        "cpu/test_native_headers.py",
        "flows/test_integrations_flashinfer_apply.py",
    ),
    (
        "compile/test_emulated_rows.py",
        "compile/test_ptx_kernels.py",
        "compile/test_triton.py",
        "flows/test_integrations_engines_vllm.py",
        "flows/test_integrations_vllm_plugin.py",
    ),
)
TESTS = Path(__file__).parent


def rests(file: Path) -> bool:
    """Return True if it is another part's day."""
    name = file.relative_to(TESTS).as_posix() if file.is_relative_to(TESTS) else ""
    return not drawn.every and any(name in part for at, part in enumerate(PARTS) if at != drawn.third())


def skip_resting(items: list[pytest.Item]) -> None:
    why = pytest.mark.skip(reason="another part's day (tests/thirds.py)")
    for item in items:
        if rests(item.path):
            item.add_marker(why)
