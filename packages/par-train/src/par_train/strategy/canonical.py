"""Canonical numerics: a step whose bits do not depend on the topology, because each of its sums is exact.

A lane is a microbatch of a fixed number of rows. Every lane runs its own forward and backward, in the same shapes on
every topology, and what ranks and microbatches add up are the gradients of lanes, rounded to one grid. The sums are
exact, so their order does not matter: `par_precision.ExactSums` has the argument.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from par_groups import ProcessGroups, agree, segments_of
from par_pipeline import PipelineStages
from par_precision import ExactSums, TotalWeights

from .._torch_private import tree_leaves
from .execute import Execution, rows_of
from .handlers import register_gradient_handler
from .options import StrategyOptions
from .plugin import Plugin
from .setup import Setup


def environment_of(options: StrategyOptions, device: torch.device) -> dict[str, Any]:
    """Return what the bits of a canonical run depend on besides its data and options; empty for ordinary numerics.

    Args:
        options: The options of the strategy.
        device: The device of this rank.
    """
    if options.lanes is None:
        return {}
    is_cpu = device.type == "cpu"
    hardware = torch.backends.cpu.get_cpu_capability() if is_cpu else torch.get_device_module(device).get_device_name()
    return {"lanes": options.lanes, "torch": str(torch.__version__), "hardware": hardware}


def warn_of_other_bits(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Warn if a canonical run goes on where its bits may differ from those of a run that was not interrupted.

    Args:
        saved: What `environment_of` returned where the checkpoint was written.
        here: What it returns here.
    """
    if not saved or saved == here:
        return
    changed = [
        f"{name} {value!r} became {here.get(name)!r}" for name, value in saved.items() if value != here.get(name)
    ]
    warnings.warn(
        f"numerics='canonical': {', '.join(changed)}, so the weights from here on may differ in their last bits from "
        "those of a run that was not interrupted",
        stacklevel=3,
    )


class GridPlugin(Plugin):
    """Rounds the gradients of each lane to one grid, before anything sums them."""

    name = "grid"

    def __init__(self) -> None:
        self.sums: ExactSums | None = None
        self._lanes = 1  # of this data rank

    def setup_model(self, model: nn.Module, optimizer: Optimizer | None, strategy: Setup) -> nn.Module:
        """Register hooks on the parameters, after this rank's stages are known and before anything is packed."""
        if optimizer is None:
            return model
        _check(model, strategy)
        lanes = strategy.options.lanes
        assert lanes is not None  # noqa: S101 - the options have been checked
        replicas = strategy.groups.size(strategy.data_axes)
        self._lanes = lanes // replicas
        self.sums = ExactSums(losses=lanes, replicas=replicas)
        self.sums.attach(model)
        return model

    @contextmanager
    def accumulating(self, models: Iterable[nn.Module], optimizer: Optimizer) -> Iterator[None]:
        """A context for a backward pass of one lane in a loop of the user's own.

        Only the last lane of a data rank reduces. Each reduction ends with a cast to the optimizer's dtype, and a sum
        of rounded sums would depend on how many lanes a rank has.
        """
        with ExitStack() as stack:
            if optimizer.scaling.loss_weights.number + 1 < self._lanes:  # type: ignore[attr-defined]
                for model in models:
                    stack.enter_context(model.no_sync())  # type: ignore[operator]
            yield


class ExactPlugin(Plugin):
    """Lets the optimizer take the norm and the mean from exact sums.

    Args:
        grid: The plugin that has rounded the gradients.
    """

    name = "exact"

    def __init__(self, grid: GridPlugin) -> None:
        self._grid = grid

    def setup_optimizer(self, optimizer: Optimizer, model: nn.Module, strategy: Setup) -> Optimizer:
        """Replace the sums of the optimizer that the precision plugin has made."""
        del model, strategy
        if self._grid.sums is not None:
            self._grid.sums.use(optimizer)  # type: ignore[arg-type]  # the precision plugin has wrapped it
        return optimizer


@register_gradient_handler("exact_ties")
class ExactTies:
    """The gradients of weights that several pipeline stages use, kept in fp64 until all stages' gradients are summed.

    Otherwise each stage's sum over lanes would be rounded to the optimizer's dtype before the last addition, which one
    device does not do.

    Args:
        model: The model, or several.
        optimizer: Their optimizer, after it was sharded.
        groups: The groups of the strategy.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: ProcessGroups) -> None:
        names: set[str] = set()
        for prefix, module in model.named_modules():
            if isinstance(module, PipelineStages) and groups.size("pipeline") > 1:
                names |= {f"{prefix}.{name}" if prefix else name for each in module.tied for name in each}
        self._tensors: list[Tensor] = []
        for group in optimizer.param_groups:
            own = group.get("param_names") or [""] * len(group["params"])
            for name, tensor in zip(own, group["params"], strict=True):
                if names.intersection(segment.name for segment in segments_of(tensor, name)):
                    tensor.grad_dtype = None  # par-zero then stores the sum in the dtype in which it was reduced
                    self._tensors.append(tensor)

    def handle_gradient(self) -> None:
        """Round the sums to the optimizer's dtype. `pipeline_shared` has completed them."""
        for tensor in self._tensors:
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(tensor.dtype)


class LaneExecution(Execution):
    """The pipeline of a model whose microbatches are lanes: the factor of a loss does not depend on the others'.

    Args:
        *arguments: The arguments of `Execution`.
    """

    normalizes = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._fits = False  # a batch of fewer rows would have fewer lanes

    def run(self, next_batch: Callable[[], Any], *arguments: Any, forward_only: bool, **options: Any) -> Any:
        """Run a batch, and let all ranks know beforehand, in the first step, how much a loss weighs."""
        optimizer = self._optimizer
        if not forward_only and optimizer is not None and optimizer.scaling.steps == 0:
            weights = optimizer.scaling.loss_weights
            next_batch = partial(self._expected, next_batch, weights)  # type: ignore[arg-type]
        return super().run(next_batch, *arguments, forward_only=forward_only, **options)

    def _expected(self, next_batch: Callable[[], Any], weights: TotalWeights) -> Any:
        problem, ended, batch, items = None, False, None, 0
        try:
            batch = next_batch()
            items = _items_of(batch) // self.pipeline.schedule.microbatches
        except StopIteration:
            ended = True
        except Exception as error:  # of any kind: every rank raises what one rank has raised
            problem = error
        weights.expect(float(max(agree(problem, items, None).values())))
        if ended:
            raise StopIteration
        return batch

    def _weigh(self, target: Any) -> float:
        self._weights.append(float(rows_of(target) or 1))
        if self._weights[-1] != self._weights[0]:
            raise ValueError(
                f"the batch has microbatches of {self._weights[0]:g} and {self._weights[-1]:g} rows, but lanes are of "
                f"equal size; pass a number of rows that {self.pipeline.schedule.microbatches} divides"
            )
        return 1.0


def _items_of(batch: Any) -> int:
    """Return the number of elements of a batch's target: an upper bound of what a sum of losses counts."""
    target = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else batch
    if isinstance(target, Mapping) and "labels" in target:
        target = target["labels"]
    return next((leaf.numel() for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def _check(model: nn.Module, strategy: Setup) -> None:
    """Check that every sum of a step is one that is made exact. A rank checks its own stages; `wire` tells the others.

    Raises:
        ValueError: Something else would depend on the topology.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, whose running statistics depend on the order of lanes; "
                "canonical numerics need a norm of single rows, such as LayerNorm or GroupNorm"
            )
        # nn.Dropout has a `p`; layers that call dropout as a function have attributes such as "attention_dropout".
        rates = {"p": module.p} if isinstance(module, _DropoutNd) else vars(module)
        for attribute, rate in rates.items():
            if (attribute == "p" or "drop" in attribute) and isinstance(rate, float) and rate > 0:
                raise ValueError(
                    f"{name!r} has dropout {attribute}={rate}: its random numbers depend on the rank that runs it; "
                    "canonical numerics need 0"
                )
    offloads = strategy.options.memory is not None or "offload" in strategy.options.zero_keywords
    if isinstance(model, PipelineStages) and strategy.groups.size("pipeline") > 1 and any(model.tied) and offloads:
        names = sorted(name for each in model.tied for name in each)
        raise ValueError(
            f"the stages share {names[0]!r}, and its gradient is offloaded before the stages have summed it; remove "
            "memory and zero's offload, or use numerics='ordinary'"
        )
