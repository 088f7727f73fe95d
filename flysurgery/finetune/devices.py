"""accelerate, which decides about devices, processes and precision."""

from __future__ import annotations

import os
import random
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flysurgery.errors import OptionError, TrainingError
from flysurgery.finetune.settings import Settings

if TYPE_CHECKING:
    from accelerate import Accelerator


def check_installed(settings: Settings) -> None:
    """See that what the run needs is installed.

    Raises:
        TrainingError: it is not; the message says how to install it.
    """
    if find_spec("accelerate") is None:
        raise TrainingError("training needs accelerate, which is not installed: pip install 'flysurgery[train]'")
    if settings.tensorboard and find_spec("tensorboard") is None and find_spec("tensorboardX") is None:
        raise TrainingError("TensorBoard logs need tensorboard, which is not installed: pip install tensorboard")


def accelerator_for(settings: Settings, folder: Path | None, *, quick: bool = False) -> Accelerator:
    """accelerate's own object for this process, as ``accelerate launch`` or ``accelerate config`` set it up.

    Where neither the settings nor accelerate say anything about precision, ``quick`` takes bfloat16 on CUDA.

    Raises:
        TrainingError: accelerate or tensorboard is missing.
        OptionError: a precision that this machine does not have.
    """
    check_installed(settings)
    from accelerate import Accelerator, DistributedDataParallelKwargs

    logger = "tensorboard" if settings.tensorboard and folder is not None else None
    try:
        accelerator = Accelerator(
            cpu=settings.cpu,
            mixed_precision="bf16" if quick and _is_free(settings) else settings.precision,
            log_with=logger,
            project_dir=folder,
            # Gradients stay where they were reduced, in place of a copy of each.
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    except ValueError as error:
        raise OptionError(f"accelerate cannot run with these options: {str(error).splitlines()[0].rstrip('.')}") from error
    fsdp: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        # Each process has the weights already, and accelerate 1.15 cannot send those of no submodule, such as a class token.
        fsdp.cpu_ram_efficient_loading = False
    return accelerator


def _is_free(settings: Settings) -> bool:
    """Whether the precision is free to choose, and bfloat16 is there and pays."""
    said = settings.precision is not None or "ACCELERATE_MIXED_PRECISION" in os.environ
    return not said and not settings.cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


def leave_processes() -> None:
    """End what connects this process with the others that train; after that it can train no more. Alone, it does nothing."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def seed_everything(*numbers: int) -> None:
    """Start every generator of this process from ``numbers``.

    Called before each update with its number, so that what is drawn depends on the seed, the update and the process, and
    never on what ran before: a run that is taken up again draws what it would have drawn.
    """
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
