"""Test that the interpreted device detects errors. Its computations are those of the kernels that it runs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.compile.ptx_machine import HEAD, ORDERS, Order, bare, launch


def kernel(body: str, parameters: int = 2) -> str:
    """Return a kernel with this `body`: %a0, %a1, ... are parameters, %t the thread, %tw its offset in words."""
    declared = ", ".join(f".param .u64 p{i}" for i in range(parameters))
    loads = "".join(f"ld.param.u64 %a{i}, [p{i}];\n" for i in range(parameters))
    registers = ".reg .b64 %a<9>, %q<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b16 %h<9>; .reg .pred %p<9>;"
    thread = ".reg .b32 %t; .reg .b64 %tw; mov.u32 %t, %tid.x; mul.wide.u32 %tw, %t, 4;\n"
    head = f"{HEAD}.extern .shared .align 128 .b8 room[];\n.visible .entry k({declared})\n"
    return f"{head}{{\n{registers}\n{thread}{loads}{body}\nret;\n}}\n"


def words(seed: int) -> torch.Tensor:
    drawn = torch.randint(-(2**31), 2**31, (32,), generator=torch.Generator().manual_seed(seed))
    drawn[:6] = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x00FF00FF])
    return drawn.int()


# --- detected errors ------------------------------------------------------------------------------------------------

COPY = """
add.u64 %q1, %a1, %tw; mov.u32 %r1, room; shl.b32 %r2, %t, 2; add.u32 %r1, %r1, %r2;
cp.async.ca.shared.global [%r1], [%q1], 4; cp.async.commit_group; {wait}
ld.shared.u32 %r3, [%r1]; add.u64 %q0, %a0, %tw; st.global.u32 [%q0], %r3;
"""


@pytest.mark.parametrize("order", ORDERS)
def test_a_copy_is_complete_after_a_wait(order: Order) -> None:
    x, y = words(1), torch.zeros(32, dtype=torch.int32)
    launch(kernel(COPY.format(wait="cp.async.wait_group 0;")), "k", y, x, shared_bytes=128, order=order)
    assert torch.equal(x, y)


def test_a_copy_without_a_wait_may_be_late() -> None:
    x, y = words(1), torch.zeros(32, dtype=torch.int32)
    launch(kernel(COPY.format(wait="")), "k", y, x, shared_bytes=128, order="late")
    assert (y == -1).all()


STORE = """
mov.u32 %r1, room; shl.b32 %r2, %t, 2; add.u32 %r2, %r1, %r2;
st.shared.u32 [%r2], %t; {fence} bar.sync 0;
setp.ne.u32 %p1, %t, 0; @%p1 bra OVER;
cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r1], 128; cp.async.bulk.commit_group; {wait}
OVER: bar.sync 0; st.shared.u32 [%r2], -1;
"""


@pytest.mark.parametrize("order", ORDERS)
def test_a_bulk_store_writes_what_was_fenced(order: Order) -> None:
    y = torch.zeros(32, dtype=torch.int32)
    text = kernel(STORE.format(fence="fence.proxy.async.shared::cta;", wait="cp.async.bulk.wait_group.read 0;"), 1)
    launch(text, "k", y, shared_bytes=128, order=order)
    assert y.tolist() == list(range(32))


def test_a_bulk_store_of_what_was_not_fenced_is_an_error() -> None:
    text = kernel(STORE.format(fence="", wait="cp.async.bulk.wait_group.read 0;"), 1)
    with pytest.raises(RuntimeError, match=r"neither thread \d+ that wrote it nor the reader has fenced"):
        launch(text, "k", torch.zeros(32, dtype=torch.int32), shared_bytes=128)


def test_memory_overwritten_before_a_bulk_store_has_read_it_shows() -> None:
    y = torch.zeros(32, dtype=torch.int32)
    launch(
        kernel(STORE.format(fence="fence.proxy.async.shared::cta;", wait=""), 1), "k", y, shared_bytes=128, order="late"
    )
    assert y[1:].tolist() == [-1] * 31


PHASES = """
mov.u32 %r1, room; setp.ne.u32 %p1, %t, 0; @%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r1], {count}; fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
{arrive}
WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; @!%p2 bra WAIT;
add.u64 %q0, %a0, %tw; st.global.u32 [%q0], %t;
"""


ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r1]"


def test_a_phase_ends_with_its_last_arrival() -> None:
    y = torch.full((32,), -1, dtype=torch.int32)
    launch(kernel(PHASES.format(count=32, arrive=f"{ARRIVE};"), 1), "k", y, shared_bytes=16)
    assert y.tolist() == list(range(32))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (PHASES.format(count=33, arrive=f"{ARRIVE};"), r"deadlock.*\n.*32 wait for a phase"),
        (PHASES.format(count=4, arrive=f"{ARRIVE}, 5;"), "more arrivals"),
        ("add.u64 %q0, %a0, 128; st.global.u32 [%q0], %t;", "is in no tensor"),
        ("add.u64 %q0, %a0, 2; ld.global.u32 %r0, [%q0];", "misaligned global address"),
        ("ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%a0+8];", "misaligned global address"),
        ("mov.u32 %r1, room; ld.shared.u32 %r2, [%r1+16];", "outside of the 16 bytes"),
        ("setp.gt.u32 %p1, %t, 15; @%p1 bra A; bar.sync 0, 64; A: bar.sync 1;", "deadlock"),
        ("setp.eq.u32 %p1, %t, 0; @%p1 bra A; shfl.sync.idx.b32 %r0, %t, 9, 31, 1; A:", "not in its own mask"),
        ("setp.gt.u32 %p1, %t, 0; @%p1 bra A; shfl.sync.idx.b32 %r0, %t, 9, 31, 1; A:", "reads lane 9"),
        ("trap;", "trap"),
        ("mov.u32 %r1, room; cp.async.bulk.global.shared::cta.bulk_group [%a0], [%r1], 24;", "bulk copy of 24"),
        ("frobnicate.b32 %r0, %r1;", "does not know"),
    ],
)  # fmt: skip
def test_an_error_is_found_with_its_place(text: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words) as raised:
        launch(kernel(text, 1), "k", torch.zeros(32, dtype=torch.int32), shared_bytes=16)
    assert "k" in str(raised.value)


# --- races -----------------------------------------------------------------------------------------------------------

# Each thread writes its word, and reads the next one's.
NEIGHBOURS = """
mov.u32 %r1, room; shl.b32 %r2, %t, 2; add.u32 %r2, %r1, %r2; add.u32 %r3, %t, 1; and.b32 %r3, %r3, 63;
shl.b32 %r3, %r3, 2; add.u32 %r3, %r1, %r3;
st.shared.u32 [%r2], %t; {first} ld.shared.u32 %r4, [%r3]; {second} st.shared.u32 [%r2], 0;
add.u64 %q0, %a0, %tw; st.global.u32 [%q0], %r4;
"""


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ("bar.sync 0;", "bar.sync 0;", ""),
        ("", "bar.sync 0;", "race: thread .* and nothing puts one before the other"),
        ("bar.sync 0;", "", "race: thread .* writes at .* what thread .* read"),
        ("bar.warp.sync -1;", "bar.sync 0;", "race"),  # of two warps
        ("shfl.sync.idx.b32 %r5, %t, 0, 31, -1;", "bar.sync 0;", "race"),  # gives no order
    ],
)
def test_unordered_accesses_in_shared_memory_are_an_error(first: str, second: str, words: str) -> None:
    text, y = kernel(NEIGHBOURS.format(first=first, second=second), 1), torch.zeros(64, dtype=torch.int32)
    with bare().races(), pytest.raises(RuntimeError, match=words) if words else nullcontext():
        launch(text, "k", y, threads=64, shared_bytes=256)


# The second of two blocks reads what the first one wrote.
HANDED_OVER = """
mov.u32 %r1, %ctaid.x; mul.wide.u32 %q1, %r1, 4; add.u64 %q1, %a0, %q1; setp.ne.u32 %p1, %t, 0; @%p1 bra OVER;
st.global.u32 [%q1], 7; {release} atom{how}.global.gpu.add.u32 %r2, [%a0+8], 1; {acquire}
setp.ne.u32 %p2, %r2, 1; @%p2 bra OVER; ld.global.u32 %r3, [%a0]; ld.global.u32 %r4, [%a0+4];
add.u32 %r3, %r3, %r4; st.global.u32 [%a0+12], %r3;
OVER:
"""


@pytest.mark.parametrize(
    ("release", "how", "acquire", "races"),
    [
        ("fence.acq_rel.gpu;", ".relaxed", "fence.acq_rel.gpu;", False),
        ("", ".acq_rel", "", False),
        ("", ".relaxed", "", True),
        ("fence.acq_rel.gpu;", ".relaxed", "", True),
        ("", ".relaxed", "fence.acq_rel.gpu;", True),
        ("", ".release", "", True),
    ],
)
def test_data_between_blocks_needs_a_release_and_an_acquire(release: str, how: str, acquire: str, races: bool) -> None:
    text, y = kernel(HANDED_OVER.format(release=release, how=how, acquire=acquire), 1), torch.zeros(4).int()
    with bare().races(), pytest.raises(RuntimeError, match="race") if races else nullcontext():
        launch(text, "k", y, grid=(2, 1, 1))
    assert races or y.tolist() == [7, 7, 2, 14]


@pytest.mark.parametrize("wait", ["cp.async.wait_group 0; bar.sync 0;", "bar.sync 0; cp.async.wait_group 0;"])
def test_other_threads_see_a_copy_only_after_its_own_threads_wait(wait: str) -> None:
    body = """
    add.u64 %q1, %a1, %tw; mov.u32 %r1, room; shl.b32 %r2, %t, 2; add.u32 %r2, %r1, %r2;
    cp.async.ca.shared.global [%r2], [%q1], 4; cp.async.commit_group; {wait}
    xor.b32 %r3, %t, 1; shl.b32 %r3, %r3, 2; add.u32 %r3, %r1, %r3; ld.shared.u32 %r4, [%r3];
    """
    right = wait.startswith("cp")
    with bare().races(), nullcontext() if right else pytest.raises(RuntimeError, match="race"):
        x = words(1)
        launch(kernel(body.format(wait=wait)), "k", x, x, shared_bytes=128)
