"""Training of converted and dense models: data, distillation from a teacher, the loop, and what a run leaves on disk."""

from flysurgery.finetune.data import TrainingData, held_out_data, judging_data, training_data
from flysurgery.finetune.devices import check_installed, leave_processes
from flysurgery.finetune.run import Outcome, train
from flysurgery.finetune.settings import Settings

__all__ = ["Outcome", "Settings", "TrainingData", "held_out_data", "judging_data", "train", "training_data"]
