"""The daemon: writes the ledger, tunes workloads that clients miss while the device is idle, demotes on faults.

    bind (sockets)  access (who may)  bodies (limits)  app (routes)  pages  events  metrics
    api (the table of addresses)  decisions  clients (what they send)  fleet  certificates
    writer (one thread, group commit)  jobs (queue)  tuner (child process)  idle  upkeep (faults, staleness)  serve

The process loads no tensor library; a child runs work that needs one.
"""
