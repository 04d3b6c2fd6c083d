"""Ray Train on a `Strategy`: Ray starts workers, restarts them, and tracks checkpoints; the training loop is yours.

def train(strategy, config):
    model, optimizer, dataloader = strategy.initialize(model, optimizer, dataloader)
    for step in range(resume(strategy) or 0, config["steps"]):
        ...
        report(strategy, {"loss": loss}, step=step + 1)

TorchTrainer(with_strategy(train, zero=3), train_loop_config={"steps": 100}, scaling_config=..., run_config=...).fit()
"""

from collections.abc import Callable, Mapping
from typing import Any

from ..strategy.options import StrategyOptions, takes_options_of
from ..strategy.strategy import Strategy
from ._options import missing

try:
    import ray.train
except ImportError as error:
    raise missing("ray", "ray[train]", "ray") from error

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://", "abfs": "abfs://"}
"""The prefixes of par-checkpoint's paths, by the name of Ray's file system."""


@takes_options_of(StrategyOptions)
def with_strategy(loop: Callable[[Strategy, Any], Any], **keywords: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a train loop for `TorchTrainer` that runs your loop with a `Strategy`.

    Each worker makes the strategy in the world that Ray has started, and closes it when the loop ends or raises.

    Args:
        loop: A function of the strategy and of `train_loop_config`.
        **keywords: Keywords of `par_train.Strategy`, such as parallel=dict(...) and zero=3.
    """

    def run(config: dict[str, Any]) -> Any:
        with Strategy(**keywords) as strategy:
            return loop(strategy, config)

    return run


def resume(strategy: Strategy) -> int | None:
    """Restore the newest checkpoint of the Ray run. The number of workers may have changed. Collective.

    Args:
        strategy: The strategy that your loop received, after `initialize`.

    Returns:
        The step at which the checkpoint was saved; None if the run has no checkpoint.
    """
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    return strategy.resume(_path_of(checkpoint.filesystem, checkpoint.path))


def report(strategy: Strategy, metrics: Mapping[str, Any], *, step: int | None = None) -> None:
    """Report metrics to Ray, and write a checkpoint if you pass a step. Collective.

    All workers write the checkpoint to the run's storage path as full tensors, so Ray copies nothing.

    Args:
        strategy: The strategy that your loop received.
        metrics: Numbers, of which Ray takes those of rank 0.
        step: The number of steps done. Default: no checkpoint.

    Raises:
        ValueError: par-checkpoint cannot write to the run's storage path.
    """
    if step is None:
        ray.train.report(dict(metrics))
        return
    storage = ray.train.get_context().get_storage()
    folder = f"{storage.experiment_fs_path}/checkpoint-{step:08d}"
    strategy.checkpoint(_path_of(storage.storage_filesystem, folder), step=step)
    checkpoint = ray.train.Checkpoint(folder, filesystem=storage.storage_filesystem)
    # The workers have written to the storage path already; Ray would copy the files a second time.
    unmoved = ray.train.CheckpointUploadMode.NO_UPLOAD
    ray.train.report(dict(metrics), checkpoint=checkpoint, checkpoint_upload_mode=unmoved)


def _path_of(filesystem: Any, path: str) -> str:
    """Return a path on a file system of Ray's as par-checkpoint takes it."""
    while hasattr(filesystem, "base_fs"):  # a part of another one
        path, filesystem = f"{filesystem.base_path.rstrip('/')}/{path}", filesystem.base_fs
    if filesystem.type_name not in _SCHEMES:
        raise ValueError(
            f"storage_path on {filesystem.type_name!r}: checkpoints can be written to {', '.join(_SCHEMES)}; pass "
            "another storage_path to RunConfig"
        )
    return f"{_SCHEMES[filesystem.type_name]}{path}"
