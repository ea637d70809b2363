"""Convert a GGUF file into a checkpoint folder of Hugging Face: bf16 weights, tokenizer and config.

transformers does it in a process of its own, which ends with its memory and never uses the network:

    python -m autosel.demo.convert PACKAGES FILE FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from autosel import settings
from autosel.errors import AutoselError

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def convert(packages: Path, file: str, into: Path) -> None:
    """Convert the file below `packages`, which also holds gguf and accelerate. Raises AutoselError."""
    words = [sys.executable, "-P", "-m", "autosel.demo.convert", str(packages), file, str(into)]
    environment = settings.passed_to_children() | OFFLINE
    done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=environment)
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise AutoselError(
            f"transformers could not convert {Path(file).name}",
            why=told[-1] if told else f"exit code {done.returncode}",
            todo="check that the packages transformers, tokenizers and safetensors are complete; pip check lists gaps",
        )


def _convert(packages: str, file: str, into: str) -> None:
    sys.path.append(packages)  # last: the environment's own packages take precedence
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = Path(packages) / file
    named = {"gguf_file": path.name}
    AutoTokenizer.from_pretrained(str(path.parent), **named).save_pretrained(into)
    widened = {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
    AutoModelForCausalLM.from_pretrained(str(path.parent), **named, **widened).save_pretrained(into)


if __name__ == "__main__":
    _convert(*sys.argv[1:])
