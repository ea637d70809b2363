"""The digest of the checks counts code, and neither comments nor docstrings."""

from __future__ import annotations

import pytest

from autosel.testing.mutants.battery import code_of, digest

PYTHON = '"""Of the module."""\ndef f(x):\n    """Return x."""\n    return x + 1  # one more\n'
CPP = "// adds\nint f(int x) {\n    return x + 1; /* one\n more */\n}\n"


@pytest.mark.parametrize(
    ("suffix", "text", "reworded", "changed"),
    [
        (".py", PYTHON, PYTHON.replace("Return x.", "Add one.").replace("# one more", ""), PYTHON.replace("1", "2")),
        (".cpp", CPP, CPP.replace("// adds", "// adds one").replace("    return", "  return"), CPP.replace("1", "2")),
    ],
)
def test_only_code_counts(suffix: str, text: str, reworded: str, changed: str) -> None:
    assert code_of(suffix, text) == code_of(suffix, reworded) != code_of(suffix, changed)


def test_a_function_that_is_only_a_docstring_counts() -> None:
    assert code_of(".py", 'def f():\n    """Do nothing."""\n') != code_of(".py", "")


def test_the_digest_is_eight_digits() -> None:
    assert len(digest()) == 8
    assert int(digest(), 16) >= 0
