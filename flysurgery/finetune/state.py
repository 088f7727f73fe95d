"""What a run leaves on disk: its log, and states from which it is resumed, each complete or not there."""

import csv
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from flysurgery.errors import TrainingError, first_line, raised_as
from flysurgery.fidelity import Copied
from flysurgery.finetune.settings import Settings
from flysurgery.surgery import plan_of

if TYPE_CHECKING:
    from accelerate import Accelerator

FACTS, BEST = "run.json", "best-{}.pt"
FREE = frozenset({"learning_rate", "save_every", "log_every", "workers", "tensorboard"})  # settings that a resumed run may change


def sharded(accelerator: "Accelerator") -> bool:
    """Say whether each process holds only a part of the weights."""
    return accelerator.distributed_type.value == "FSDP"


class States:
    """The states of a run in ``folder``, one folder each, named after its update; an older one is removed when a newer one is complete.

    Plan and shapes, data, settings and the number of processes make a run the same run. All processes call the same methods.
    """

    def __init__(self, folder: Path, model: nn.Module, data: str, settings: Settings, accelerator: "Accelerator") -> None:
        plan = plan_of(model)
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        text = json.dumps([None if plan is None else plan.to_json(), shapes], sort_keys=True)
        fixed = {name: value for name, value in asdict(settings).items() if name not in FREE}
        self._folder, self._accelerator, self._plan_sha256 = folder, accelerator, hashlib.sha256(text.encode()).hexdigest()
        self._facts: dict[str, Any] = {"data": data, "processes": accelerator.num_processes, **fixed}

    @property
    def last(self) -> int | None:
        """The update of the newest complete state."""
        found = [int(path.name.removeprefix("state-")) for path in self._folder.glob("state-*") if (path / FACTS).is_file()]
        return max(found, default=None)

    @property
    def kept(self) -> str:
        """What a run that fails can go on from, as a part of a sentence."""
        return "no state was kept" if self.last is None else f"the last complete state, of update {self.last}, is kept"

    def begin(self, *, resume: bool, force: bool = False) -> tuple[int, dict[str, Any]]:
        """Give the update to begin at, and the notes that ``save`` got then; raises TrainingError for another run's state.

        A new run begins at 0, in a folder without states, from which ``force`` removes them.
        """
        if resume:
            return self._resumed()
        if force and self._accelerator.is_main_process:
            for path in (*self._folder.glob("state-*"), *self._folder.glob(".new-*")):
                shutil.rmtree(path)
        self._accelerator.wait_for_everyone()
        if self.last is not None:
            raise TrainingError(
                f"{self._folder} holds a run that has come to update {self.last}; go on with --resume, or begin anew with --force"
            )
        return 0, {}

    def _resumed(self) -> tuple[int, dict[str, Any]]:
        last = self.last
        if last is None:
            raise TrainingError(f"{self._folder} holds no state to resume from; start without --resume")
        try:
            facts = json.loads((self._path(last) / FACTS).read_text(encoding="utf-8"))
            plan, settings, notes = facts["plan_sha256"], dict(facts["settings"]), dict(facts["notes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{self._path(last) / FACTS} is damaged; start without --resume") from error
        if plan != self._plan_sha256:
            raise TrainingError(f"{self._folder} holds the run of another plan; resume with the model that it was begun with")
        for name, mine in json.loads(json.dumps(self._facts)).items():
            if mine != settings.get(name):
                raise TrainingError(
                    f"the run in {self._folder} was begun with {name} {settings.get(name)}, not {mine}; resume with the same"
                )
        return last, notes

    def save(self, update: int, notes: dict[str, Any], best: Copied | None = None) -> None:
        """Write the state, and the best one so far. The older ones stay until this one is complete.

        If it cannot be written, as on a full disk, the part that was written is removed, and TrainingError says so.
        """
        fresh = self._folder / f".new-{update:08d}"
        try:
            self._write(fresh, update, notes, best)
        except Exception as error:  # each of accelerate's, torch's and safetensors' writers fails in its own way
            free = shutil.disk_usage(self._folder).free
            shutil.rmtree(fresh, ignore_errors=True)
            raise TrainingError(
                f"the state of update {update} cannot be written into {self._folder}, where {free / 1e6:.1f} MB are left; {self.kept}; "
                f"the reason is: {first_line(error)}"
            ) from error

    def _write(self, fresh: Path, update: int, notes: dict[str, Any], best: Copied | None) -> None:
        accelerator = self._accelerator
        if accelerator.is_main_process:
            for left in self._folder.glob(".new-*"):  # by a process that was killed
                shutil.rmtree(left)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(fresh))
        if best is not None and (accelerator.is_main_process or sharded(accelerator)):
            best.save(fresh / BEST.format(accelerator.process_index))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            facts = {"plan_sha256": self._plan_sha256, "settings": self._facts, "notes": notes}
            (fresh / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            older = [path for path in self._folder.glob("state-*") if path != self._path(update)]
            shutil.rmtree(self._path(update), ignore_errors=True)
            fresh.rename(self._path(update))
            for path in older:
                shutil.rmtree(path)
        accelerator.wait_for_everyone()

    def load(self, update: int, best: Copied | None = None) -> None:
        """Read the state of ``update`` into what accelerate prepared, and the best one of then."""
        with raised_as(TrainingError, f"the state in {self._path(update)} cannot be read"):
            self._accelerator.load_state(str(self._path(update)))
            if best is not None:
                best.load(self._path(update) / BEST.format(self._accelerator.process_index if sharded(self._accelerator) else 0))

    def _path(self, update: int) -> Path:
        return self._folder / f"state-{update:08d}"


LOG = "log.csv"
COLUMNS = (
    *("update", "epoch", "loss", "class_loss", "output_loss", "blocks_loss", "learning_rate", "images_per_second"),
    *("top1", "top5", "relative_error", "output_cosine", "token_cosine"),
)
"""Of the log. Losses are means over the updates since the last row and over all processes; the second line is of held-out images."""


class Log:
    """Appends rows to ``folder/log.csv``; without a folder, or on other processes than the main one, to nothing."""

    def __init__(self, folder: Path | None, accelerator: "Accelerator", resumed_at: int, settings: Mapping[str, Any]) -> None:
        self._accelerator = accelerator
        self._file = folder / LOG if folder is not None and accelerator.is_main_process else None
        if accelerator.trackers or accelerator.log_with:
            plain = {name: value for name, value in settings.items() if isinstance(value, int | float | str)}
            accelerator.init_trackers("tensorboard", config=plain)
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # rows from after the saved state are written anew
        earlier = self._file.read_text(encoding="utf-8").splitlines() if resumed_at and self._file.is_file() else []
        kept = [row for row in csv.DictReader(earlier) if int(row["update"]) <= resumed_at]
        with self._file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)

    def add(self, update: int, row: Mapping[str, float | None]) -> None:
        """Append the row of ``update``, with the columns that are not None."""
        values = {name: value for name, value in row.items() if value is not None}
        if self._accelerator.trackers:
            self._accelerator.log(values, step=update)
        if self._file is not None:
            with self._file.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow({"update": update, **values})

    def close(self) -> None:
        for tracker in self._accelerator.trackers:
            tracker.finish()
