"""Run the kernels that autosel chose inside other software: PyTorch, transformers, serving engines.

Nothing here acts on import: one explicit call switches an integration on, another one off. `import autosel` only offers
the names of operators, `torch.ops.autosel`.
"""
