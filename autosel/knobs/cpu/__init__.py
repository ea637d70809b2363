"""CPU closed forms (research: likwid/STREAM practice, Little's law for cache lines); one file a kernel family."""
