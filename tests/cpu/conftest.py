"""In CI the inputs of proofs are the same each time, as Hypothesis's examples are: a change is judged, not a draw."""

from __future__ import annotations

import os
from unittest.mock import patch

if os.environ.get("CI"):
    with patch("secrets.token_hex", return_value="continuous"):
        from autosel.parity import check

        assert check.INPUTS == "continuous"
