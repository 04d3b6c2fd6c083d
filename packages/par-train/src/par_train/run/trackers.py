"""Trackers by name: TensorBoard, Weights & Biases and MLflow. Only the requested trackers are imported."""

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .._errors import UserError
from .files import RunFiles
from .metrics import read_metrics


class Tracker(Protocol):
    """A receiver of numbers by name, such as a run of Weights & Biases."""

    def log(self, values: dict[str, Any], step: int) -> object:
        """Receive the values of a line of the metrics file.

        Args:
            values: Numbers by name.
            step: Number of steps done.
        """


@dataclass(frozen=True, kw_only=True)
class _Beginning:
    """The inputs of a tracker's constructor.

    Args:
        files: Files of the run.
        facts: Options of the run, by name.
        replaces: Whether the run replaces the run that the folder has, instead of continuing it.
    """

    files: RunFiles
    facts: Mapping[str, str]
    replaces: bool

    def known(self, tracker: str) -> str | None:
        """Return the id under which the tracker's service continues the run; None for a new run."""
        note = self.files.identities[tracker]
        return note.read_text(encoding="utf-8").strip() if note.exists() and not self.replaces else None


class _TensorBoard:
    """A writer of event files for TensorBoard. A resumed run hides the events after its checkpoint."""

    def __init__(self, beginning: _Beginning) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - slow, and may be missing

        lines = [] if beginning.replaces else read_metrics(beginning.files.metrics)
        events = beginning.files.folder / "tensorboard"
        if not lines:
            shutil.rmtree(events, ignore_errors=True)  # they belong to the replaced run
        self._writer = SummaryWriter(events, purge_step=lines[-1]["step"] + 1 if lines else None)

    def log_texts(self, texts: Sequence[Mapping[str, str]], step: int) -> None:
        """Show the texts that a model wrote."""
        for number, sample in enumerate(texts):
            self._writer.add_text(f"sample {number}", f"{sample['prompt']}**{sample['text']}**", step)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Write a line."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """End the tracker's run."""
        self._writer.close()


class _WeightsAndBiases:
    """A run of Weights & Biases, offline if WANDB_MODE=offline. It continues under the id that the folder stores."""

    def __init__(self, beginning: _Beginning) -> None:
        wandb = importlib.import_module("wandb")
        folder, known, facts = beginning.files.folder, beginning.known("wandb"), dict(beginning.facts)
        # "allow" begins a run where the service does not know the id, as after an offline run that was never synced.
        self._run = wandb.init(dir=str(folder), name=folder.name, config=facts, id=known, resume="allow")
        beginning.files.identities["wandb"].write_text(str(self._run.id), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int) -> None:
        """Write a line."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """End the tracker's run."""
        self._run.finish()


class _MLflow:
    """A run of MLflow at MLFLOW_TRACKING_URI. It continues under the id that the folder stores."""

    def __init__(self, beginning: _Beginning) -> None:
        self._client: Any = importlib.import_module("mlflow")
        files, known = beginning.files, beginning.known("mlflow")
        # A name would rename the run that is continued.
        self._run = self._client.start_run(run_id=known, run_name=None if known else files.folder.name)
        files.identities["mlflow"].write_text(str(self._run.info.run_id), encoding="utf-8")
        if known is None:
            # MLflow rejects long parameters; its oldest versions allow 250 letters.
            self._client.log_params({name: value[:250] for name, value in beginning.facts.items()})

    def log(self, values: dict[str, Any], step: int) -> None:
        """Write a line."""
        self._client.log_metrics({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        """End the tracker's run."""
        self._client.end_run()


_KNOWN: Mapping[str, tuple[tuple[str, ...], Callable[[_Beginning], Any]]] = {
    "tensorboard": (("tensorboard", "tensorboardX"), _TensorBoard),
    "wandb": (("wandb",), _WeightsAndBiases),
    "mlflow": (("mlflow",), _MLflow),
}
"""The modules of which one must be installed, and the tracker's class, by name."""


def check_trackers(trackers: Iterable[Tracker | str]) -> None:
    """Raise UserError for an unknown name, or a package that is not installed. Imports no tracker."""
    if isinstance(trackers, str) or not isinstance(trackers, Iterable):
        given = repr(trackers) if isinstance(trackers, str) else "tracker"
        raise UserError(f"trackers={trackers!r}: it must be a list of names and objects; pass trackers=[{given}]")
    for tracker in trackers:
        if not isinstance(tracker, str):
            if not callable(getattr(tracker, "log", None)):
                raise UserError(
                    f"trackers has {tracker!r}, which has no log(values, step); pass an object with it, or a name: "
                    f"{', '.join(_KNOWN)}"
                )
            continue
        if tracker not in _KNOWN:
            raise UserError(f"unknown tracker {tracker!r}; known ones: {', '.join(_KNOWN)}, or an object with log()")
        modules = _KNOWN[tracker][0]
        if not any(importlib.util.find_spec(module) for module in modules):
            raise UserError(
                f"the tracker {tracker!r} needs the package {modules[0]}; install it, or remove the tracker"
            )


def make_trackers(
    trackers: Sequence[Tracker | str], folder: Path, facts: Mapping[str, str], *, replaces: bool = False
) -> list[Tracker]:
    """Start the trackers that are passed by name; return all trackers. Called on rank 0 only.

    Args:
        trackers: Objects with `log(values, step)`, and names.
        folder: Folder of the run.
        facts: Options of the run, by name.
        replaces: Whether the run replaces the run that the folder has, instead of continuing it.

    Raises:
        Exception: The error of a tracker that cannot start. The trackers that started before are closed.
    """
    beginning = _Beginning(files=RunFiles(folder), facts=facts, replaces=replaces)
    made: dict[int, Tracker] = {}
    with ExitStack() as begun:
        # TensorBoard comes last: it removes the events of a replaced run, which stay if a service cannot begin.
        for place in sorted(range(len(trackers)), key=lambda place: trackers[place] == "tensorboard"):
            tracker = trackers[place]
            if isinstance(tracker, str):
                own = _KNOWN[tracker][1](beginning)
                begun.callback(own.close)
                made[place] = own
            else:
                made[place] = tracker
        begun.pop_all()  # `Records` closes them
    for name, note in beginning.files.identities.items():
        if replaces and name not in trackers:
            note.unlink(missing_ok=True)  # else a later run would continue the replaced one there
    return [made[place] for place in range(len(trackers))]
