"""The CUDA backend: fused kernels compiled by NVRTC for the device at hand."""
