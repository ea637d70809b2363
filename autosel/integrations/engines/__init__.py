"""Files that serving engines read: what autosel knows of a device, in each engine's own format, and whether it is read.

    rows      what each row of a file says, and from where: measured, carried over, derived, or the engine's default
    folder    the files and their manifest on disk, replaced as a whole file each
    ask       the engine's own lookup, in a process of its own, answering for each row
    <engine>  its format: vllm, sglang, inductor, hf_kernels (flashinfer's is the dataset of flashinfer_bench)

No engine is a dependency: they pin torch, and ours must fit beside theirs.
"""
