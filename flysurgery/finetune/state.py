"""A run on disk, from which it is taken up again: complete or not there."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from flysurgery.errors import TrainingError
from flysurgery.fidelity.copied import Copied
from flysurgery.finetune.measure import sharded
from flysurgery.finetune.settings import Settings
from flysurgery.surgery import plan_of

if TYPE_CHECKING:
    from accelerate import Accelerator

FACTS, BEST = "run.json", "best-{}.pt"


@dataclass(frozen=True)
class Identity:
    """What makes a run the same run: the model's plan and shapes, the data, the settings and the number of processes."""

    plan_sha256: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, model: nn.Module, data: str, settings: Settings, processes: int) -> Identity:
        """The identity of a run that is about to begin."""
        plan = plan_of(model)
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        text = json.dumps([None if plan is None else plan.to_json(), shapes], sort_keys=True)
        return cls(hashlib.sha256(text.encode()).hexdigest(), {"data": data, "processes": processes, **settings.fixed})


class States:
    """The states of a run in ``folder``, one a folder named after its update; an older one goes when a newer one stands."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._folder, self._identity = folder, identity

    @property
    def last(self) -> int | None:
        """The update of the newest complete state."""
        found = [int(path.name.removeprefix("state-")) for path in self._folder.glob("state-*") if (path / FACTS).is_file()]
        return max(found, default=None)

    def check_new(self) -> None:
        """See that no run has left its state here.

        Raises:
            TrainingError: one has; the message says how to take it up and how to begin anew.
        """
        if self.last is not None:
            raise TrainingError(
                f"{self._folder} holds a run that has come to update {self.last}; go on with --resume, or begin anew with --force"
            )

    def check_same(self) -> tuple[int, dict[str, Any]]:
        """The update that the run is taken up from, and what ``save`` was told to note.

        Raises:
            TrainingError: there is no state, or it belongs to another run; the message says what differs.
        """
        last = self.last
        if last is None:
            raise TrainingError(f"{self._folder} holds no state to resume from; start without --resume")
        try:
            facts = json.loads((self._path(last) / FACTS).read_text(encoding="utf-8"))
            plan, settings, notes = facts["plan_sha256"], dict(facts["settings"]), dict(facts["notes"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{self._path(last) / FACTS} is damaged; start without --resume") from error
        if plan != self._identity.plan_sha256:
            raise TrainingError(f"{self._folder} holds the run of another plan; resume with the model that it was begun with")
        mine = json.loads(json.dumps(self._identity.facts))
        differing = [name for name in mine if mine[name] != settings.get(name)]
        if differing:
            name = differing[0]
            raise TrainingError(
                f"the run in {self._folder} was begun with {name} {settings.get(name)}, not {mine[name]}; resume with the same"
            )
        return last, notes

    def save(self, accelerator: Accelerator, update: int, notes: dict[str, Any], best: Copied | None = None) -> None:
        """Write the state, and the best one so far; called by all processes. The older ones are there until this one is.

        Raises:
            TrainingError: it cannot be written, as on a full disk; what was written of it is removed.
        """
        fresh = self._folder / f".new-{update:08d}"
        try:
            self._write(accelerator, fresh, update, notes, best)
        except Exception as error:  # each of accelerate's, torch's and safetensors' writers fails in its own way
            last = self.last
            shutil.rmtree(fresh, ignore_errors=True)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            kept = "no state was kept" if last is None else f"the last complete state, of update {last}, is kept"
            raise TrainingError(f"the state of update {update} cannot be written into {self._folder}: {reason}; {kept}") from error

    def _write(self, accelerator: Accelerator, fresh: Path, update: int, notes: dict[str, Any], best: Copied | None) -> None:
        if accelerator.is_main_process and fresh.exists():
            shutil.rmtree(fresh)
        accelerator.wait_for_everyone()
        accelerator.save_state(str(fresh))
        if best is not None and (accelerator.is_main_process or sharded(accelerator)):
            best.save(fresh / BEST.format(accelerator.process_index))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            facts = {"plan_sha256": self._identity.plan_sha256, "settings": self._identity.facts, "notes": notes}
            (fresh / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
            older = [path for path in self._folder.glob("state-*") if path != self._path(update)]
            shutil.rmtree(self._path(update), ignore_errors=True)
            fresh.rename(self._path(update))
            for path in older:
                shutil.rmtree(path)
        accelerator.wait_for_everyone()

    def load(self, accelerator: Accelerator, update: int, best: Copied | None = None) -> None:
        """Read the state of ``update`` into what accelerate prepared, and the best one of then.

        Raises:
            TrainingError: it cannot be read.
        """
        try:
            accelerator.load_state(str(self._path(update)))
            if best is not None:
                best.load(self._path(update) / BEST.format(accelerator.process_index if sharded(accelerator) else 0))
        except Exception as error:  # accelerate, torch and safetensors each fail in their own way
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise TrainingError(f"the state in {self._path(update)} cannot be read: {reason}") from error

    def clear(self) -> None:
        """Remove every state, complete or not."""
        for pattern in ("state-*", ".new-*"):
            for path in self._folder.glob(pattern):
                shutil.rmtree(path)

    def _path(self, update: int) -> Path:
        return self._folder / f"state-{update:08d}"
