"""What PyTorch's present state asks of an operation: tracing, export, transforms, autocast, TF32."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from flysurgery.errors import InferenceError

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that operands of matrix products are cast to; None where autocast is off."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):  # meta tensors know no autocast, and dynamo no way to ask
        return None
    return torch.get_autocast_dtype(device_type)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products of x, which autocast casts unless it is float64."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type) or x.dtype


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """``torch.autocast(device_type, enabled=False)``, at a tenth of its cost where no graph is made."""
    if device_type == "meta":
        return nullcontext()
    return torch.autocast(device_type, enabled=False) if torch.compiler.is_compiling() else _Off(device_type)


class _Off:
    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def __enter__(self) -> None:
        self._before = torch.is_autocast_enabled(self._device_type)
        torch.set_autocast_enabled(self._device_type, False)

    def __exit__(self, *raised: object) -> None:
        torch.set_autocast_enabled(self._device_type, self._before)


@torch.compiler.assume_constant_result  # compiled graphs are guarded on this switch by PyTorch
def tf32_allowed() -> bool:
    """Whether PyTorch's settings let float32 matrix products on CUDA round their inputs to TF32.

    Newer PyTorch has ``fp32_precision`` beside ``allow_tf32``, and refuses to read the old name once the new one was set.
    """
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def refuse_second_derivative() -> None:
    """In a backward pass of fused modules: raise where it is to be differentiated itself, as with ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise InferenceError("fused gradients have no second derivatives; call flysurgery.restore(model) before create_graph=True")


def is_tracing(*tensors: Tensor) -> bool:
    """Whether operations on these tensors are recorded or transformed rather than just run.

    This holds under compilation, export and TorchScript tracing, within ``torch.func`` transforms, forward derivatives and dispatch modes
    (fake tensors, operation counters), and for subclasses of Tensor. Only operators that PyTorch knows are safe there.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or not _PLAIN.issuperset(map(type, tensors))
        or bool(torch._C._len_torch_dispatch_stack())
        or _is_transformed()
    )


def _is_transformed() -> bool:
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def foreign_obstacle() -> str | None:
    """Why only PyTorch's own operators may be used here; None where registered ones may be used too."""
    if is_exporting():
        return "an exported graph holds only PyTorch's own operators"
    if not torch.compiler.is_compiling() and _is_transformed():
        return "transforms of torch.func and forward derivatives have rules for PyTorch's own operators alone"
    return None


@torch.compiler.assume_constant_result  # some versions of dynamo evaluate torch.compiler.is_exporting() as true when they trace it
def is_exporting() -> bool:
    """Whether a graph is being made for use without this package: ``torch.export``, ONNX, TorchScript."""
    scripting = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return scripting or torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()
