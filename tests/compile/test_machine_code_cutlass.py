"""Test that the CUTLASS products compile for their targets to the expected instructions without spills; print the time.

Each 16th day one build runs, which changes; each second day test_ptx_cutlass.py looks at one of Hopper's.
--every-target runs all.
"""

from __future__ import annotations

from operator import attrgetter

import pytest

from autosel.native import cutlass
from tests.compile.cutlass_asked import Build, builds
from tests.compile.cutlass_builds import compiled, faults, recipe_of

pytestmark = pytest.mark.skipif(bool(cutlass.why_not()), reason=cutlass.why_not())


def of_ampere() -> list[Build]:
    return [build for build in builds() if build.source == "gemm_sm80"]


@pytest.mark.in_turns(of_ampere, label=attrgetter("label"), days=16)
def test_a_build_has_the_expected_machine_code(choice: Build) -> None:
    _whole(choice)


def of_hopper() -> list[Build]:
    return [build for build in builds() if build.source == "gemm_sm90"]


@pytest.mark.in_turns(of_hopper, label=attrgetter("label"))
def test_hoppers_build_compiles_by_the_whole_command(choice: Build, request: pytest.FixtureRequest) -> None:
    """Compile for a minute; test_ptx_cutlass.py checks its machine code each second day."""
    if not request.config.getoption("--every-target"):
        pytest.skip("with --every-target")
    _whole(choice)


def _whole(build: Build) -> None:
    made = compiled(recipe_of(build))
    print(f"{build.label}: {made.seconds:.0f} s")  # noqa: T201  (a tune waits as long)
    wrong = faults(build, made)
    assert not wrong, "\n".join([build.label, *wrong])
