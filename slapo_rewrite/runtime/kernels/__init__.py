"""Fused operations: Triton on a GPU, PyTorch's own operations everywhere else."""
