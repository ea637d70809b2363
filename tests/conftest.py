"""Tests build kernels and measure rates in a home of their own, kept between runs; never in the user's."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("AUTOSEL_HOME", str(Path(__file__).resolve().parents[1] / ".autosel" / "tests"))
