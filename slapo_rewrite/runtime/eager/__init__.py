"""The functions that rules call instead of kernels, in PyTorch's operations alone."""
