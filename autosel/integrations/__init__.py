"""The kernels autosel chose, inside what people already run: PyTorch, transformers, serving engines.

Nothing here acts on import: each integration is switched on by one explicit call and off by another. Only the names of
operators, `torch.ops.autosel`, are offered by `import autosel`.
"""
