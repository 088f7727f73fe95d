"""The backends: the CUDA kernels, and those that run PyTorch's operators."""
