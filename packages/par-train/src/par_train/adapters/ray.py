"""Ray Train on a `Strategy`: Ray starts workers, starts them again, and keeps count of checkpoints; the loop is yours.

def train(config):
    strategy = par_train.adapters.ray.strategy()
    model, optimizer, dataloader = strategy.initialize(model, optimizer, dataloader)
    for step in range(resume() or 0, config["steps"]): ...; report({"loss": loss}, step=step + 1)

TorchTrainer(train, torch_config=ParConfig(strategy=dict(zero=3)), scaling_config=..., run_config=...).fit()
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..strategy.strategy import Strategy
from ._options import StrategyKeywords, missing

try:
    import ray.train
    from ray.train.torch import TorchConfig
except ImportError as error:
    raise missing("ray", "ray[train]", "ray") from error

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "abfs://"}
"""What par-checkpoint's paths begin with, by the name of Ray's file system."""

_strategies: list[Strategy] = []  # of this worker, while its loop runs


@dataclass
class ParConfig(TorchConfig):  # type: ignore[misc]  # ray may be absent where types are checked
    """The config of torch for a `TorchTrainer` whose workers share a `par_train.Strategy`.

    Args:
        strategy: Keywords of `par_train.Strategy`, such as dict(parallel=..., zero=3).
    """

    strategy: StrategyKeywords = field(default_factory=StrategyKeywords)

    @property
    def train_func_context(self) -> Any:
        """What a worker's loop runs in: a strategy, made in the world that Ray has started."""
        return partial(_Worker, super().train_func_context, dict(self.strategy))


class _Worker:
    """A context with a strategy, inside Ray's own.

    Args:
        around: Ray's.
        keywords: The strategy's.
    """

    def __init__(self, around: Any, keywords: Mapping[str, Any]) -> None:
        self._around, self._keywords = around(), keywords

    def __enter__(self) -> None:
        self._around.__enter__()
        _strategies.append(Strategy(**self._keywords))

    def __exit__(self, *raised: Any) -> Any:
        _strategies.pop().close()
        return self._around.__exit__(*raised)


def strategy() -> Strategy:
    """The strategy of this worker.

    Raises:
        RuntimeError: This is no loop of a `TorchTrainer` with a `ParConfig`.
    """
    if not _strategies:
        raise RuntimeError(
            "strategy() was called outside of a train loop; give TorchTrainer torch_config=ParConfig(...)"
        )
    return _strategies[-1]


def resume() -> int | None:
    """Goes on from the newest checkpoint of the run, also with another number of workers. Collective.

    Returns:
        The step; None if there is none.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    return strategy().resume(_path_of(checkpoint.filesystem, checkpoint.path))


def report(metrics: Mapping[str, Any], *, step: int | None = None) -> None:
    """Reports metrics to Ray, with a checkpoint if a step is given. Collective.

    All workers write the checkpoint where the run is stored, as whole tensors, and nothing is copied again.

    Args:
        metrics: Numbers; those of rank 0 count.
        step: Steps done; None: no checkpoint.

    Raises:
        ValueError: The run is stored where par-checkpoint does not write.
    """
    if step is None:
        ray.train.report(dict(metrics))
        return
    storage = ray.train.get_context().get_storage()
    folder = f"{storage.experiment_fs_path}/checkpoint-{step:08d}"
    strategy().checkpoint(_path_of(storage.storage_filesystem, folder), step=step)
    checkpoint = ray.train.Checkpoint(folder, filesystem=storage.storage_filesystem)
    unmoved = ray.train.CheckpointUploadMode.NO_UPLOAD
    ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=unmoved)


def _path_of(filesystem: Any, path: str) -> str:
    """A path on a file system of Ray's as par-checkpoint takes it."""
    while hasattr(filesystem, "base_fs"):  # a part of another one
        path, filesystem = f"{filesystem.base_path.rstrip('/')}/{path}", filesystem.base_fs
    if filesystem.type_name not in _SCHEMES:
        raise ValueError(
            f"the run is stored on {filesystem.type_name!r}, and checkpoints are written to {', '.join(_SCHEMES)}; "
            "give RunConfig another storage_path"
        )
    return f"{_SCHEMES[filesystem.type_name]}{path}"
