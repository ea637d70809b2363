"""Write a kernel package for Hugging Face `kernels`: layers that run decided kernels, and the mapping to them.

    build/torch-cpu/{__init__.py,layers.py,metadata.json}   loaded by LocalLayerRepository (0.17)
    mapping.json                                            layer of a model -> layer of the package

A row is one layer name of Hugging Face's models, with its decisions. A layer without a decision is not in the mapping,
so the model's own forward, its default, is kept. The layers call `autosel.best`, which needs autosel and the decisions
of the serving machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from autosel.errors import UsageError
from autosel.files import read_named
from autosel.integrations.engines import folder as folders
from autosel.integrations.engines.rows import EngineRow
from autosel.values import SERVING, Decision, Fingerprint

VERSION = "0.17.2"
# Layer names of Hugging Face's models (use_kernel_forward_from_hub) -> ops that each needs.
LAYERS: Mapping[str, tuple[str, ...]] = {"RMSNorm": ("rmsnorm",), "SiLUAndMul": ("swiglu",)}
OWN = {"RMSNorm": "RMSNorm", "SiLUAndMul": "SiluAndMul"}
SOURCE = '''"""Written by autosel {version}: layers of Hugging Face models that run this machine's decided kernels."""

import torch

import autosel


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, on the module's own weight and epsilon."""

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return autosel.best("rmsnorm")(rows, self.weight, self.variance_epsilon, 0.0).view(hidden_states.shape)


class SiluAndMul(torch.nn.Module):
    """silu(x[..., :d]) * x[..., d:]"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.reshape(-1, x.shape[-1]).chunk(2, dim=-1)
        return autosel.best("swiglu")(gate.contiguous(), up.contiguous()).view(*x.shape[:-1], gate.shape[1])
'''


def export(fp: Fingerprint, decisions: Sequence[Decision], folder: Path) -> folders.Manifest:
    """Export the package. Raises UsageError if no layer has a decision, and then writes nothing."""
    device = fp.kind
    rows = [_row(layer, ops, decisions, device) for layer, ops in LAYERS.items()]
    mapped = {row.key: row.value for row in rows if row.value}
    if not mapped:
        raise UsageError(
            "nothing to export to hf-kernels",
            why=f"none of {', '.join(LAYERS)} has a decision on {fp.name} that is not the baseline",
            todo="autosel tune --op rmsnorm --op swiglu",
        )
    from autosel.version import __version__

    variant = f"build/torch-{device}"
    metadata = {
        "id": f"autosel-{device}",
        "name": "autosel",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": device},
    }
    files = {
        f"{variant}/metadata.json": folders.document(metadata),
        f"{variant}/__init__.py": "from . import layers as layers\n",
        f"{variant}/layers.py": SOURCE.replace("{version}", __version__),
        "mapping.json": json.dumps({layer: {device: own} for layer, own in mapped.items()}, indent=2) + "\n",
    }
    return folders.write(folder, engine="hf-kernels", engine_version=VERSION, fp=fp, rows=rows, files=files)


def _row(layer: str, ops: Sequence[str], decisions: Sequence[Decision], device: str) -> EngineRow:
    found = [
        d
        for d in decisions
        if d.op in ops and d.state in SERVING and d.arm.digest != d.baseline.digest and not d.workload.traits
    ]
    return EngineRow(
        file="mapping.json",
        key=layer,
        label=layer,
        value=OWN[layer] if found else None,
        source="measured" if found else "default",
        reason=f"decisions {', '.join(str(d.id) for d in found)}" if found else "nobody decided it",
        decision=found[0].id if found else None,
        ask={"layer": layer, "own": OWN[layer], "device": device},
    )


def mapping(folder: Path | str) -> dict[str, dict[str, object]]:
    """Return the mapping for `kernels.use_kernel_mapping`. Raises BadConfig; ImportError without `kernels`."""
    from kernels import LocalLayerRepository

    folders.read(Path(folder))
    found = json.loads(read_named(Path(folder) / "mapping.json", folders.MOST_BYTES))
    return {
        layer: {device: LocalLayerRepository(Path(folder), layer_name=own) for device, own in devices.items()}
        for layer, devices in found.items()
    }
