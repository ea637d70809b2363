"""Test frames and references: well-formed ones pass completely, all others are refused as data."""

import json
import os
import socket
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosel.workers import protocol
from autosel.workers.arena import Ref, contiguous
from autosel.workers.process import Exit, RaisedError

NOW = 0.0  # a deadline long past
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture
def line():
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def within(seconds=10.0):
    return time.monotonic() + seconds


@given(st.dictionaries(st.text(), PLAIN, max_size=5))
def test_a_message_arrives_as_it_was_sent(message):
    near, far = socket.socketpair()
    with near, far:
        protocol.send(near, protocol.encode(message), until=within())
        assert protocol.receive(far, until=within()) == (message, [])


def test_messages_in_a_row_stay_apart(line):
    near, far = line
    near.sendall(protocol.encode({"n": 1}) + protocol.encode({"n": 2}))
    assert [protocol.receive(far, until=within())[0]["n"] for _ in range(2)] == [1, 2]


def test_descriptors_travel_with_their_message(line):
    near, far = line
    reader, writer = os.pipe()
    protocol.send(near, protocol.encode({"take": 1}), [reader], until=within())
    os.close(reader)
    _, (received,) = protocol.receive(far, until=within())
    os.write(writer, b"through")
    assert os.read(received, 7) == b"through"
    assert not os.get_inheritable(received)
    os.close(writer), os.close(received)


@pytest.mark.parametrize(
    "body",
    [
        b"[1]",
        b"3",
        b'{"a":NaN}',
        b'{"a":1,"a":2}',
        b"{" * 100_000,
        b'{"a":' + b"[" * 40 + b"]" * 40 + b"}",
        b"\xff\xfe",
        b"",
    ],
)
def test_json_that_is_not_strict_is_refused(line, body):
    near, far = line
    near.sendall(struct.pack("<I", len(body)) + body)
    with pytest.raises(protocol.ProtocolError):
        protocol.receive(far, until=within())


def test_a_frame_that_claims_too_much_is_refused_before_it_is_read(line):
    near, far = line
    near.sendall(struct.pack("<I", protocol.MAX_BYTES + 1))
    with pytest.raises(protocol.ProtocolError, match="claims"):
        protocol.receive(far, until=within())


def test_a_message_too_large_or_not_json_is_not_sent():
    with pytest.raises(ValueError, match="limit"):
        protocol.encode({"x": "y" * protocol.MAX_BYTES})
    with pytest.raises(ValueError):
        protocol.encode({"x": float("inf")})


@pytest.mark.parametrize("sent", [b"", b"\x05", struct.pack("<I", 20) + b'{"half"'])
def test_half_a_frame_is_late(line, sent):
    near, far = line
    near.sendall(sent)
    with pytest.raises(protocol.LateError):
        protocol.receive(far, until=NOW if not sent else time.monotonic() + 0.01)


def test_a_peer_that_does_not_read_is_late(line):
    near, _ = line
    frame = protocol.encode({"x": "y" * (1 << 19)})
    with pytest.raises(protocol.LateError):
        protocol.send(near, frame * 8, until=time.monotonic() + 0.01)


def test_a_closed_line_is_closed(line):
    near, far = line
    near.close()
    with pytest.raises(protocol.ClosedError):
        protocol.receive(far, until=within())
    with pytest.raises(protocol.ClosedError):
        protocol.send(far, protocol.encode({"x": "y" * (1 << 19)}), until=within())


def test_the_span_of_a_tensor_counts_gaps_and_not_repeats():
    def span(shape, strides):
        return Ref(arena="a", offset=0, shape=shape, strides=strides, dtype="float32").span

    assert contiguous((2, 3, 4)) == (12, 4, 1)
    assert span((2, 3, 4), (12, 4, 1)) == 24
    assert span((2, 3), (10, 1)) == 13
    assert span((1000, 3), (0, 1)) == 3
    assert span((0, 3), (3, 1)) == 0
    assert span((), ()) == 1


@pytest.mark.parametrize(
    ("changes", "cause", "retryable"),
    [
        ({"signal": 11}, "SIGSEGV", False),
        ({"exit_code": 0}, "exit 0", False),
        ({"signal": 9}, "SIGKILL", True),  # not sent by us: usually the kernel's out-of-memory killer
        ({"signal": 9, "why": "memory"}, "memory", True),
        ({"signal": 9, "why": "processes"}, "processes", False),
        ({"signal": 6, "stderr": "terminate called after throwing an instance of 'std::bad_alloc'"}, "SIGABRT", True),
        ({}, "unknown", False),
    ],
)
def test_the_cause_of_an_end_and_whether_to_try_again(changes, cause, retryable):
    blank = {"exit_code": None, "signal": None, "why": "", "stdout": "", "stderr": ""}
    ended = Exit(**(blank | changes), escaped=0, left=0)
    assert (ended.cause, ended.retryable) == (cause, retryable)
    assert json.dumps(ended.cause)


@pytest.mark.parametrize(
    ("message", "retryable"),
    [
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", True),
        ("CUDA error: CUDA driver version is insufficient for CUDA runtime version", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA error: no kernel image is available for execution on the device", False),
    ],
)
def test_an_unusable_device_is_not_a_candidates_fault(message: str, retryable: bool) -> None:
    error = RaisedError("it raised", kind="AcceleratorError", message=message, traceback="")
    assert error.retryable is retryable
