"""A small, readable decoder whose every op is served by `best()`, and the run that a certificate is made of.

`run` holds the values and loads no torch; `weights`, `model`, `generate` and `measure` do.
"""
