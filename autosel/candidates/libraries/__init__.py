"""Kernels of installed libraries: one file per library.

autosel never installs them and never trusts them: each is probed in a child process before it may race, and proven like
every candidate.
"""
