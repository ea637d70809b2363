"""The conformance suite: checks of parity and containment for any candidate, one pytest item each.

    pytest -p autosel.testing.plugin --pyargs autosel.testing --candidate module:function --op rmsnorm

`plugin` adds the options and items, `subject` runs them, and pytest collects `test_parity` and `test_containment`.
The candidate runs only in worker processes, never in pytest's process.
"""
