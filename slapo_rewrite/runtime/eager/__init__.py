"""What rules call in the place of kernels: the same functions in PyTorch's operations alone."""
