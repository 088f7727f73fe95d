"""LoRA and DoRA on converted layers, by peft's own extension point for layers that it does not know."""

import warnings
from typing import Any

from peft import LoraConfig
from peft.tuners.lora import Linear
from torch import nn

from flysurgery.errors import SurgeryError
from flysurgery.inference import is_optimized
from flysurgery.layers import ButterflyConv, ButterflyLinear, SplitLinear
from flysurgery.surgery.transaction import dense_layer


class LoraButterfly(Linear):
    """peft's LoRA layer around a ``ButterflyLinear`` or a ``SplitLinear``.

    Merging is exact: a product of factors plus a low-rank product has no factors, so the merged layer is dense. Unmerging puts the
    converted layer back.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, **settings: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Unsupported layer type")  # it has in_features and out_features, which is all that is read
            super().__init__(base_layer, adapter_name, **settings)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        converted = self.base_layer
        if not isinstance(converted, nn.Linear):
            self.base_layer = dense_layer(converted).requires_grad_(False)  # pyright: ignore[reportArgumentType]
        try:
            super().merge(safe_merge, adapter_names)
        finally:
            if not self.merged:
                self.base_layer = converted
            elif self.base_layer is not converted:
                self.base_layer.__dict__[_CONVERTED] = converted  # not as a child: a dense layer has no factors to save

    def unmerge(self) -> None:
        super().unmerge()
        converted = vars(self.base_layer).get(_CONVERTED)
        if converted is not None:  # the dense layer may have been moved meanwhile
            weight = self.base_layer.weight
            self.base_layer = converted.to(weight.device, weight.dtype).train(self.training)


_CONVERTED = "_flysurgery_converted"


def lora_config(model: nn.Module, config: LoraConfig) -> LoraConfig:
    """Let peft adapt the converted layers of ``model`` as it adapts ``nn.Linear``; gives ``config``, changed.

    ``get_peft_model(model, lora_config(model, LoraConfig(target_modules="all-linear")))``. "all-linear" then means converted layers too;
    a layer taken apart into q, k and v has one adapter for each part. To open a saved adapter give
    ``config=lora_config(model, LoraConfig.from_pretrained(folder))`` to ``PeftModel.from_pretrained``.

    Merged layers are dense, because factors cannot hold a sum: ``merge_and_unload`` gives the dense speed. Leave adapters unmerged to
    keep the converted layers. After ``merge_and_unload`` call ``flysurgery.densify(model)``, which takes the plan off the model.

    Raises:
        SurgeryError: the model is optimized; fused modules do not call the layers that adapters stand in for.
    """
    if is_optimized(model):
        raise SurgeryError("the model is optimized, and its fused modules would pass adapters by; undo it first: flysurgery.restore(model)")
    layers: dict[Any, Any] = {ButterflyConv: _no_convolution, ButterflyLinear: LoraButterfly, SplitLinear: LoraButterfly}
    config._register_custom_module(layers)
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        config.target_modules = [name for name, module in model.named_modules() if _is_linear(module)]
    return config


def _no_convolution(base_layer: nn.Module, adapter_name: str, **settings: Any) -> nn.Module:
    raise SurgeryError("LoRA goes on linear layers, and target_modules names a converted 1x1 convolution; leave it out")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | ButterflyLinear) and not isinstance(module, ButterflyConv)
