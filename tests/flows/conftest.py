"""Draw the inputs of proofs from the run's seed, as in tests/cpu."""

from tests.cpu.conftest import pytest_configure

__all__ = ["pytest_configure"]
