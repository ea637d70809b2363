"""GPUs of CUDA. Status: not yet run on silicon, except where a module says so."""
