"""A whole forward as one CUDA graph, for small batches, where launching takes most of the time."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flysurgery import ops
from flysurgery.errors import InferenceError

WARM_UPS = 3


class Captured:
    """One forward of a model for one input shape, replayed from a CUDA graph.

    A call copies its input into the graph's own, replays, and gives fresh copies of the results (with ``fresh=False`` the graph's own
    results, which the next call overwrites). The graph reads weights where they lie, or as packed for kernels. Weights that are changed
    in place take effect in the next call, which captures the graph again if they were packed. Do not move, retype or restore the model
    while the graph is in use, and do not call it from several threads at once.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self._model = model  # keeps the weights that the graph reads
        with torch.inference_mode(False):  # an inference tensor could not be written to outside of that mode
            self._input = example.detach().clone()
        self._capture()

    def _capture(self) -> None:
        model, device = self._model, self._input.device
        if any(module.training for module in model.modules()):
            raise InferenceError("a model in training mode is not captured; call model.eval() first")
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream), torch.no_grad():
                for _ in range(WARM_UPS):
                    model(self._input)
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), ops.taking() as self._weights, torch.cuda.graph(self._graph, stream=stream):
                self._result = model(self._input)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise InferenceError(f"{type(model).__name__} cannot be captured as a CUDA graph: {reason}") from error

    def __call__(self, x: Tensor, *, fresh: bool = True) -> Any:
        """The model's result for ``x``, of the captured shape, dtype and device.

        Raises:
            InferenceError: ``x`` differs in one of these; the message gives both. Or weights have changed, and a new capture fails.
        """
        mine = self._input
        if (x.shape, x.dtype, x.device) != (mine.shape, mine.dtype, mine.device):
            raise InferenceError(
                f"captured for {mine.dtype} of shape {tuple(mine.shape)} on {mine.device}, got {x.dtype} of shape {tuple(x.shape)} on "
                f"{x.device}; capture the model for that as well"
            )
        mine.copy_(x.detach())
        if not self._weights.right():
            self._capture()
        self._graph.replay()
        return pytree.tree_map_only(Tensor, torch.clone, self._result) if fresh else self._result


def capture(model: nn.Module, example: Tensor) -> Captured:
    """Capture the forward of ``model`` for inputs like ``example`` as a CUDA graph. Takes four forwards, and memory for one.

    Raises:
        InferenceError: the model is in training mode or not on CUDA, ``example`` is not where the model is, or something in the forward
            cannot be captured; the message holds the reason.
    """
    if not isinstance(model, nn.Module):
        raise InferenceError(f"expected a torch.nn.Module to capture, got {type(model).__name__}")
    if not isinstance(example, Tensor):
        raise InferenceError(f"expected a tensor as example, got {type(example).__name__}")
    places = {parameter.device for parameter in model.parameters()}
    if example.device.type != "cuda" or places != {example.device}:
        where = ", ".join(sorted(map(str, places))) or "none"
        raise InferenceError(
            f"CUDA graphs need the model and its input on one CUDA device, got an input on {example.device}, weights on {where}"
        )
    return Captured(model, example)
