"""A mutation score: wrong kernels derived from each op's contract, run through the checks of parity.

    python -m autosel.testing.mutants [--op attn] [--json]

A mutant is an op's reference with one fault. The operators that make faults know argument kinds, shapes and dtypes, and
nothing of any kernel. A mutant that passes every check is a gap in the checks.
"""
