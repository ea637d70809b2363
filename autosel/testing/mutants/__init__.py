"""Mutation scores: the checks of parity run on wrong kernels that are derived from each op's contract.

    python -m autosel.testing.mutants [--op attn] [--json]
    python -m autosel.testing.mutants --source [--kernel attn_decode] [--json]

A mutant is an op's reference with one fault, or one of our C++ kernels with one change in its source. Faults in a
reference are derived from argument kinds, shapes and dtypes, changes of a source from the rules of C++; neither uses
knowledge of a kernel. A mutant that passes every check is a gap in the checks.
"""
