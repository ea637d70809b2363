"""The ops, by name. `gemv` and `gemm` address `linear` at M = 1 and above."""
