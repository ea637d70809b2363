"""The Triton kernels of kernels/triton/ as modules, in a checkout and in a wheel.

`autosel.triton_kernels.gemv` is kernels/triton/gemv.py: a real module with a unique name, so that a user's `rope` or
`sample` on sys.path does not collide with it, and a decision can name it without a path of the machine.
"""

from __future__ import annotations

from autosel import resources

__path__ = [str(resources.kernels() / "triton")]
