"""Certificates of decode runs: the measurements and the decisions, for anyone to check later.

    certificate (the document)  store (the file)  sign  verify  rerun        statistics  physics  slo
    audit  trace  report  compare  capacity (the memory table)  suite  sweep
    flows that measure: run  run_again  run_suite  run_sweep; each takes a request, a ledger and a listener

sha256 detects accidents and partial edits. A person who can rewrite the file can recompute the chain, and a file cut at
the end looks complete; a signature and a head kept elsewhere reveal that. None of this proves that a measurement was
honest.
"""
