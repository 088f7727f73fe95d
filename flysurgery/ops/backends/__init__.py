"""The backends that run PyTorch's operators, one in each file."""
