"""Random numbers of canonical numerics: dropout drops the same elements of a lane under every topology."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from par_data import StepRandomness, derive_seed
from par_groups import Axes, ProcessGroups
from par_layers import active_dropouts
from par_layers.pretrained import pretrained_of
from par_pipeline import PipelineStages


class LaneRandomness(StepRandomness):
    """The seeds of torch's generators: one for each step, lane and layer.

    Each forward of a model, or of a stage, in training is the next lane of this rank, and seeds the generators for it.
    Each layer in it seeds them once more, by its name, so that the numbers do not depend on the layers before it on the
    same rank. Afterwards the generators continue as if nothing had been drawn.
    """

    def __init__(self, seed: int, groups: ProcessGroups, data_axes: Axes, device: torch.device) -> None:
        super().__init__(seed, groups, data_axes, device)
        self._lanes: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # begun in this step, by model or stage

    def attach(self, model: nn.Module, first_lane: int) -> None:
        """Register hooks on a model with dropout; other models draw nothing.

        Args:
            model: The model, or a ModuleList of several, after it was split into stages.
            first_lane: The number of this rank's first lane among the lanes of a step.
        """
        several = model.children() if isinstance(model, nn.ModuleList) else [model]
        for number, whole in enumerate(several):
            is_split = isinstance(whole, PipelineStages)
            for root in whole.__dict__["parts"].values() if is_split else [whole]:
                # Only these models have layers that run on different ranks; in others the model is one layer.
                layers = is_split or isinstance(whole, nn.Sequential) or pretrained_of(whole) is whole
                self._seed_in(root, number, first_lane, dict(_layers_of(root)) if layers else {})

    def _seed_in(self, root: nn.Module, number: int, first_lane: int, layers: dict[str, nn.Module]) -> None:
        if not active_dropouts(root):
            return
        self._lanes[root] = 0
        states: list[list[Tensor]] = []  # of the generators, one for each call under way

        def begin_lane(_: nn.Module, __: Any) -> None:
            states.append(self._states())
            if root.training and torch.is_grad_enabled():
                lane = first_lane + self._lanes[root]
                self._lanes[root] += 1
                self._seed_generators(derive_seed(self._seed, self._step, number, lane))

        def begin_layer(name: str, _: nn.Module, __: Any) -> None:
            states.append(self._states())
            # The lane's seed is asked of the generator, not of this object: activation checkpointing restores the
            # generator's state, also the seed in it, and may recompute a layer while a later lane is under way.
            self._seed_generators(derive_seed(torch.initial_seed(), name))

        def end(*_: Any) -> None:
            before, *own = states.pop()
            torch.set_rng_state(before)
            for state in own:
                torch.get_device_module(self._device).set_rng_state(state)

        hooks: list[tuple[nn.Module, Callable[..., None]]] = [(root, begin_lane)]
        hooks += [(layer, partial(begin_layer, name)) for name, layer in layers.items()]
        for module, begin in hooks:
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(end, always_call=True)  # also if the forward raises

    def _states(self) -> list[Tensor]:
        own = [] if self._device.type == "cpu" else [torch.get_device_module(self._device).get_rng_state()]
        return [torch.get_rng_state(), *own]

    @property
    def step(self) -> int:
        """The number of optimizer steps; setting it begins its first lane."""
        return super().step

    @step.setter
    def step(self, step: int) -> None:
        StepRandomness.step.fset(self, step)  # type: ignore[attr-defined]
        self._lanes.update(dict.fromkeys(self._lanes, 0))


def _layers_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with dropout that always run on one rank: layers, with a number in their name, and others."""
    layers: dict[str, None] = {}  # in order, each once
    for name in active_dropouts(root):
        # The name up to its first number, "layers.3" of "layers.3.mlp.dropout"; the whole name if it has none.
        parts = name.split(".")
        end = next((place for place, part in enumerate(parts, 1) if part.isdecimal()), len(parts))
        layers[".".join(parts[:end])] = None
    for name in layers:
        yield name, root.get_submodule(name)
