"""Test the interpreted device: its computations, and that it detects errors."""

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


# --- computations ---------------------------------------------------------------------------------------------------


def of_words(operation: str, *operands: torch.Tensor) -> torch.Tensor:
    """Run one instruction on %r1, %r2, ... into %r0, for 32 threads."""
    loads = "".join(f"add.u64 %q{i}, %a{i}, %tw; ld.global.u32 %r{i}, [%q{i}];\n" for i in range(1, len(operands) + 1))
    body = f"{loads}{operation};\nadd.u64 %q0, %a0, %tw; st.global.u32 [%q0], %r0;"
    out = torch.zeros(32, dtype=torch.int32)
    launch(kernel(body, len(operands) + 1), "k", out, *(o.contiguous() for o in operands))
    return out


def words(seed: int) -> torch.Tensor:
    drawn = torch.randint(-(2**31), 2**31, (32,), generator=torch.Generator().manual_seed(seed))
    drawn[:6] = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x00FF00FF])
    return drawn.int()


@pytest.mark.parametrize(
    ("operation", "want"),
    [
        ("add.s32 %r0, %r1, %r2", lambda a, b: a + b),
        ("mul.lo.s32 %r0, %r1, %r2", lambda a, b: a * b),
        ("mul.hi.u32 %r0, %r1, %r2", lambda a, b: (a % 2**32) * (b % 2**32) >> 32),
        ("mad.lo.s32 %r0, %r1, %r2, %r1", lambda a, b: a * b + a),
        ("min.s32 %r0, %r1, %r2", min),
        ("max.u32 %r0, %r1, %r2", lambda a, b: max(a % 2**32, b % 2**32)),
        ("shl.b32 %r0, %r1, 35", lambda a, b: 0),
        ("shr.s32 %r0, %r1, 40", lambda a, b: -1 if a < 0 else 0),
        ("shr.u32 %r0, %r1, 5", lambda a, b: a % 2**32 >> 5),
        ("shf.l.wrap.b32 %r0, %r1, %r2, 7", lambda a, b: (b << 7) | (a % 2**32 >> 25)),
        ("bfe.u32 %r0, %r1, 5, 9", lambda a, b: a >> 5 & 511),
        ("bfe.s32 %r0, %r1, 5, 9", lambda a, b: ((a >> 5 & 511) ^ 256) - 256),
        ("bfi.b32 %r0, %r1, %r2, 4, 8", lambda a, b: (b & ~0xFF0) | (a & 255) << 4),
        ("prmt.b32 %r0, %r1, %r2, 0x7531", lambda a, b: prmt(a, b, (1, 3, 5, 7))),
        ("lop3.b32 %r0, %r1, %r2, %r1, 0x3c", lambda a, b: a ^ b),
        ("clz.b32 %r0, %r1", lambda a, b: 32 - (a % 2**32).bit_length()),
        ("popc.b32 %r0, %r1", lambda a, b: (a % 2**32).bit_count()),
        ("brev.b32 %r0, %r1", lambda a, b: int(f"{a % 2**32:032b}"[::-1], 2)),
        ("add.cc.u32 %r3, %r1, %r2; addc.u32 %r0, 0, 0", lambda a, b: (a % 2**32 + b % 2**32) >> 32),
        ("not.b32 %r0, %r1", lambda a, b: ~a),
        ("setp.lt.u32 %p1, %r1, %r2; selp.b32 %r0, 1, 0, %p1", lambda a, b: int(a % 2**32 < b % 2**32)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_integers_are_computed_as_in_python(operation: str, want: object) -> None:
    assert callable(want)
    a, b = words(1), words(2).roll(3)
    expected = [(want(x, y) + 2**31) % 2**32 - 2**31 for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert of_words(operation, a, b).tolist() == expected


def prmt(a: int, b: int, chosen: tuple[int, ...]) -> int:
    both = (a % 2**32) | (b % 2**32) << 32
    return sum((both >> 8 * c & 255) << 8 * i for i, c in enumerate(chosen))


def floats(seed: int) -> torch.Tensor:
    drawn = torch.randn(32, generator=torch.Generator().manual_seed(seed)) * 300
    drawn[:8] = torch.tensor([0.0, -0.0, 1.0, 448.0, 465.0, 1e-3, 2.0**-9, float("inf")])
    return drawn


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("cvt.rn.bf16.f32 %h0, %f1; mov.b32 %r0, {%h0, %h0}", torch.bfloat16),
        ("cvt.rn.f16.f32 %h0, %f1; mov.b32 %r0, {%h0, %h0}", torch.float16),
        ("cvt.rn.bf16x2.f32 %r0, %f1, %f1", torch.bfloat16),
        ("cvt.rn.f16x2.f32 %r0, %f1, %f1", torch.float16),
    ],
)
def test_conversions_round_as_torch_does(operation: str, kind: torch.dtype) -> None:
    x = floats(3)
    found = of_words("mov.b32 %f1, %r1; " + operation, x.view(torch.int32))
    assert torch.equal(found.view(kind).view(32, 2), x.to(kind)[:, None].expand(32, 2).contiguous())


def test_fp8_is_converted_as_in_torch_and_saturates() -> None:
    x = floats(5).clamp(-440, 440)
    found = of_words(
        "mov.b32 %f1, %r1; cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f1; mov.b32 %r0, {%h0, %h0}", x.view(torch.int32)
    )
    assert torch.equal(found.view(torch.uint8).view(32, 4)[:, 0], x.to(torch.float8_e4m3fn).view(torch.uint8))
    codes = torch.arange(256, dtype=torch.uint8)
    back = torch.cat([
        of_words("mov.b32 {%h0, %h1}, %r1; cvt.rn.f16x2.e4m3x2 %r0, %h0", c.view(torch.int32))
        for c in codes.repeat_interleave(4).view(8, 128)
    ])  # fmt: skip
    want = codes.view(torch.float8_e4m3fn).half()
    assert torch.equal(back.view(torch.float16).view(256, 2)[:, 0].nan_to_num(9.0), want.nan_to_num(9.0))


def test_the_rounding_of_an_instruction_is_used() -> None:
    third = torch.full((32,), 1.0).view(torch.int32)
    down, up = (
        of_words(f"mov.b32 %f1, %r1; div.{way}.f32 %f2, %f1, 0f40400000; mov.b32 %r0, %f2", third).view(torch.float32)
        for way in ("rm", "rp")
    )
    assert down[0] < up[0]
    assert torch.nextafter(down[0], up[0]) == up[0]


def test_a_function_is_called_with_its_parameters_and_gives_its_result() -> None:
    text = kernel(
        "{ .param .b32 x; .param .b32 y; st.param.b32 [x], %t; call.uni (y), twice, (x); ld.param.b32 %r0, [y]; }\n"
        "add.u64 %q0, %a0, %tw; st.global.u32 [%q0], %r0;",
        1,
    )
    twice = """.func (.param .b32 r) twice(.param .b32 v)
    { .reg .b32 %r<3>; ld.param.b32 %r1, [v]; add.s32 %r2, %r1, %r1; st.param.b32 [r], %r2; ret; }
    """
    out = torch.zeros(32, dtype=torch.int32)
    launch(text.replace(".visible", twice + ".visible"), "k", out)
    assert out.tolist() == [2 * i for i in range(32)]


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


def test_blocks_of_a_cluster_reach_each_others_shared_memory() -> None:
    """Let each of four blocks write its rank into the next one's memory."""
    body = """
    mov.u32 %r1, %cluster_ctarank; add.u32 %r2, %r1, 1; and.b32 %r2, %r2, 3; mov.u32 %r3, room;
    mapa.shared::cluster.u32 %r4, %r3, %r2; st.shared::cluster.u32 [%r4], %r1;
    barrier.cluster.arrive.release; barrier.cluster.wait.acquire;
    ld.shared.u32 %r5, [%r3]; mov.u32 %r6, %ctaid.x; mul.wide.u32 %q0, %r6, 4;
    add.u64 %q0, %a0, %q0; st.global.u32 [%q0], %r5;
    """
    y = torch.full((8,), -1, dtype=torch.int32)
    launch(kernel(body, 1), "k", y, grid=(8, 1, 1), cluster=(4, 1, 1), shared_bytes=16)
    assert y.tolist() == [3, 0, 1, 2] * 2


def test_a_depot_is_reached_by_its_offset_and_by_a_pointer() -> None:
    body = """
    .local .align 8 .b8 depot[16]; .reg .b32 %s; mov.b32 %s, depot; st.local.b32 [%s+8], %t;
    cvta.local.u64 %q1, depot; ld.u32 %r1, [%q1+8]; add.u64 %q0, %a0, %tw; st.global.u32 [%q0], %r1;
    """
    y = torch.zeros(32, dtype=torch.int32)
    launch(kernel(body, 1), "k", y)
    assert y.tolist() == list(range(32))


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
