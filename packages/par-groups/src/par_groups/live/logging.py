"""Logging that knows its rank, on the standard `logging` module."""

import logging
import os
from collections.abc import Collection, MutableMapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .environment import launched_rank


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger that speaks on some ranks only, and says which rank speaks.

    Args:
        logger: The standard logger behind it; levels and handlers are its own.
        ranks: The ranks that speak; None for all.
    """

    def __init__(self, logger: logging.Logger, ranks: Collection[int] | None) -> None:
        super().__init__(logger, {})
        self.ranks = ranks

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - the name is logging's
        """Return whether this rank logs records of a level."""
        return (self.ranks is None or current_rank() in self.ranks) and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank into the message, and into the record as `rank`."""
        rank = current_rank()
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "rank": rank}
        return f"[rank {rank}] {msg}", kwargs


def get_logger(name: str, ranks: Collection[int] | None = (0,), file: str | Path | None = None) -> RankLogger:
    """Return a logger that writes on some ranks only.

    Handlers, levels and formats stay the application's, as for any logger; only a per-rank file is set up here.

    Args:
        name: The name of the logger, as for `logging.getLogger`.
        ranks: The ranks that speak; None for all of them.
        file: A path with "{rank}" in it, such as "logs/rank{rank}.log"; every rank that speaks writes its own.

    Raises:
        ValueError: A file without "{rank}", into which all ranks would write at once.
    """
    logger = logging.getLogger(name)
    adapter = RankLogger(logger, ranks)
    if file is not None:
        if "{rank}" not in str(file):
            raise ValueError(f"file is {str(file)!r}; put {{rank}} in its name, so that every rank has its own")
        if ranks is None or current_rank() in ranks:
            _add_file(logger, Path(str(file).format(rank=current_rank())))
    return adapter


def current_rank() -> int:
    """Return the global rank in the running world; without a world, the launcher's rank, or 0."""
    return dist.get_rank() if dist.is_initialized() else launched_rank(os.environ)


def _add_file(logger: logging.Logger, path: Path) -> None:
    """Add a file handler, unless there is one for that path."""
    present = {handler.baseFilename for handler in logger.handlers if isinstance(handler, logging.FileHandler)}
    if str(path.absolute()) not in present:
        path.parent.mkdir(parents=True, exist_ok=True)
        # With the delay, a rank that logs nothing makes no file.
        handler = logging.FileHandler(path, delay=True)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
