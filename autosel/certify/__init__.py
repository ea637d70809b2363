"""One decode run as a certificate: what was measured, with which decisions, checkable by anyone later.

    certificate (the document)  store (the file)  sign  verify  rerun        statistics  physics  slo
    audit  trace  report  compare  capacity (the memory table)  suite  sweep
    flows that measure: run  run_again  run_suite  run_sweep; each takes a request, a ledger and a listener

sha256 detects accidents and partial edits. Whoever can rewrite the file can recompute the chain, and a cut tail looks
complete; a signature plus a head kept elsewhere makes that evident. Nothing here proves that a measurement was honest.
"""
