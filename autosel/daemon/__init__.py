"""The daemon: owns the ledger's writes, tunes what clients miss while the device is idle, demotes on faults, shows it.

    bind (sockets)  access (who may)  bodies (limits)  app (routes)  api  openapi  pages  events  metrics
    writer (one thread, group commit)  jobs (queue)  tuner (child process)  idle  upkeep (faults, staleness)  serve

The process loads no tensor library: what needs one runs in a child.
"""
