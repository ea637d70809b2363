"""Change every bit of a certificate, and remove and double every byte: the long form of a property test."""

from __future__ import annotations

import pytest

from autosel.certify.certificate import decode, encode
from tests.null.certificates import certificate, decode_run

LINE = encode(certificate(decode_run(iters=3)))


@pytest.mark.parametrize("bit", range(8))
def test_no_bit_of_a_certificate_can_be_changed_unnoticed(bit: int) -> None:
    for at, byte in enumerate(LINE):
        with pytest.raises(ValueError):
            decode(LINE[:at] + bytes([byte ^ (1 << bit)]) + LINE[at + 1 :])


def test_no_byte_can_be_left_out_or_doubled_unnoticed() -> None:
    for at in range(len(LINE)):
        with pytest.raises(ValueError):
            decode(LINE[:at] + LINE[at + 1 :])
        with pytest.raises(ValueError):
            decode(LINE[: at + 1] + LINE[at:])
