"""Versions of weights from a `Publisher` for an inference engine, under the names of its checkpoint folder."""

import time
from collections.abc import Iterator

import torch

from .._errors import CheckpointError
from ..live.receiver import Receiver, Staged
from ..live.rendezvous import Rendezvous
from ..state.state import State
from ..tools.inspect import inspect

PAUSE = 0.02  # seconds between two looks for a version


class EngineWeights:
    """Complete, verified versions for the workers of one engine. Make it on every worker.

    Each worker receives full tensors, which its engine shards while it loads them.

    Args:
        address: Host and port of the store, such as "10.0.0.1:29600".
        folder: Checkpoint folder from which the engine has loaded its model. It names the tensors.
        name: Name of the exchange.
        timeout: Seconds to wait for a version, and for a worker or a trainer that does not answer.

    Raises:
        CheckpointError: No store answers, or the folder has no checkpoint.
    """

    def __init__(self, address: str, folder: str, *, name: str = "weights", timeout: float = 600.0) -> None:
        self._timeout = timeout
        # The receiver needs dtypes and shapes only, and these tensors have one element of memory.
        tensors = inspect(folder).tensors.items()
        model = {key: torch.zeros((), dtype=each.dtype).expand(each.shape) for key, each in tensors}
        self._receiver = Receiver(Rendezvous(address, name), State(model=model), timeout=timeout)

    def poll(self, version: int = 0) -> Staged | None:
        """Return a complete version with this number or a larger one, or None. Collective over the workers."""
        staged = self._receiver.poll()
        if staged is not None and staged.version < version:
            staged.accept()  # an older one, which the newer one replaces
            return None
        return staged

    def wait(self, version: int = 0) -> Staged:
        """Return the first complete version with this number or a larger one. Collective over the workers.

        Raises:
            CheckpointError: No such version arrived within the timeout.
        """
        deadline = time.monotonic() + self._timeout
        while (staged := self.poll(version)) is None:
            self.check(version, deadline)
            time.sleep(PAUSE)
        return staged

    def check(self, version: int, deadline: float) -> None:
        """Raise CheckpointError if the time for a version is over."""
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"timeout={self._timeout:g}: no version {version} or later has arrived; look at the trainer's log, or "
                "pass a larger timeout"
            )

    def close(self) -> None:
        """Stop receiving. The engine keeps its weights."""
        self._receiver.close()


def tensors_of(staged: Staged) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a version; after the last one, the version counts as loaded."""
    yield from staged.tensors()
    # An engine that fails in the middle must not report the version.
    staged.accept()
