"""Race candidates that passed parity, and judge what the samples justify.

`run` drives worker processes (and needs torch); `plan`, `evidence`, `session` and `judge` are pure.
"""
