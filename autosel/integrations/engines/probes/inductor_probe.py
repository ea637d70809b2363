"""Probe Inductor: lower the product of each row as torch.compile does, and check what its lookup finds.

The lowering stops at the lookup: nothing is compiled or timed.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Found(Exception):
    """Raised to end a lowering."""


def main() -> dict[str, Any]:
    question = json.load(sys.stdin)
    try:
        import torch
        from torch._inductor import lookup_table  # noqa: F401
    except ImportError as error:
        return {"absent": str(error)}
    table = json.loads(Path(question["folder"], "lookup_table.json").read_text())
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "a CPU"
    look = lookup(table, cuda, question["device"])
    rows = []
    for row in question["rows"]:
        there, key = look(row["ask"])
        here = there and cuda and device == question["device"]
        if here:
            why = ""
        elif not cuda:
            why = f"Inductor reads the table where CUDA is available; torch {torch.__version__} has none here"
        elif not there:
            why = "Inductor asks for " + key
        else:
            why = "the device is " + device
        rows.append({"here": here, "there": there, "why": why, "same": True})
    return {"version": torch.__version__, "device": device, "rows": rows, "setting": ""}


def lookup(table: dict[str, Any], cuda: bool, device_name: str) -> Callable[[Mapping[str, Any]], tuple[bool, str]]:
    """Return ask -> (whether the named template is found, the key that Inductor made)."""
    import torch
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering
    from torch._inductor.kernel.mm import mm_template
    from torch._inductor.lookup_table import LookupTableChoices
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    heard: dict[str, Any] = {}

    class Choices(LookupTableChoices):
        """The device's name is given, so that a machine without the device can be probed."""

        def _get_lookup_table(self) -> dict[str, Any]:
            return table

        @staticmethod
        def _get_device_key(_device: Any) -> str:  # type: ignore[override]
            return device_name

        def lookup_template_configs(self, inputs: Any, op: str, uids: list[str], hashes: Any = None) -> Any:
            asked = dict(hashes or {})
            asked.setdefault("aten::mm", None)
            asked["triton::mm"] = mm_template.src_hash
            heard["key"] = self.make_lookup_key(inputs, op, include_device=True)
            heard["found"] = super().lookup_template_configs(inputs, op, list(asked), asked)
            raise Found

    def look(ask: Mapping[str, Any]) -> tuple[bool, str]:
        heard.clear()
        mode = FakeTensorMode(shape_env=ShapeEnv())
        kind, dtype = "cuda" if cuda else "cpu", getattr(torch, ask["dtype"].partition(".")[2])
        with mode:
            x = torch.empty(ask["m"], ask["k"], dtype=dtype, device=kind)
            w = torch.empty(ask["n"], ask["k"], dtype=dtype, device=kind)
        graph = torch.fx.Graph()
        left, right = graph.placeholder("x"), graph.placeholder("w")
        with mode:
            turned = graph.call_function(torch.ops.aten.permute.default, (right, [1, 0]))
            made = graph.call_function(torch.ops.aten.mm.default, (left, turned))
            for node, value in ((left, x), (right, w), (turned, w.t()), (made, x @ w.t())):
                node.meta["val"] = value
        graph.output((made,))
        lowering = GraphLowering(torch.fx.GraphModule({}, graph), shape_env=mode.shape_env, example_inputs=[x, w])
        tuning = config.patch(max_autotune_gemm=True)
        with tuning, V.set_fake_mode(mode), V.set_graph_handler(lowering), V.set_choices_handler(Choices()):
            try:
                lowering.run(x, w)
            except Exception:
                if "key" not in heard:
                    raise
        return ask["template"] in heard.get("found", {}), str(heard.get("key"))

    return look


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main()) + "\n")
