"""Kernels of libraries that happen to be installed: one file a library. Never installed by us, and never trusted: each
is probed in a process of its own before it may race, and proven like every candidate."""
