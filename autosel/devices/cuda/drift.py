"""Check whether a GPU's stored rates still hold, by measuring two of them three times."""

from __future__ import annotations

import time

from autosel.devices.cuda import nvml
from autosel.devices.device import LOOKS, Drift, off
from autosel.values import Fingerprint


def drifted(fp: Fingerprint, ordinal: int) -> Drift:
    """Check a GPU. Stored rates are the best of many windows, these the best of a few, which differs by well below the
    limit. A device with other users is not measured: the result would be useless, and the measurement costs them half a
    second."""
    started, uuid, what = time.monotonic(), nvml.read(ordinal).uuid, "graph node"
    if nvml.is_shared(uuid):
        return Drift(read=1.0, start=1.0, what=what, moved=False, shared=True, seconds=time.monotonic() - started)
    from autosel.devices.cuda import probe

    found = probe.looks(ordinal, LOOKS)
    read, node = fp.rates.get("read_bytes_per_s"), fp.rates.get("graph_node_s")
    reads = [look.read_bytes_per_s / read.value if read else 1.0 for look in found]
    nodes = [node.value / look.graph_node_s if node else 1.0 for look in found]
    return Drift(
        read=max(reads),
        start=max(nodes),
        what=what,
        moved=off(reads) or off(nodes),
        shared=nvml.is_shared(uuid) or bool(nvml.slowdown(uuid)),
        seconds=time.monotonic() - started,
    )
