"""Training of converted and dense models: data, distillation from a teacher, the loop, and what a run leaves on disk."""

from flysurgery.finetune.data import TrainingData, held_out_data, judging_data, training_data
from flysurgery.finetune.run import Outcome, leave_processes, train
from flysurgery.finetune.settings import Settings, check_installed

__all__ = ["Outcome", "Settings", "TrainingData", "held_out_data", "judging_data", "train", "training_data"]
