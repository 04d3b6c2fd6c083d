"""The engine of a sharded module: what happens around its forward, backward and step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ._collectives import Handle, all_gather
from ._gather import Gatherer, Unit, computed
from ._reduce import Groups, Reducer
from ._step import Unmoved, rewire_
from .layout.chunk import Chunk
from .layout.packed import Held
from .layout.units import called


class Zero:
    """The engine of a sharded module.

    Args:
        module: The module.
        optimizer: Of its parameters, or None.
        chunks: That hold them.
        stage: 0 to 3.
        groups: Who shares.
        units: At stage 3, by number: a module that is gathered for itself.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | None,
        chunks: Sequence[Chunk],
        stage: int,
        groups: Groups,
        units: Sequence[Unit],
    ) -> None:
        self.module, self.optimizer, self.stage, self.groups = module, optimizer, stage, groups
        self.chunks = tuple(chunks)
        trained = [chunk for chunk in chunks if chunk.trained]
        for number, chunk in enumerate(trained):
            chunk.number = number
        self.gatherer = Gatherer(module, units, groups.shards) if stage == 3 else None
        self.reducer = Reducer(trained, stage, groups, self.gatherer.end_backward if self.gatherer else None)
        self._trained = trained
        self._held = Held(module, self.chunks, whole=stage < 3)
        self._unmoved: Unmoved | None = None
        if optimizer is not None:
            rewire_(optimizer, trained, stage)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
            optimizer.__dict__.update(zero_grad=self.zero_grad, add_param_group=_refuse_group)
        module.__dict__.update(zero_grad=self.zero_grad, no_sync=self.no_sync)
        for each in dict.fromkeys((module, *called(module))):
            each.register_load_state_dict_post_hook(self.refresh)
            each.__dict__["__reduce_ex__"] = self.__reduce_ex__  # else pickle would stumble over a hook before
        for number, item in enumerate(called(module)):
            if item is not module:
                item.__dict__.update(zero_grad=partial(self._zero_grad_of, number), no_sync=self.no_sync)
            item.register_forward_hook(torch.compiler.disable(self._expect_backward))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """See `par_zero.no_sync`. At stage 3 what is gathered stays so, until gradients are reduced."""
        with self.reducer.no_sync(), nullcontext() if self.gatherer is None else self.gatherer.kept():
            yield

    @contextmanager
    def summon(self) -> Iterator[None]:
        """See `par_zero.summon`. Where the optimizer has copies of more digits, only what was written is rounded."""
        before = [(chunk, self._mine(chunk).clone()) for chunk in self.chunks if chunk.master.dtype != chunk.flat.dtype]
        try:
            with nullcontext() if self.gatherer is None else self.gatherer.summon():
                yield
                self._held.check(whole=True)
        finally:
            for chunk, old in before:
                new = self._mine(chunk)
                chunk.master.copy_(torch.where(new == old, chunk.master, new))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, those too that wait under `no_sync`. The module's, and the optimizer's, are this."""
        self.reducer.forget(self._trained)
        if self.optimizer is not None:
            type(self.optimizer).zero_grad(self.optimizer, set_to_none)

    def _zero_grad_of(self, item: int, set_to_none: bool = True) -> None:  # noqa: ARG002 - the module's signature
        """Drops the gradients of one of several called modules."""
        chunks = [chunk for chunk in self._trained if item in chunk.items]
        self.reducer.forget(chunks)
        for each in (each for chunk in chunks for each in chunk.slices):
            each.tensor.grad = None

    def reset(self) -> None:
        """See `par_zero.reset`."""
        self.reducer.reset()
        if self.gatherer is not None:
            self.gatherer.free_all()

    def refresh(self, *_: Any) -> None:
        """Parameters were written from outside: the optimizer's own copies follow."""
        if self.gatherer is not None:
            self.gatherer.free_hidden()
        for chunk in self.chunks:
            if chunk.master is not chunk.share and self.stage:
                chunk.master.copy_(chunk.share)
            elif chunk.master is not chunk.flat and not self.stage:
                chunk.master.copy_(chunk.flat)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a sharded module can be neither copied nor pickled; do that before shard(), or with its state_dict() "
            "within summon()"
        )

    def _expect_backward(self, _: nn.Module, __: Any, output: Any) -> None:
        """The gradient of the output is where a backward pass begins, unless a submodule was called directly."""
        tensors = computed(output)
        if tensors and self.reducer.failed:
            raise RuntimeError(
                "an earlier backward pass has failed half-way, and what it left would spoil the next; call "
                "par_zero.reset(module) after an exception in forward or backward"
            )
        if tensors and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(tensors, self.reducer.start, mode="any")

    def _before_step(self, optimizer: Optimizer, args: Any, keywords: dict[str, Any]) -> tuple[Any, Any] | None:
        """Notes what must not move; with a closure, when that has made the gradients."""

        def prepare() -> None:
            self._held.look()
            self._unmoved = Unmoved(optimizer, self._trained, self.reducer.unused())

        given = dict(zip(("self", "closure"), args, strict=False)) | keywords
        closure = given.pop("closure", None)
        if closure is None:
            prepare()
            return None

        def closed() -> Any:
            with torch.enable_grad():
                loss = closure()
            prepare()
            return loss

        return (given.pop("self"), closed), given

    def _after_step(self, *_: Any) -> None:
        if self._unmoved is not None:
            self._unmoved.restore_()
        self._unmoved = None
        with torch.no_grad():
            handles = [self._publish(chunk) for chunk in self._trained]
        for handle in handles:
            handle.wait()
        if self.gatherer is not None:
            self.gatherer.free_all()

    def _mine(self, chunk: Chunk) -> torch.Tensor:
        """The parameters of which the optimizer holds copies."""
        return chunk.flat if self.stage == 0 else chunk.share

    def _publish(self, chunk: Chunk) -> Handle:
        """Brings what the optimizer has updated to the parameters."""
        mine = self._mine(chunk)
        if chunk.master is not mine:
            mine.copy_(chunk.master)
        if self.stage in (0, 3):
            return Handle([])
        return all_gather(chunk.flat, chunk.share, self.groups.shards, overlapped=False)


def _refuse_group(param_group: dict[str, Any]) -> None:
    """Instead of the optimizer's `add_param_group`."""
    raise ValueError(
        f"a param group with {sorted(param_group)} came after shard(), where nothing would reduce its gradients; give "
        "the optimizer all parameters before, frozen ones too"
    )
