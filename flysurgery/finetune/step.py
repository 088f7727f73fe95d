"""One update: forward, losses, backward, clipping, step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2, get_optimizer_class  # pyright: ignore[reportPrivateImportUsage]
from timm.scheduler.cosine_lr import CosineLRScheduler
from torch import Tensor, nn

from flysurgery.errors import OptionError
from flysurgery.finetune.devices import seed_everything
from flysurgery.finetune.groups import parameter_groups
from flysurgery.finetune.losses import Losses, blocks_loss, class_loss, logits_loss
from flysurgery.finetune.settings import Settings
from flysurgery.finetune.teacher import Outputs, Teacher

if TYPE_CHECKING:
    from accelerate import Accelerator

UPDATES = 1 << 30
"""Sets the seeds of updates apart from those of epochs."""


class Stepper:
    """A model with its optimizer and schedule, as accelerate prepared them, and what its outputs are held against."""

    def __init__(
        self, model: nn.Module, settings: Settings, accelerator: Accelerator, *, updates: int, num_classes: int, teacher: Teacher | None
    ) -> None:
        self._settings, self._accelerator, self._teacher = settings, accelerator, teacher
        self._outputs = Outputs(model, teacher.blocks if teacher is not None else ())
        self._own_forward = "forward" in vars(model)
        try:
            fused = _fused(settings.optimizer) if accelerator.device.type == "cuda" else {}
            optimizer = create_optimizer_v2(
                parameter_groups(model, settings),
                settings.optimizer,
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                **fused,
            )
        except (ValueError, KeyError, AssertionError) as error:
            raise OptionError(f"timm has no optimizer '{settings.optimizer}'; adamw, lamb and sgd are some that it has") from error
        # One more than there are, so that the last update still moves something.
        self._schedule = CosineLRScheduler(
            optimizer, t_initial=updates + 1, warmup_t=round(settings.warm_up * updates), warmup_lr_init=0.0, t_in_epochs=False
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self._mixup = None
        if settings.mixes:
            self._mixup = Mixup(settings.mixup, settings.cutmix, label_smoothing=settings.smoothing, num_classes=num_classes)
        self._class_loss = class_loss(settings)

    @property
    def learning_rate(self) -> float:
        """The rate of parameters whose own factor is 1."""
        group = self.optimizer.param_groups[0]
        return group["lr"] / group["lr_scale"]

    def update(self, batches: Iterator[tuple[Tensor, Tensor]], number: int) -> Tensor:  # shape: (5,)
        """Make update ``number``. Gives the four losses of this process and 1 if they or the gradient were no finite numbers, else 0.

        Nothing is read from the device, so that it need not wait.
        """
        settings, accelerator = self._settings, self._accelerator
        if not self.model.training:
            self.model.train()
        self._schedule.step_update(number + 1)
        self.optimizer.zero_grad()
        sums = torch.zeros(4, device=accelerator.device)
        for part in range(settings.accumulation):
            images, classes = next(batches)
            seed_everything(settings.seed, UPDATES, number, part, accelerator.process_index)
            with self._synchronized(part == settings.accumulation - 1):
                losses = self._losses(images, classes)
                accelerator.backward(losses.total / settings.accumulation)
            found = torch.stack([losses.total, losses.classes, losses.logits, losses.blocks])
            sums += found.detach().float() / settings.accumulation
        norm: Any = accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        self.optimizer.step()
        bad = ~torch.isfinite(sums[0])
        if accelerator.scaler is None and norm is not None:  # with a scaler, an overflow skips the update and is no failure
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            bad = bad | ~torch.isfinite(norm.to(sums.device))
        return torch.cat([sums, bad.float().view(1)])

    def close(self) -> nn.Module:
        """The bare model, without accelerate's wrapping, hooks or optimizer."""
        self._outputs.close()
        model = self._accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        if not self._own_forward:
            # With mixed precision accelerate leaves a forward on the instance, which copies and exports would carry along.
            vars(model).pop("forward", None)
        self._accelerator.free_memory()
        return model

    def _synchronized(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self._accelerator.no_sync(self.model)

    def _losses(self, images: Tensor, classes: Tensor) -> Losses:
        settings = self._settings
        target = classes
        if self._mixup is not None:
            images, target = self._mixup(images, classes)
        scores = self.model(images)
        of_classes = self._class_loss(scores.float(), target)
        zero = of_classes.new_zeros(())
        if self._teacher is None:
            return Losses(of_classes, of_classes, zero, zero)
        with self._accelerator.autocast():
            wanted, blocks = self._teacher(images)
        of_logits = logits_loss(scores, wanted, settings.temperature)
        of_blocks = blocks_loss(self._outputs.last, blocks) if blocks else zero
        share = settings.logits_weight
        total = (1 - share) * of_classes + share * of_logits + self._teacher.weight * of_blocks
        return Losses(total, of_classes, of_logits, of_blocks)


def _fused(optimizer: str) -> dict[str, Any]:
    """What has timm make an optimizer that steps by few launches, where it is one of PyTorch's that can."""
    parameters = inspect.signature(get_optimizer_class(optimizer, bind_defaults=False)).parameters
    return {"fused": True} if "fused" in parameters else {}
