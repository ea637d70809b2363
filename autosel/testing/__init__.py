"""The conformance suite: the checks of parity and containment on any candidate, one pytest item each.

    pytest -p autosel.testing.plugin --pyargs autosel.testing --candidate module:function --op rmsnorm

`plugin` adds the options and the items, `subject` runs them, and pytest collects `test_parity` and `test_containment`.
The candidate is loaded in worker processes only, never in pytest's own.
"""
