"""Ways to run an op: what exists (`registry`), how each is written, named, loaded and told apart.

Importing this package loads no torch; `load` and running a candidate do.
"""
