"""The Triton kernels of kernels/triton/ as modules, in a checkout and in a wheel alike.

`autosel.triton_kernels.gemv` is kernels/triton/gemv.py: a real module with a name of its own, so that no user's `rope`
or `sample` meets ours on sys.path, and a decision names it without a path of the machine it was made on.
"""

from __future__ import annotations

from autosel import resources

__path__ = [str(resources.kernels() / "triton")]
