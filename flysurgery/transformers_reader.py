"""How transformers opens and writes converted models: ``AutoModel.from_pretrained(folder)``, by its extension point for replaced layers."""

from dataclasses import replace
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from flysurgery.errors import PlanError
from flysurgery.surgery import QUANT_METHOD, Plan, find_base, install, plan_of, quantization_entry
from flysurgery.walker import modules_with_separated


@register_quantization_config(QUANT_METHOD)
class FlysurgeryConfig(QuantizationConfigMixin):
    """The plan of a converted model, as its ``config.json`` holds it."""

    def __init__(self, plan: dict[str, Any], **others: Any) -> None:
        self.quant_method = QUANT_METHOD  # pyright: ignore[reportAttributeAccessIssue] - transformers' own methods are an enumeration
        self.plan = plan

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": QUANT_METHOD, "plan": self.plan}


@register_quantizer(QUANT_METHOD)
class FlysurgeryReader(HfQuantizer):
    """Puts the plan's modules into a model on meta, before transformers loads the weights. Nothing is quantized."""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config: Any = self.quantization_config
        try:
            base, base_args = find_base(model, None, None)
            plan = _renamed(Plan.from_json(config.plan), model)
            install(replace(plan, base=base, base_args=base_args), model)
        except PlanError as error:
            raise ValueError(f"the plan in quantization_config does not fit a {type(model).__name__}: {error}") from error
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Take away the marks of a quantized model, which would forbid ``half()``, ``to()`` and training."""
        model.is_quantized = False
        for name in ("hf_quantizer", "quantization_method"):
            vars(model).pop(name, None)
        for module in model.modules():
            getattr(getattr(module, "config", None), "__dict__", {}).pop("_is_quantized", None)
        plan = plan_of(model)
        assert plan is not None  # it was installed before the weights were loaded
        model.config.quantization_config = quantization_entry(plan)
        return model

    def is_serializable(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride] - the base has no result
        return True

    @property
    def is_trainable(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleMethodOverride]
        return True


def _renamed(plan: Plan, model: Any) -> Plan:
    """The plan under the names of ``model``, which may be the trunk of the model that was saved, or the trunk with a head.

    Layers that the trunk does not have, such as the head, are left out.
    """
    prefix, modules = f"{model.base_model_prefix}.", modules_with_separated(model).keys()
    ways = (str, lambda name: name.removeprefix(prefix), lambda name: prefix + name)
    rename = next((way for way in ways if all(way(layer.fqn) in modules for layer in plan.replaced)), str)
    if rename is str:
        return plan
    layers = [replace(layer, fqn=rename(layer.fqn), aliases=tuple(map(rename, layer.aliases))) for layer in plan.layers]
    switches = [replace(switch, module_fqn=rename(switch.module_fqn)) for switch in plan.switches]
    return replace(plan, layers=tuple(layer for layer in layers if layer.fqn in modules), switches=tuple(switches))
