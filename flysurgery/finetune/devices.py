"""Sets up accelerate, which decides about devices, processes and precision, and the random generators."""

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
    """Check that what the run needs is installed.

    Raises:
        TrainingError: it is not; the message says how to install it.
    """
    if find_spec("accelerate") is None:
        raise TrainingError("training needs accelerate, which is not installed: pip install 'flysurgery[train]'")
    if settings.tensorboard and find_spec("tensorboard") is None and find_spec("tensorboardX") is None:
        raise TrainingError("TensorBoard logs need tensorboard, which is not installed: pip install tensorboard")


def accelerator_for(settings: Settings, folder: Path | None, *, quick: bool = False) -> Accelerator:
    """Make accelerate's own object for this process, as ``accelerate launch`` or ``accelerate config`` set it up.

    Where neither the settings nor accelerate choose a precision, ``quick`` takes bfloat16 on CUDA.
    """
    check_installed(settings)
    from accelerate import Accelerator, DistributedDataParallelKwargs

    precision = settings.precision
    chosen = precision is not None or "ACCELERATE_MIXED_PRECISION" in os.environ or settings.cpu
    if quick and not chosen and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        precision = "bf16"
    try:
        accelerator = Accelerator(
            cpu=settings.cpu,
            mixed_precision=precision,
            log_with="tensorboard" if settings.tensorboard and folder is not None else None,
            project_dir=folder,
            # gradients stay where they were reduced, so that no copy of them is needed
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    except ValueError as error:
        raise OptionError(f"accelerate cannot run with these options: {str(error).splitlines()[0].rstrip('.')}") from error
    fsdp: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        # each process has the weights already, and accelerate 1.15 cannot send those of no submodule, such as a class token
        fsdp.cpu_ram_efficient_loading = False
    return accelerator


def sharded(accelerator: Accelerator) -> bool:
    """Say whether each process holds only a part of the weights."""
    return accelerator.distributed_type.value == "FSDP"


def leave_processes() -> None:
    """End what connects this process with the others that train; after that it cannot train any more. Alone, it does nothing."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def seed_everything(*numbers: int) -> None:
    """Start every generator of this process from ``numbers``.

    It is called before each update with its number, so that what is drawn depends on the seed, the update and the process, and
    not on what ran before: a resumed run draws what it would have drawn.
    """
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
