"""Closed forms: from a fingerprint and a workload to a candidate's settings, with no search and no torch.

`cpu/` and `gpu/` hold one file a kernel family; `facts` picks the figures a formula needs out of a fingerprint.
"""
