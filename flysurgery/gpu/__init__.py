"""The host side of the kernels: how they are compiled, configured, given their weights, launched, replayed and tuned."""
