"""Test keys and buckets: one key per workload, exactly one bucket per size, and lossless storage."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel.values import (
    COUNT_DIMS,
    DTYPES,
    LENGTH_DIMS,
    Workload,
    canonical_json,
    count_bucket,
    digest,
    from_json,
    length_bucket,
    parse_json,
    to_json,
)

sizes = st.integers(1, 1 << 24)
dims = st.lists(st.sampled_from(["M", "N", "K", "B", "Hq", "Hkv", "S", "D", "L", "d", "V", "I", "page"]), unique=True)
traits = st.dictionaries(
    st.sampled_from(["bias", "window", "softcap", "style"]),
    st.one_of(st.booleans(), st.integers(0, 1 << 20), st.floats(0.125, 100.0, width=16)),
)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload(
        op=draw(st.sampled_from(["linear", "attn", "rope"])),
        dims=tuple((name, draw(sizes)) for name in draw(dims)),
        dtype=draw(st.sampled_from(DTYPES)),
        traits=tuple(sorted(draw(traits).items())),
    )


@given(sizes, st.data())
def test_every_size_is_in_its_bucket_and_all_members_of_it_agree(n: int, data: st.DataObject) -> None:
    for bucket in (count_bucket, length_bucket):
        low, high = bucket(n)
        assert low <= n <= high
        assert bucket(data.draw(st.integers(low, high))) == (low, high)


@given(sizes)
def test_buckets_meet_without_gap_or_overlap(n: int) -> None:
    for bucket in (count_bucket, length_bucket):
        _, high = bucket(n)
        assert bucket(high + 1)[0] == high + 1


@given(st.integers(1, 8))
def test_small_counts_have_a_bucket_of_their_own(n: int) -> None:
    assert count_bucket(n) == (n, n)


@given(workloads())
def test_a_workload_survives_json(w: Workload) -> None:
    assert from_json(Workload, to_json(w)) == w
    text = canonical_json(w)
    assert from_json(Workload, parse_json(text)) == w
    assert canonical_json(json.loads(text)) == text


@given(workloads(), workloads())
def test_different_workloads_have_different_keys(a: Workload, b: Workload) -> None:
    same_values = all(type(x) is type(y) for (_, x), (_, y) in zip(a.traits, b.traits, strict=False))
    assert (a.key == b.key) == (a == b) or not same_values  # 1 == 1.0 == True in Python, not in a key
    if a.key == b.key:
        assert digest(a) == digest(b)


@given(workloads(), st.data())
def test_a_bucket_is_shared_by_every_size_within_it(w: Workload, data: st.DataObject) -> None:
    moved = {
        name: data.draw(st.integers(*(count_bucket if name in COUNT_DIMS else length_bucket)(size)))
        for name, size in w.dims
        if name in COUNT_DIMS | LENGTH_DIMS
    }
    assert w.at(**moved).bucket == w.bucket


@given(sizes, sizes)
def test_a_model_dimension_is_exact_in_a_bucket(a: int, b: int) -> None:
    one = Workload(op="linear", dims=(("M", 1), ("N", a), ("K", 64)), dtype="bf16")
    assert (one.bucket == one.at(N=b).bucket) == (a == b)


@given(sizes, sizes)
def test_lengths_share_a_bucket_text_exactly_when_they_share_a_bucket(a: int, b: int) -> None:
    one = Workload(op="attn", dims=(("B", 1), ("L", a)), dtype="bf16")
    assert (one.bucket == one.at(L=b).bucket) == (length_bucket(a) == length_bucket(b))


def test_missing_fields_are_named() -> None:
    with pytest.raises(ValueError, match=r"^\S+: missing op, dims$"):
        from_json(Workload, {"dtype": "bf16"})
