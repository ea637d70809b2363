"""Measure certificates of commit 462cf5c again: one of a preset, and one of a folder, whose figures are then derived.

The tests assert that the plan is the certified one. They assert no figure, because this machine may be another one, or
noisy. One of the three is measured each day.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import drawn, earlier, homes
from tests.verbs import verb

OUTCOMES = {"reproduced": 0, "faster": 0, "slower": 3, "too noisy": 5}
UNCHECKED = (4, 5, 6, 7, 8)
LINES = {
    1: "llama-1b, one layer, op by op",
    5: "a folder, by a team, unpacked weights",
    6: "a folder, two sequences on pages, fp32",
}


@pytest.mark.parametrize("line", drawn.share(list(LINES), days=3, shift=2), ids=LINES.__getitem__)
def test_a_stored_certificate_is_run_again(line: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="one of them is signed")
    home = earlier.copied(homes.furnish(tmp_path / "home"))
    monkeypatch.chdir(earlier.FOLDER)  # the folder of `--model tiny`
    with earlier.there():
        told = verb("verify", "--rerun", f"certificates.jsonl:{line}", "--json", home=home, codes=(0, 3, 5))
    again, left = told["rerun"], [one["line"] for one in told["not_checkable"]]
    assert left == [number for number in UNCHECKED if number != line]
    code = told["error"]["exit_code"] if told["error"] else 0
    assert code == (OUTCOMES[again["outcome"]] or 5), "other lines are still not checkable"
    assert again["speedup"]["measured"] > 0 and again["speedup"]["certified"] > 0
