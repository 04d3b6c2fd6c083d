"""verl's rollout workers load complete versions: a checkpoint engine with a cache in host memory.

Set these options of verl's rollout; each worker imports the module, and `par` becomes a backend:

checkpoint_engine.backend = "par"
checkpoint_engine.custom_backend_module = "par_checkpoint.engines.verl"
checkpoint_engine.engine_kwargs.par = {"address": "10.0.0.1:29600", "folder": "models/Qwen3-8B"}

The trainer's first rank publishes the tensors that verl hands to it. A trainer that calls `par_checkpoint.Publisher`
itself sends shards from all ranks, without full tensors.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..live.publisher import Publisher
from ..live.receiver import Staged
from ..live.rendezvous import Rendezvous
from ..state.state import State
from . import MISSING
from .weights import PAUSE, EngineWeights, tensors_of

try:
    from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
except ImportError as error:
    raise ImportError(MISSING.format(name="verl")) from error


@CheckpointEngineRegistry.register("par")
class PublishedCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]  # verl is not in every environment
    """Checkpoint engine of one worker, of the trainer or of a rollout.

    Args:
        bucket_size: verl's size of messages in bytes, which is the budget of memory.
        address: Host and port of a store that outlives all workers, such as "10.0.0.1:29600".
        folder: Checkpoint folder that names the tensors.
        name: Name of the exchange.
        timeout: Seconds to wait for a version.
        is_master: Unused; verl passes it.
    """

    def __init__(
        self,
        bucket_size: int,
        *,
        address: str,
        folder: str,
        name: str = "weights",
        timeout: float = 600.0,
        is_master: bool = False,
    ) -> None:
        del is_master
        self._budget, self._folder, self._timeout = bucket_size, folder, timeout
        self._at = Rendezvous(address, name)
        self._model: dict[str, torch.Tensor] = {}  # full tensors on the trainer's first rank
        self._publisher: Publisher | None = None
        self._weights: EngineWeights | None = None
        self._version: int | None = None  # of the present update, once it has begun

    def prepare(self) -> dict[str, Any]:
        """Return the number of the next version, for `build_topology`."""
        return {"version": (self._version or 0) + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return which workers receive, and the number of the version, for `init_process_group`."""
        # verl repeats a step to restore weights that a rollout has dropped, or passes no step. So the trainer counts.
        version = metadata[0]["version"]
        sends, receives = (
            {"receives": [flag] * size, "version": [version] * size}
            for flag, size in ((False, actor_wg_world_size), (True, rollout_world_size))
        )
        return sends, receives

    def init_process_group(self, receives: bool, version: int) -> None:
        """Start to receive versions in the background, once. No group is made: rollouts come and go."""
        self._version = version
        if receives and self._weights is None:
            self._weights = EngineWeights(self._at.address, self._folder, name=self._at.name, timeout=self._timeout)

    def finalize(self) -> None:
        """Keep the memory and the threads for the next version."""

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Publish a version. Training continues when the tensors are copied.

        Args:
            weights: Name and full tensor of each parameter. All ranks iterate, because making a full tensor is
                collective.
            global_steps: Unused; the number of the version is that of `init_process_group`.

        Raises:
            RuntimeError: `init_process_group` was not called.
        """
        del global_steps
        version = self._begun()
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        for name, tensor in weights:
            if is_first:
                self._model[name] = tensor.detach().to("cpu", copy=True)
        if not is_first:
            return
        if self._publisher is None:
            alone = dist.new_group([0], use_local_synchronization=True) if dist.is_initialized() else None
            state = State(model=self._model)
            self._publisher = Publisher(self._at, state, dtype=None, group=alone, budget=self._budget)
        self._publisher.publish(version)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the version that the trainer sends in this update, or of a later one.

        Raises:
            CheckpointError: No such version has arrived within the timeout; nothing was yielded.
        """
        del global_steps
        for each in tensors_of(await self._wait(self._begun())):
            yield each

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the newest complete version in host memory."""
        for each in tensors_of(await self._wait(0)):
            yield each

    def _begun(self) -> int:
        """Return the number of the version of the present update."""
        if self._version is None:
            raise RuntimeError("weights move before init_process_group() was called; call it first")
        return self._version

    async def _wait(self, version: int) -> Staged:
        """Return a complete version; other tasks of the worker run until it has arrived."""
        if self._weights is None:
            raise RuntimeError("weights are read before init_process_group(receives=True) was called; call it first")
        deadline = time.monotonic() + self._timeout
        while (staged := self._weights.poll(version)) is None:
            self._weights.check(version, deadline)
            await asyncio.sleep(PAUSE)
        return staged
