"""What versions before 2026-11-25 stored about ops that are formats of another op now, in today's words.

    modern_key("gemv_fp8/M1.N4096.K4096/bf16") == "linear/M1.N4096.K4096/bf16.weight=fp8_e4m3-row"

`formats.FORMER_OPS` names these ops. A stored document is changed where it names the op (workload, key, bucket), its
baseline, or a recipe that took the op's operands in their old order. Reasons stay: they are what was said then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autosel.formats import FORMER_OPS

# PyTorch's way of each: its name and function then, and now.
BASELINES: Mapping[str, str] = {"torch:gemv_fp8": "torch:linear", "torch:attn_decode_fp8": "torch:sdpa"}
TARGETS: Mapping[str, str] = {
    "autosel.ops.eager:gemv_fp8": "autosel.ops.eager_stored:linear",
    "autosel.ops.eager:attn_decode_fp8": "autosel.ops.eager_stored:attn",
}


def modern_key(text: str) -> str:
    """A workload's key or bucket, alone or inside a serving or budget key (`<hw_id>/<mode>/<bucket>[/<lengths>]`)."""
    parts = text.split("/")
    for at, part in enumerate(parts[:-2]):
        former = FORMER_OPS.get(part)
        if former is not None:
            parts[at], parts[at + 2] = former.op, f"{parts[at + 2]}.{former.trait}={former.format}"
            return "/".join(parts)
    return text


def modern(document: Any, op: str = "") -> Any:
    """A stored document. `op`: the former op that it is about, where it does not say so itself."""
    if isinstance(document, str):
        return BASELINES.get(document) or TARGETS.get(document) or document
    if isinstance(document, list):
        return [modern(item, op) for item in document]
    if not isinstance(document, dict):
        return document
    named = str(document.get("op", ""))
    op = named if named in FORMER_OPS else op
    made = {BASELINES.get(name, name): modern(item, op) for name, item in document.items()}
    former = FORMER_OPS.get(op)
    if former is None:
        return made
    if named == op:
        made["op"] = former.op
    if named == op and "dims" in made:
        made["traits"] = [*made.get("traits", []), [former.trait, former.format]]
    if isinstance(made.get("bucket"), str):
        made["bucket"] = modern_key(made["bucket"])
    if made.get("kind") in ("native", "python") and not made.get("operands"):
        target = str(made.get("target", ""))
        made |= {} if target in TARGETS.values() else {"operands": list(former.operands)}
    return made
