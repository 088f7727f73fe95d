"""One update: forward, losses, backward, clipping, step; and how fast which parameters learn."""

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from timm.data.mixup import Mixup
from timm.optim import create_optimizer_v2, get_optimizer_class  # pyright: ignore[reportPrivateImportUsage]
from torch import Tensor, nn
from torch.nn import functional

from flysurgery.errors import OptionError
from flysurgery.fidelity import Captured, Copied, Muon, relative_error
from flysurgery.fidelity import parameter_groups as groups_of_muon
from flysurgery.finetune.batches import seed_everything
from flysurgery.finetune.data import TrainingData
from flysurgery.finetune.judge import Teacher, as_tensor
from flysurgery.finetune.settings import MUON, Settings
from flysurgery.inference import Groups, fuse, restore
from flysurgery.layers import ButterflyLinear

if TYPE_CHECKING:
    from accelerate import Accelerator

UPDATES = 1 << 30  # sets the seeds of updates apart from those of epochs


def logits_loss(scores: Tensor, wanted: Tensor, temperature: float) -> Tensor:  # shapes: (batch, classes)
    """Give the Kullback-Leibler divergence of the softened scores from the teacher's, times the squared temperature.

    Source: G. Hinton, O. Vinyals, J. Dean, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
    """
    mine, theirs = (functional.log_softmax(each.float() / temperature, dim=-1) for each in (scores, wanted))
    return functional.kl_div(mine, theirs, reduction="batchmean", log_target=True) * temperature**2


class Stepper:
    """A model with its optimizer and schedule, as accelerate prepared them, and what its outputs are held against.

    On CUDA updates are replayed as one graph, where one process trains alone, in bfloat16 or float32, and the optimizer allows it. Then
    ``fuses`` puts fused modules into the model until ``close``, where they are faster, or those of ``only``; ``groups`` names them. Until
    ``plan`` sets the schedule, the rate is zero.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        accelerator: "Accelerator",
        data: TrainingData,
        teacher: Teacher | None,
        *,
        fuses: bool,
        only: Groups | None = None,
    ) -> None:
        self._settings, self._accelerator, self._teacher, self._labelled = settings, accelerator, teacher, data.labelled
        self._own_forward = "forward" in vars(model)
        on_cuda = accelerator.device.type == "cuda"
        self._optimizer = optimizer_of(model, settings, on_cuda=on_cuda)
        alone = on_cuda and accelerator.num_processes == 1 and accelerator.scaler is None
        captures = alone and _can_be_captured(self._optimizer)
        self.groups: Groups = []
        if captures and fuses:
            with accelerator.autocast():
                self.groups = fuse(model.to(accelerator.device).eval(), only=only, training="captured")  # where it trains, it is measured
        self._updates, self._highest, self.learning_rate = 0, 0.0, 0.0
        self._pull = None if teacher is None else teacher.pull(model)
        if self._pull is not None:
            self._pull.__enter__()
        self.model, self.optimizer = accelerator.prepare(model, self._optimizer)
        self._mixup = None
        if settings.mixes:
            self._mixup = Mixup(settings.mixup, settings.cutmix, label_smoothing=settings.smoothing, num_classes=max(1, data.num_classes))
        # mixed classes are smoothed by what mixes them
        self._class_loss = nn.CrossEntropyLoss(label_smoothing=0.0 if settings.mixes else settings.smoothing)
        self._rates = [torch.zeros((), device=accelerator.device) for _ in self._optimizer.param_groups] if captures else []
        self._captured = Captured([*model.parameters(), *model.buffers()], captures=captures)

    def plan(self, updates: int, rate: float) -> None:
        """Set the schedule: up in a line to ``rate``, then down in a cosine until ``updates`` are done."""
        self._updates, self._highest = updates, rate

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Make updates inside, before there is a plan; afterwards the model and the optimizer are as they were."""
        before, optimizer = Copied(self.bare), copy.deepcopy(self.optimizer.state_dict())
        try:
            yield
        finally:
            before.put_back()
            self.optimizer.load_state_dict(optimizer)
            self._captured.forget()

    @property
    def bare(self) -> nn.Module:
        """The model without other processes, with its precision."""
        return self._accelerator.unwrap_model(self.model)

    def update(self, batches: Iterator[tuple[Tensor, Tensor]], number: int) -> Tensor:  # shape: (5,)
        """Make update ``number``, and give the losses of this process: all, classes, output, blocks; reads nothing from the device.

        The last number is 1 if the loss or the gradient was no finite number, else 0.
        """
        if not self.model.training:
            self.model.train()
        self.learning_rate = self._rate_of(number + 1)
        for index, group in enumerate(self._optimizer.param_groups):
            rate = self.learning_rate * group.get("lr_scale", 1.0)
            group["lr"] = self._rates[index].fill_(rate) if self._rates else rate
        parts = [next(batches) for _ in range(self._settings.accumulation)]
        seed_everything(self._settings.seed, UPDATES, number, self._accelerator.process_index)
        if self._mixup is not None:
            parts = [self._mixup(*part) for part in parts]
        batch = [tensor for part in parts for tensor in part]
        return self._captured(self._once, *batch)

    def _rate_of(self, number: int) -> float:
        warm_up = round((self._settings.warm_up or 0.0) * self._updates)
        if number < warm_up:
            return number * (self._highest / warm_up)
        # as if there were one update more, so that the last one still moves something
        return 0.5 * self._highest * (1 + math.cos(math.pi * number / (self._updates + 1)))

    def _once(self, *batch: Tensor) -> Tensor:  # shape: (5,)
        """Make an update from images and targets, in turns, at the rates of now."""
        settings, accelerator = self._settings, self._accelerator
        self.optimizer.zero_grad()
        sums = torch.zeros(4, device=accelerator.device)
        parts = list(zip(batch[::2], batch[1::2], strict=True))
        for part, (images, target) in enumerate(parts):
            is_last = part == len(parts) - 1
            with nullcontext() if is_last else accelerator.no_sync(self.model):
                total, of_classes, of_output = self._losses(images, target)
                weight = self._weigh(len(parts))
                accelerator.backward(total / len(parts))
            blocks = total.new_zeros(()) if self._pull is None else self._pull.error()
            found = torch.stack([total + weight * blocks, of_classes, of_output, blocks])
            sums += found.detach().float() / len(parts)
        norm: Any = accelerator.clip_grad_norm_(self.model.parameters(), settings.clip or math.inf)
        self.optimizer.step()
        bad = ~torch.isfinite(sums[0])
        if accelerator.scaler is None and norm is not None:  # with a scaler, an overflow skips the update and is no failure
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            bad = bad | ~torch.isfinite(norm.to(sums.device))
        return torch.cat([sums, bad.float().view(1)])

    def close(self) -> nn.Module:
        """Give the bare model, without accelerate's wrapping, hooks or optimizer."""
        if self._pull is not None:
            self._pull.__exit__(None, None, None)
        model = self._accelerator.unwrap_model(self.model, keep_fp32_wrapper=False, keep_torch_compile=False)
        if not self._own_forward:
            # with mixed precision accelerate leaves a forward on the instance, which copies and exports would carry along
            vars(model).pop("forward", None)
        if self.groups:
            restore(model)
        self._accelerator.free_memory()
        return model

    def _weigh(self, parts: int) -> float:
        """Give the weight of the blocks' errors, and set it for the gradients of the backward pass of one of ``parts``."""
        if self._pull is None or self._teacher is None:
            return 0.0
        weight, scaler = self._teacher.weight, self._accelerator.scaler
        # gradients that enter between the blocks are not scaled with the loss
        scaled: Any = weight if scaler is None else scaler.scale(torch.tensor(weight, device=self._accelerator.device))
        self._pull.weight = scaled / parts
        return weight

    def _losses(self, images: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Give means over the images: the loss to learn from, without the blocks' errors, and its parts of classes and output."""
        teacher, wanted = self._teacher, None
        if teacher is not None:  # before the student, whose blocks are compared with the teacher's as they come
            with self._accelerator.autocast():
                wanted = teacher(images)
        output = as_tensor(self.model(images))
        zero = output.new_zeros((), dtype=torch.float32)
        of_classes = self._class_loss(output.float(), target) if self._labelled else zero
        if teacher is None or wanted is None:
            return of_classes, of_classes, zero
        if teacher.has_scores:
            of_output = logits_loss(output, wanted, self._settings.temperature)
        else:  # relative to how the teacher's features differ from each other
            of_output, _, _ = relative_error(output.flatten(1), wanted.flatten(1))
        share = teacher.output_weight
        return (1 - share) * of_classes + share * of_output, of_classes, of_output


def optimizer_of(model: nn.Module, settings: Settings, *, on_cuda: bool = False) -> torch.optim.Optimizer:
    """Make the optimizer that the settings name; its rate is set later. Raises OptionError where timm knows none of that name."""
    name = settings.optimizer or ""
    if name == MUON:
        return Muon(groups_of_muon(model), 0.0)
    try:
        takes = inspect.signature(get_optimizer_class(name, bind_defaults=False)).parameters if on_cuda else ()
        # PyTorch's own step in few launches, which a CUDA graph may hold
        options: dict[str, Any] = {name: True for name in ("fused", "capturable") if name in takes}
        return create_optimizer_v2(parameter_groups(model, settings), name, lr=1.0, weight_decay=settings.weight_decay or 0.0, **options)
    except (ValueError, KeyError, AssertionError) as error:
        raise OptionError(f"there is no optimizer '{name}'; muon is one, and timm has others, such as adamw, lamb and sgd") from error


def _can_be_captured(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a CUDA graph may hold the optimizer's step."""
    return isinstance(optimizer, Muon) or bool(optimizer.defaults.get("capturable"))


def parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Make groups for one of timm's optimizers: weight decay for matrices and factors only, and the rate of factors by their fan-in.

    A step of Adam moves each entry by about the learning rate whatever the gradient, so the outputs of a layer move in proportion to
    the number of entries that a sum runs over: in_features for a dense layer, c for a factor of pattern (a, b, c, d). Multiplying a
    factor's rate by in_features / c lets one learning rate serve both. It is the group's ``lr_scale``.

    Source: A. Potapczynski et al., Compute Better Spent: Replacing Dense Layers with Structured Matrices, arXiv:2406.06248, section 3.
    """
    scales: dict[nn.Parameter, float] = {}
    for module in model.modules():
        if isinstance(module, ButterflyLinear) and settings.factor_rate != "same":
            for factor, pattern in zip(module.factors, module.architecture, strict=True):
                scales[factor] = module.in_features / pattern.c
    undecayed = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # pyright: ignore[reportCallIssue]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter.ndim <= 1 or name in undecayed else settings.weight_decay or 0.0
            groups.setdefault((decay, scales.get(parameter, 1.0)), []).append(parameter)
    return [{"params": members, "weight_decay": decay, "lr_scale": scale} for (decay, scale), members in groups.items()]
