"""Write files for serving engines: decisions and derived tiles in each engine's format, and check that they are read.

    rows      the content and source of each row: measured, carried over, derived, or the engine's default
    folder    the files and their manifest on disk, each replaced atomically
    ask       the engine's own lookup of each row, in a separate process
    <engine>  a format: vllm, sglang, inductor, hf_kernels (flashinfer's is the dataset of flashinfer_bench)

No engine is a dependency, because engines pin torch.
"""
