"""The plugins of canonical numerics: gradients on a grid, sums of the optimizer, and gradients of tied weights."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from par_groups import ProcessGroups, attributes, is_compiled, segments_of, sharding_of
from par_layers import active_dropouts, expert_modules, losses_over_ranks, unstable_kernels
from par_pipeline import PipelineStages
from par_precision import ExactSums, is_float8

from ..handlers import register_gradient_handler
from ..plugin import Plugin
from ..setup import Setup
from .randomness import LaneRandomness


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
        lanes = strategy.options.canonical_lanes
        assert lanes is not None  # noqa: S101 - the options have been checked
        replicas = strategy.groups.size(strategy.data_axes)
        self._lanes = lanes.data // replicas
        # The ranks of a sequence have losses of their own tokens, which are summed like those of other samples.
        parts = strategy.context.ranks
        assert isinstance(strategy.randomness, LaneRandomness)  # noqa: S101 - as `Strategy` has made it
        # A lane has its number in the whole batch, so that it draws alike on whichever rank it runs.
        strategy.randomness.attach(model, first_lane=strategy.groups.rank(strategy.data_axes) * self._lanes)
        self.sums = ExactSums(losses=lanes.data * parts, replicas=replicas * parts, parts=parts)
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


@register_gradient_handler("exact_partials")
class ExactPartials:
    """Gradients that are still partial after the data ranks have summed them, kept in fp64 until their sum is complete.

    Such are the gradients of weights that several pipeline stages use, and of parameters between sharded weights or on
    ranks with other tokens. Otherwise each rank's part would be rounded to the optimizer's dtype before the last
    addition, which one device does not do.

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
            # Without names a tensor is one parameter, whose sharding says whether it is partial.
            own = group.get("param_names") or [""] * len(group["params"])
            for name, tensor in zip(own, group["params"], strict=True):
                segments = segments_of(tensor, name)
                partial = any(box.sum_over for segment in segments for box in segment.sharding.boxes)
                if partial or names.intersection(segment.name for segment in segments):
                    tensor.grad_dtype = None  # par-zero then stores the sum in the dtype in which it was reduced
                    self._tensors.append(tensor)

    def handle_gradient(self) -> None:
        """Round the sums to the optimizer's dtype. The handlers before this one have completed them."""
        for tensor in self._tensors:
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(tensor.dtype)


def _check(model: nn.Module, strategy: Setup) -> None:
    """Check that every sum of a step is one that is made exact. A rank checks its own stages; `wire` tells the others.

    Raises:
        ValueError: Something else would depend on the topology.
    """
    lanes = strategy.layers.rules.lanes
    dtype = torch.bfloat16 if strategy.options.precision_name == "bf16" else torch.float32
    # First the machine: no change of the model helps where its kernels depend on rows.
    unstable = unstable_kernels(strategy.device, dtype, lanes=lanes.tensor * lanes.sequence)
    if unstable:
        raise ValueError(
            f"numerics='canonical': on this {strategy.device.type}, torch {torch.__version__} has other bits for "
            f"{', '.join(unstable)}; use another version of torch, or numerics='ordinary'"
        )
    for name, module in model.named_modules():
        if is_compiled(module):
            raise ValueError(
                f"{name or 'the model'!r} is compiled: a compiler chooses its arithmetic by shapes, which depend on "
                "the topology; canonical numerics need a model without torch.compile"
            )
        if is_float8(module):
            raise ValueError(
                f"{name!r} multiplies in float8, whose scales depend on the rows and ranks of a call; canonical "
                "numerics need fp32 or bf16; remove convert_to_float8_"
            )
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise ValueError(
                f"{name!r} is a {type(module).__name__}, whose running statistics depend on the order of lanes; "
                "canonical numerics need a norm of single rows, such as LayerNorm or GroupNorm"
            )
    ExactSums.check(model)
    _check_experts(model, strategy)
    for name, rate in active_dropouts(model, by_rank=lanes.in_layers).items():
        if lanes.in_layers:
            raise ValueError(
                f"{name!r} has {rate}, and ranks draw for their own features or tokens; use one tensor and one "
                "sequence lane, or set it to 0"
            )
        if "layerdrop" in rate:
            raise ValueError(
                f"{name!r} has {rate}: it draws between layers, so that a layer is skipped on some topologies and not "
                "on others; set it to 0"
            )
    # named_parameters leaves out the second name of a tied weight, which is what is looked for.
    uses: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(parameter, []).append(name)
    partial = {
        parameter: own for parameter, own in uses.items() if any(box.sum_over for box in sharding_of(parameter).boxes)
    }
    for own in partial.values():
        if len(own) > 1:
            raise ValueError(
                f"{own[0]!r} is {own[1]!r}, too, and autograd would round the gradient of each use before the tensor "
                "ranks have summed it; use sequence_parallel=False with numerics='canonical'"
            )
    # From here on only what offload does too early: a gradient that leaves the device is rounded there.
    if strategy.options.memory is None and "offload" not in strategy.options.zero_keywords:
        return
    if isinstance(model, PipelineStages) and strategy.groups.size("pipeline") > 1 and any(model.tied):
        names = sorted(name for each in model.tied for name in each)
        raise ValueError(
            f"the stages share {names[0]!r}, and its gradient is offloaded before the stages have summed it; remove "
            "memory and zero's offload, or use numerics='ordinary'"
        )
    if partial:
        (name, *_), *_ = partial.values()
        raise ValueError(
            f"the gradient of {name!r} is a sum over tensor ranks, and is offloaded before they have summed it; remove "
            "memory and zero's offload, or use numerics='ordinary'"
        )


def _check_experts(model: nn.Module, strategy: Setup) -> None:
    """Check that a lane's experts compute only with its own rows.

    Raises:
        ValueError: A loss of a router, or a matmul of experts, has rows of several lanes.
    """
    for name in losses_over_ranks(model):
        raise ValueError(
            f"{name or 'the model'!r} has a load-balancing loss of the tokens of all ranks, but each lane has a loss "
            "of its own; use LoadBalancing(scope='sequence') or 'microbatch', and no sync_aux_loss_, with "
            "numerics='canonical'"
        )
    for name, module in expert_modules(model).items() if strategy.deals_experts else ():
        if not attributes.EXACT_GRADIENTS.of(module):
            raise ValueError(
                f"{name!r}, a {type(module).__name__}, multiplies the rows of all lanes together; make experts with "
                "Strategy.layers.MoE, or pass a plan in which they have the rule 'ep_dispatch_experts'"
            )
