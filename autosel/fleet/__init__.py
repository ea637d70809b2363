"""Spread one tune over many devices: `spread` assigns parts to workers, `on_ray` finds workers on a Ray cluster.

Needs the extra `ray`, and for workers on other hosts a ledger on a server.
"""
