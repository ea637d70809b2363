"""A mutation score: wrong kernels derived from each op's contract, run through the checks of parity.

    python -m autosel.testing.mutants [--op attn] [--json]
    python -m autosel.testing.mutants --source [--kernel attn_decode] [--json]

A mutant is an op's reference with one fault, or one of our C++ kernels with one change in its source. The operators
that make faults of a reference know argument kinds, shapes and dtypes, those of a source know C++; neither knows a
kernel. A mutant that passes every check is a gap in the checks.
"""
