"""Test `torch.ops.autosel` in new processes: it exists after both imports, in either order; first use creates it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import drawn

ROOT = Path(__file__).resolve().parents[2]
ORDERS = {
    "torch first": "import torch, autosel",
    "autosel first": "import autosel, torch",
    "autosel first, and a look for torch before its import": (
        "import autosel, importlib.util; assert importlib.util.find_spec('torch').origin; import torch"
    ),
    "an empty namespace before": "import torch; assert not hasattr(torch.ops.autosel, 'attn'); import autosel",
    "both imported again": "import torch, autosel, importlib; importlib.reload(autosel)",
    "a part of torch first": "import autosel; from torch.nn import functional; import torch",
}


def python(home: Path, code: str) -> str:
    """Return the output of a fresh process that runs this."""
    own = {n: v for n, v in os.environ.items() if not n.startswith("AUTOSEL_")}
    variables = {**own, "PYTHONPATH": str(ROOT), "AUTOSEL_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code], cwd=home, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("order", drawn.share(list(ORDERS), days=2))
def test_the_ops_are_there_after_both_imports_in_either_order(order: str, tmp_path: Path) -> None:
    code = f"""
{ORDERS[order]}
import sys
assert "autosel.dispatch" not in sys.modules, "dispatch is imported before the first use of an op"
q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 20, 16)
assert torch.equal(torch.ops.autosel.attn(q, k, k), autosel.best("attn")(q, k, k))
assert torch.ops.autosel.attn is torch.ops.autosel.attn
assert not hasattr(torch.ops.autosel, "no_such_op")
assert not any("autosel" in type(finder).__module__ for finder in sys.meta_path), "autosel's finder is still installed"
"""
    python(tmp_path, code)


def test_the_first_use_may_be_in_a_graph(tmp_path: Path) -> None:
    code = """
import autosel, torch
def norm(x):
    return torch.ops.autosel.rmsnorm(x, x[0], 1e-6) * 2
x = torch.randn(2, 64)
made = torch.compile(norm, fullgraph=True, backend="aot_eager")(x)
assert torch.equal(made, norm(x))
"""
    python(tmp_path, code)


def test_autosel_alone_does_not_import_torch_or_the_database_or_change_how_torch_is_found(tmp_path: Path) -> None:
    code = """
import importlib.util, sys
before = importlib.util.find_spec("torch")
import autosel
assert not {"torch", "sqlalchemy", "numpy"} & set(sys.modules), sorted(sys.modules)
after = importlib.util.find_spec("torch")
assert (after.origin, type(after.loader)) == (before.origin, type(before.loader))
assert "torch" not in sys.modules
"""
    python(tmp_path, code)


def test_a_torch_that_cannot_be_imported_fails_as_it_does_without_autosel(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken')\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import autosel
for _ in range(2):
    try:
        import torch
    except RuntimeError as error:
        assert str(error) == "broken"
    else:
        raise AssertionError
"""
    python(tmp_path, code)
