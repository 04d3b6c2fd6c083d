"""Lightning Fabric on a `Strategy`: a script with a `Fabric` passes it a `ParStrategy`.

    fabric = Fabric(strategy=ParStrategy(parallel=dict(tensor=dict(size=2, mode="1d")), zero=1), precision="bf16-true")

Fabric launches the processes and distributes samples over the data ranks. The ranks of a replica receive its batches.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from par_data import synchronize_draws
from par_precision import DeferredClipping, MixedOptimizer

from ..strategy.options import StrategyOptions, takes_options_of
from ..strategy.strategy import Strategy
from ._options import initialize, make_strategy, missing

try:
    from lightning.fabric.plugins import Precision
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
except ImportError as error:
    raise missing("fabric", "lightning", "fabric") from error

PRECISIONS = {
    "32-true": "fp32",
    "bf16-mixed": "bf16-amp",
    "16-mixed": "fp16-amp",
    "bf16-true": "bf16",
    "16-true": "fp16",
}
"""The precisions of par-precision by Fabric's names. Half-precision weights have fp32 masters."""

_NO_PIPELINE = "give these ranks to tensor or data"

REST = "fabric.ckpt"
"""The file of a checkpoint with all values that are neither a model nor an optimizer."""


class ParStrategy(DDPStrategy):  # type: ignore[misc]  # lightning may be absent where types are checked
    """A strategy of Fabric that is a `par_train.Strategy`.

    Args:
        **keywords: Keywords of `par_train.Strategy`. Pass the precision to Fabric, unless Fabric lacks it.

    Attributes:
        strategy: The strategy, once Fabric has launched, for methods that Fabric lacks.

    Raises:
        ValueError, TypeError: As `Strategy`; on every rank, when Fabric launches.
    """

    strategy: Strategy

    @takes_options_of(StrategyOptions)
    def __init__(self, **keywords: Any) -> None:
        self._keywords = keywords
        self._asked = "32-true"
        super().__init__()
        # DDPStrategy sets a control that needs a DDP module, so it is replaced afterwards.
        self._backward_sync_control = _SyncControl(self)
        self._trained: list[tuple[nn.Module, Optimizer, DeferredClipping]] = []

    @property
    def precision(self) -> Precision:
        """A precision of Fabric that does nothing, since the strategy applies the requested one."""
        return Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        self._asked = "32-true" if precision is None else precision.precision

    def setup_environment(self) -> None:
        """Make the strategy in the process group that Fabric has started. Collective."""
        super().setup_environment()
        said, device = f"Fabric(precision={self._asked!r})", self.root_device.type
        self.strategy = make_strategy(
            self._keywords, precision=self._asked, said_by=said, names=PRECISIONS, device=device
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of a DistributedSampler over the data ranks."""
        groups, apart = self.strategy.groups, self.strategy.data_axes
        return {"num_replicas": groups.size(apart), "rank": groups.rank(apart)}

    def process_dataloader(self, dataloader: DataLoader[Any]) -> DataLoader[Any]:
        """Let samplers draw one order on all ranks, and datasets the same rows on ranks of a replica. Collective."""
        place = self.distributed_sampler_kwargs
        sampler: Any = getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)
        if isinstance(sampler, DistributedSamplerWrapper):
            # Fabric has wrapped a sampler of the user's, whose draws are the ones to synchronize.
            sampler = sampler.dataset._sampler
        elif not isinstance(sampler, DistributedSampler):  # one order for all ranks, or the user's own rule
            sampler = None
        states = self.strategy.randomness.loader_states(sampler)
        return synchronize_draws(dataloader, states, rank=place["rank"], num_replicas=place["num_replicas"])

    # Before training

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: the strategy moves the model once it has sharded it."""

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a model that is only evaluated. Pass a model that is trained to `setup`, with its optimizer."""
        ready: nn.Module = initialize(self.strategy, [module], _NO_PIPELINE)[0]
        return ready

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Initialize a model and its optimizer with the strategy. Collective."""
        if len(optimizers) > 1:
            raise ValueError(
                f"Fabric.setup was given {len(optimizers)} optimizers of one model; par_groups.JointOptimizer(...) "
                "makes one of several, with one norm and one scale"
            )
        module, optimizer = initialize(self.strategy, [module, *optimizers], _NO_PIPELINE)
        clipping = DeferredClipping(optimizer, self.strategy.options.clip_norm, self.strategy.device)
        self._trained.append((module, optimizer, clipping))
        return module, [optimizer], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Raise ValueError: an optimizer needs its model."""
        raise ValueError(f"a {type(optimizer).__name__} was set up alone; fabric.setup(model, optimizer) takes both")

    # In each step

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of a loss; `weight=` is the argument of `Strategy.backward`.

        Raises:
            ValueError: Several models are trained, and `model=` is missing.
        """
        weight = kwargs.pop("weight", None)
        if args or kwargs:
            raise ValueError(f"Fabric.backward was given {[*args, *kwargs]}; it takes a loss, model= and weight=")
        self.strategy.backward(tensor, self._of(module)[1], weight)

    def _of(self, module: nn.Module | None) -> tuple[nn.Module, Optimizer, DeferredClipping]:
        found = [each for each in self._trained if module is None or each[0] is module]
        if len(found) != 1:
            raise ValueError(
                f"{len(self._trained)} models were set up with an optimizer; set up a model with its own, and where "
                "there are several name one: fabric.backward(loss, model=model)"
            )
        return found[0]

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step the strategy's optimizer."""
        return optimizer.step(**kwargs)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip all gradients in the next step; see `DeferredClipping`. A step whose norm is not finite is skipped."""
        del optimizer, error_if_nonfinite
        return self._of(module)[2].clip(float(max_norm), norm_type)

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Raise ValueError: the strategy has an option for it."""
        del module, optimizer
        raise ValueError(
            f"clip_val={clip_val} was given; give ParStrategy precision=dict(clip_value={clip_val}) instead"
        )

    # Collectives

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather as Fabric does, over the data ranks unless a group is given, without gradients."""
        if sync_grads:
            raise ValueError("fabric.all_gather was given sync_grads=True; gather what needs no gradient")
        group = self._meant(group)
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor.detach().contiguous(), group=group)
        return torch.stack(parts)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Fabric does, over the data ranks unless a group is given."""
        return super().all_reduce(tensor, self._meant(group), reduce_op)

    def _meant(self, group: Any) -> dist.ProcessGroup:
        """Return the group to use: the data ranks for the world, which Fabric passes if the user names no group."""
        if group is None or group is dist.group.WORLD:
            return self.strategy.groups[self.strategy.data_axes]
        return group  # type: ignore[no-any-return]  # a group of the user's own

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002 - as Fabric has it
        """Reduce a decision as Fabric does, over all ranks."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return bool(votes == dist.get_world_size()) if all else bool(votes)

    # Files

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,  # noqa: A002 - as Fabric has it
    ) -> None:
        """Write a folder: a folder of full tensors per model and optimizer, and one file for the rest. Collective."""
        if filter:
            raise ValueError(
                f"fabric.save was given a filter for {sorted(filter)}; models and optimizers are saved whole"
            )
        # Models and optimizers have folders of their own, because no rank has their full tensors.
        rest: dict[str, Any] = {"par_steps": self.strategy.steps}
        for key, value in state.items():
            if isinstance(value, nn.Module | Optimizer):
                self.strategy.save(value, Path(path, key))
            if isinstance(value, MixedOptimizer):
                rest[key] = value.scaling.state_dict()
            elif not isinstance(value, nn.Module | Optimizer):
                rest[key] = value.state_dict() if hasattr(value, "state_dict") else value
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(rest, Path(path, REST), storage_options)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a folder of `save_checkpoint`, under this or another topology. Collective."""
        if isinstance(state, nn.Module | Optimizer):  # Fabric.load_raw
            self.strategy.load(state, path, plan="torch")
            return {}
        rest: dict[str, Any] = self.checkpoint_io.load_checkpoint(Path(path, REST), weights_only=weights_only)
        steps = rest.pop("par_steps")
        for key, value in (state or {}).items():
            if isinstance(value, nn.Module | Optimizer):
                self.strategy.load(value, Path(path, key))
            elif strict and key not in rest:
                raise KeyError(
                    f"the checkpoint {str(path)!r} has no {key!r}; it has {sorted(rest)}, models and optimizers"
                )
            if isinstance(value, MixedOptimizer):
                value.scaling.load_state_dict(rest.pop(key))
            elif hasattr(value, "load_state_dict") and key in rest:
                value.load_state_dict(rest.pop(key))
            elif key in rest:
                state[key] = rest.pop(key)
        # The seeds of dropout are a function of the step.
        self.strategy.steps = steps
        return rest

    def teardown(self) -> None:
        """End the strategy."""
        self.strategy.close()
        super().teardown()


class _SyncControl(_BackwardSyncControl):  # type: ignore[misc]
    """`Fabric.no_backward_sync`, by `Strategy.no_sync`."""

    def __init__(self, strategy: ParStrategy) -> None:
        self._strategy = strategy

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return self._strategy.strategy.no_sync(module) if enabled else nullcontext()
