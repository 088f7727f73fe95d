"""Training of converted and dense models: data, distillation from a teacher, the loop, and what a run leaves on disk."""

from flysurgery.finetune.data import TrainingData as TrainingData
from flysurgery.finetune.data import held_out_data as held_out_data
from flysurgery.finetune.data import judging_data as judging_data
from flysurgery.finetune.data import training_data as training_data
from flysurgery.finetune.devices import check_installed as check_installed
from flysurgery.finetune.devices import leave_processes as leave_processes
from flysurgery.finetune.run import Outcome as Outcome
from flysurgery.finetune.run import train as train
from flysurgery.finetune.settings import Settings as Settings
