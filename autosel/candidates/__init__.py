"""Candidates, the ways to run an op: the list of all (`registry`), and how each is written, named, loaded and
identified.

Importing this package does not import torch; `load` and running a candidate do.
"""
