"""Kernels built on CUTLASS's headers (kernels/cutlass/): matrix products on tensor cores."""
