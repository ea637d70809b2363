"""Verify certificates that commit 462cf5c wrote: fully for presets, within limits for checkpoint folders."""

from __future__ import annotations

import dataclasses

import pytest

from autosel.certify.certificate import Certificate, decode
from autosel.certify.model import underived
from autosel.certify.store import BadCertificate, lines
from autosel.certify.verify import verify, wrong
from tests import earlier
from tests.null.certificates import rewritten

PRESETS, FOLDERS = (1, 2, 3), (4, 5, 6, 7, 8)


def stored() -> dict[int, Certificate]:
    return {number: decode(line) for number, line in lines(earlier.CERTIFICATES)}


def test_the_stored_certificates_verify_and_list_the_fields_that_cannot_be_derived() -> None:
    pytest.importorskip("cryptography", reason="one of them is signed")
    found, then = verify(earlier.CERTIFICATES), earlier.said("verify")
    assert (found.certificates, found.signed, found.head) == (8, 1, then["head"])
    assert tuple(u.line for u in found.unchecked) == FOLDERS
    with pytest.raises(BadCertificate, match=r":4 cannot be trusted"):
        verify(earlier.CERTIFICATES, strict=True)


def test_the_stored_certificates_are_of_every_form_of_a_step() -> None:
    made = stored().values()
    assert {c.version for c in made} == {5}
    assert {c.mode.partition(".")[0] for c in made} == {"eager", "team"}
    assert {c.options["cache"] for c in made} == {"contiguous", "paged"}
    assert {bool(c.options["speculate"]) for c in made} == {False, True}
    assert {c.dtype for c in made} == {"bf16", "fp32"} and {c.shape.batch for c in made} == {1, 2}
    assert all(c.verification_ok for c in made)


@pytest.mark.parametrize("line", PRESETS)
def test_a_presets_figures_are_derived_in_full(line: int) -> None:
    made = stored()[line]
    assert underived(made) == () and wrong(made) == ""
    for name in ("bytes_per_step", "flops_per_step", "weights_bytes", "kv_cache_bytes"):
        forged = dataclasses.replace(made, **{name: getattr(made, name) - 2})
        assert wrong(forged).startswith(f"{name}: "), name


@pytest.mark.parametrize("line", FOLDERS)
def test_the_figures_of_a_folder_are_compared_with_limits(line: int) -> None:
    made = stored()[line]
    assert underived(made) == ("bytes_per_step", "flops_per_step", "weights_bytes") and wrong(made) == ""
    assert wrong(rewritten(made, bytes_per_step=made.bytes_per_step // 2)).startswith("bytes_per_step: ")
