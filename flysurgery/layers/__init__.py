"""The modules that surgery puts in the place of dense linear layers."""

from flysurgery.layers.butterfly_conv import ButterflyConv
from flysurgery.layers.butterfly_linear import ButterflyLinear
from flysurgery.layers.split_linear import SplitLinear

__all__ = ["ButterflyConv", "ButterflyLinear", "SplitLinear"]
