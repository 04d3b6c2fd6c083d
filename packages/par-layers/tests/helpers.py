"""What the tests share: every mode that a world can run, and the comparison of a layer with the same on one device."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import LayerSet, PartialGradientReducer, initialize, layer_set
from par_testing import assert_equal_to_one_device

MODES: dict[int, list[dict[str, Any]]] = {  # every mode that a world of so many ranks can run
    1: [
        {"mode": "1d"},
        {"mode": "1d", "sequence_parallel": True},
        {"mode": "2d"},
        {"mode": "2.5d", "depth": 1},
        {"mode": "3d"},
    ],
    2: [{"mode": "1d"}, {"mode": "1d", "sequence_parallel": True}],
    4: [
        {"mode": "1d"},
        {"mode": "1d", "sequence_parallel": True},
        {"mode": "2d"},
        {"mode": "2.5d", "depth": 1},
        {"mode": "2.5d", "depth": 4},
    ],
    8: [{"mode": "2.5d", "depth": 2}, {"mode": "3d"}],
}
PRODUCTS = {**MODES, 4: MODES[4][:3], 8: [{"mode": "3d"}]}
"""One mode for each way to multiply: 2.5d is 2d's, so what asks nothing about the rest of a layer leaves it out."""

FROM_4 = [4, pytest.param(8, marks=pytest.mark.storm)]
"""Sizes of a test that asks nothing of 3d which whole models (test_models.py) and linears do not ask on 8 ranks."""

TYPICAL = {size: [tensor for tensor in every if tensor["mode"] != "2.5d"] for size, every in MODES.items()}
DEEP = {size: [tensor for tensor in every if tensor["mode"] == "2.5d"] for size, every in MODES.items()}
in_the_typical_modes = pytest.mark.parametrize(
    "configs", [TYPICAL, pytest.param(DEEP, marks=pytest.mark.storm)], ids=["typical", "2.5d"]
)
"""What most tests run; 2.5d, which is 2d's products in tokens that are cut once more, is among the storms.

The suites that run every mode in worlds of 1, 2, 4 and 8 ranks are the gradients of whole models (test_models.py), the
linear layers (test_linear.py), the counts of collectives (test_counts.py) and their predictions (test_cost.py).
"""


@dataclass(frozen=True)
class Mode:
    """One mode, live: its config, its layers and its groups."""

    tensor: dict[str, Any]
    layers: LayerSet
    groups: ProcessGroups

    @property
    def by_sequence(self) -> bool:
        return bool(self.tensor.get("sequence_parallel", False))


def modes(configs: list[dict[str, Any]] | None = None) -> Iterator[Mode]:
    """Modes of this world, live, one after another: those of `configs`, or the typical ones."""
    world = dist.get_world_size()
    for tensor in TYPICAL[world] if configs is None else configs:
        with ProcessGroups(Topology.from_config({"tensor": {"size": world, **tensor}}, world)) as groups:
            yield Mode(tensor, layer_set("auto", groups), groups)


def every_config() -> list[dict[str, Any]]:
    """The config of every mode that this world can run."""
    return MODES[dist.get_world_size()]


def run_checks(checks: Iterable[Callable[[Mode], None]], configs: list[dict[str, Any]] | None = None) -> None:
    """Calls every check in every mode of this world, which is started once for them all.

    A world of 8 ranks and the groups of its modes take half a second of computing, most checks a tenth.

    Args:
        checks: Functions of a mode. A failure bears a note that names the check and the mode.
        configs: The modes; default: the typical ones.
    """
    for mode in modes(configs):
        for check in checks:
            try:
                check(mode)
            except BaseException as error:  # pytest.fail raises one that is no Exception
                error.add_note(f"{check.__name__} in the mode {mode.tensor}")
                raise


def numbers(*shape: int, seed: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integers(limit: int, *shape: int, seed: int = 6) -> Tensor:
    """Whole numbers below `limit`, the same on every rank."""
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))


def filled(module: nn.Module, dtype: torch.dtype = torch.float64) -> Any:
    """The module, its parameters drawn."""
    initialize(module, seed=3, dtype=dtype)
    return module


def assert_layer_equals_one_device(
    mode: Mode, make: Callable[[LayerSet], nn.Module], x: Tensor, *, inner: bool = False, exact: float = 1e-10
) -> None:
    """The output, and the gradients of the input and of every parameter.

    Args:
        mode: The mode.
        make: Makes the layer from a layer set.
        x: A whole activation.
        inner: Whether the output is in the inner layout.
        exact: The tolerance, absolute and relative: sums are in another order.
    """
    whole, parallel = filled(make(layer_set(None)), x.dtype), filled(make(mode.layers), x.dtype)
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected, y = whole(other), mode.layers.gather(parallel(mode.layers.split(mine)), inner=inner)
    _assert_close(y, expected, f"{mode.tensor}: the output", exact)
    upstream = numbers(*expected.shape, seed=7, dtype=x.dtype)
    expected.backward(upstream)
    y.backward(upstream)
    PartialGradientReducer(parallel, mode.groups).handle_gradient()
    _assert_close(mine.grad, other.grad, f"{mode.tensor}: the input's gradient", exact)
    reason = f"{mode.tensor}: sums in another order"
    assert_equal_to_one_device(parallel, whole, gradients=True, rtol=exact, atol=exact, reason=reason)


def _assert_close(here: Tensor | None, there: Tensor | None, what: str, exact: float) -> None:
    torch.testing.assert_close(here, there, rtol=exact, atol=exact, msg=lambda message: f"{what}: {message}")


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter put together from the shards of the world: each element from the one rank that owns it."""
    ranks = range(dist.get_world_size())
    shapes = {name: sharding_of(parameter).shape for name, parameter in model.named_parameters()}
    everything = torch.zeros(sum(map(math.prod, shapes.values())), dtype=next(model.parameters()).dtype)
    pieces = everything.split([math.prod(shape) for shape in shapes.values()])
    state = {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    for name, parameter in model.named_parameters():
        for box in sharding_of(parameter).boxes:
            if box.owns(dist.get_rank(), ranks):
                state[name][box.slices] = box.of(parameter.detach())
    dist.all_reduce(everything)  # over the world
    return state


@contextmanager
def simulated(world: int, tensor: dict[str, Any], rank: int = 0) -> Iterator[Mode]:
    """A mode as one rank of a world on the fake backend knows it: for what needs no numbers of other ranks."""
    dist.init_process_group("fake", rank=rank, world_size=world)
    with ProcessGroups(Topology.from_config({"tensor": {"size": world, **tensor}}, world)) as groups:
        yield Mode(tensor, layer_set("auto", groups), groups)
    dist.destroy_process_group()
