"""The conformance suite: parity's checks and the containment's on any candidate, one pytest item each.

    pytest -p autosel.testing.plugin --pyargs autosel.testing --candidate module:function --op rmsnorm

`plugin` adds the options and hands the items out, `subject` runs them, `test_parity` and `test_containment` are what
pytest collects. The candidate is loaded in worker processes only, never in pytest's own.
"""
