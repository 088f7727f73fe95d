"""PyTorch's operators on lists of tensors, a few launches for each list, under names that its own optimizers use."""

# pyright: reportPrivateImportUsage=false
from torch import _foreach_add as add
from torch import _foreach_copy_ as copy_
from torch import _foreach_div as div
from torch import _foreach_lerp as lerp
from torch import _foreach_lerp_ as lerp_
from torch import _foreach_mul as mul
from torch import _foreach_mul_ as mul_
from torch import _foreach_sqrt as sqrt
from torch import _foreach_sub_ as sub_

__all__ = ["add", "copy_", "div", "lerp", "lerp_", "mul", "mul_", "sqrt", "sub_"]
