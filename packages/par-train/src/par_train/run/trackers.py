"""Trackers by name: TensorBoard, Weights & Biases and MLflow, each imported only where it is asked for."""

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import UserError
from .metrics import read_metrics

if TYPE_CHECKING:
    from .records import Tracker  # which imports torch: names are checked before


class _TensorBoard:
    """Writes event files that TensorBoard shows; a run that goes on hides what came after its checkpoint.

    Args:
        folder: Their folder.
        run: The name of the run; the folder has it already.
        facts: What the run was told, by name.
    """

    def __init__(self, folder: Path, run: str, facts: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - slow, and may be missing

        del run, facts
        lines, events = read_metrics(folder / "metrics.jsonl"), folder / "tensorboard"
        if not lines:
            shutil.rmtree(events, ignore_errors=True)  # of a run that was replaced
        self._writer = SummaryWriter(events, purge_step=lines[-1]["step"] + 1 if lines else None)

    def log_texts(self, texts: Sequence[Mapping[str, str]], step: int) -> None:
        """Shows the texts that a model wrote."""
        for number, sample in enumerate(texts):
            self._writer.add_text(f"sample {number}", f"{sample['prompt']}**{sample['text']}**", step)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Takes a line."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Ends the run there."""
        self._writer.close()


class _WeightsAndBiases:
    """A run of Weights & Biases; offline where WANDB_MODE says so. It goes on under the id that the folder keeps.

    Args:
        folder: The folder of the run.
        run: Its name.
        facts: What it was told, by name.
    """

    def __init__(self, folder: Path, run: str, facts: Mapping[str, str]) -> None:
        wandb = importlib.import_module("wandb")
        note = folder / "wandb-id.txt"
        self._run = wandb.init(dir=str(folder), name=run, config=dict(facts), id=_noted(note), resume="allow")
        note.write_text(str(self._run.id), encoding="utf-8")

    def log(self, values: dict[str, Any], step: int) -> None:
        """Takes a line."""
        self._run.log(values, step=step)

    def close(self) -> None:
        """Ends the run there."""
        self._run.finish()


class _MLflow:
    """A run of MLflow, kept where MLFLOW_TRACKING_URI says. It goes on under the id that the folder has noted.

    Args:
        folder: The folder of the run.
        run: Its name.
        facts: What it was told, by name.
    """

    def __init__(self, folder: Path, run: str, facts: Mapping[str, str]) -> None:
        self._client: Any = importlib.import_module("mlflow")
        note = folder / "mlflow-id.txt"
        known = _noted(note)
        self._run = self._client.start_run(run_id=known, run_name=None if known else run)
        note.write_text(str(self._run.info.run_id), encoding="utf-8")
        if known is None:
            self._client.log_params({name: value[:250] for name, value in facts.items()})

    def log(self, values: dict[str, Any], step: int) -> None:
        """Takes a line."""
        self._client.log_metrics({name: float(value) for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Ends the run there."""
        self._client.end_run()


def _noted(note: Path) -> str | None:
    """The id of a run that goes on, as its folder keeps it; None for a new run."""
    return note.read_text(encoding="utf-8").strip() if note.exists() else None


_KNOWN: Mapping[str, tuple[tuple[str, ...], Callable[[Path, str, Mapping[str, str]], Any]]] = {
    "tensorboard": (("tensorboard", "tensorboardX"), _TensorBoard),
    "wandb": (("wandb",), _WeightsAndBiases),
    "mlflow": (("mlflow",), _MLflow),
}
"""By name: the modules of which one must be installed, and what makes the tracker."""


def check_trackers(trackers: Sequence["Tracker | str"]) -> None:
    """Raises UserError for a name that is unknown, or whose package is not installed; imports none of them."""
    for tracker in trackers:
        if not isinstance(tracker, str):
            if not callable(getattr(tracker, "log", None)):
                raise UserError(
                    f"trackers has {tracker!r}, which has no log(values, step); give such an object, or a name: "
                    f"{', '.join(_KNOWN)}"
                )
            continue
        if tracker not in _KNOWN:
            raise UserError(f"unknown tracker {tracker!r}; known ones: {', '.join(_KNOWN)}, or an object with log()")
        modules = _KNOWN[tracker][0]
        if not any(importlib.util.find_spec(module) for module in modules):
            raise UserError(f"the tracker {tracker!r} needs the package {modules[0]}; install it, or leave it out")


def make_trackers(trackers: Sequence["Tracker | str"], folder: Path, facts: Mapping[str, str]) -> list["Tracker"]:
    """The trackers, those by name begun. On rank 0.

    Args:
        trackers: Objects with `log(values, step)`, and names.
        folder: The folder of the run.
        facts: What the run was told, by name.
    """
    return [
        _KNOWN[tracker][1](folder, folder.name, facts) if isinstance(tracker, str) else tracker for tracker in trackers
    ]
