"""A small, readable decoder whose ops are all served by `best()`, and the measured run behind a certificate.

`run` holds the values and does not import torch; `weights`, `model`, `generate` and `measure` do.
"""
