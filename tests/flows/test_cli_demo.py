"""The demo of a tiny model in the real one's folder: tune, measurement, certificate and both answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from autosel.certify.verify import verify
from autosel.demo.fetch import SMOLLM2
from tests import earlier, verbs
from tests.homes import furnish

pytestmark = pytest.mark.usefixtures("preforked")
WORDS = [*(f"w{i}" for i in range(253)), "sky", "?", "<|im_end|>"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a home with the tiny model, a tokenizer of its 256 words, and too little time for any decision."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `hf`")
    made = furnish(tmp_path_factory.mktemp("demo") / "home")
    folder = made / "demo" / SMOLLM2.name
    shutil.copytree(earlier.TINY, folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens([WORDS[-1]])
    words.save(str(folder / "tokenizer.json"))
    return made


def test_a_demo_measures_certifies_and_answers_with_both_arms(home: Path) -> None:
    found = verbs.verb("demo", "sky ?", "--tokens", "9", "--budget", "0.001s", "--device", "cpu", "--json", home=home)
    assert found["error"] is None and found["model"] == SMOLLM2.name and found["tuning"]["undecided"]
    answers, differs = found["answers"], found["differs"]
    assert found["same_text"] is (answers["pytorch"] == answers["autosel"]) is (differs is None)
    assert 1 <= len(answers["pytorch"]["tokens"]) <= 9 and answers["pytorch"]["text"]
    made, file = found["certificate"], Path(found["file"])
    assert made["iters"] == 9 and made["verification"]["tokens_checked"] == 9 and made["options"]["advance"] is True
    assert found["tokens_per_s"]["autosel"] == made["tokens_per_sec"]
    assert verify(file, strict=True).last.checksum == made["checksum"]


def test_its_certificate_can_be_measured_again_and_text_is_shown(home: Path) -> None:
    said = verbs.verb("demo", "sky ?", "--tokens", "9", "--budget", "0.001s", "--device", "cpu", home=home)
    for part in ("undecided", "a second demo continues", "prompt   sky ?", "PyTorch  ", "autosel  ", "certificate 2"):
        assert part in said
    again = verbs.verb("verify", "--rerun", f"{home / 'certificates.jsonl'}:2", home=home, codes=(0, 3, 5))
    assert "speedup" in again
