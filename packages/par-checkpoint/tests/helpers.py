"""What the tests share: one small training in every topology, and the whole tensors that it stands for."""

import dataclasses
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call

from par_checkpoint import Format, Tiers, Transfer
from par_groups import Box, Segment, Segments, Sharding, on_written, segments_of, set_segments, set_sharding, whole
from par_groups import cut as cut_range
from par_testing import default_device_type

SHAPES = {"0.weight": (12, 6), "0.bias": (12,), "2.weight": (5, 12), "2.bias": (5,)}
SLOTS = ("exp_avg", "exp_avg_sq")


def make_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two linear layers, drawn."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5), nn.Softplus()).to(dtype)


def batch(step: int) -> Tensor:
    """The data of a step, the same everywhere."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Takes steps; the losses."""
    losses = []
    for step in steps:
        loss = model(batch(step).to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def solo() -> dist.ProcessGroup:
    """A group of this rank alone."""
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def neighbours(size: int) -> dist.ProcessGroup:
    """The group of this rank and those beside it: 0 .. size - 1, size .. 2 size - 1, and so on."""
    first = dist.get_rank() // size * size
    return dist.new_group(list(range(first, first + size)), use_local_synchronization=True)


def rectangle(shape: tuple[int, ...], dim: int, begin: int, end: int, rank: int) -> Sharding:
    """Indices begin .. end - 1 of one dim, in a contiguous local tensor of one rank; nothing if there are none."""
    if begin == end:
        return Sharding(shape, ())
    start = tuple(begin if d == dim else 0 for d in range(len(shape)))
    size = tuple(end - begin if d == dim else n for d, n in enumerate(shape))
    return Sharding(shape, (Box(start, size, 0, whole(size, ()).boxes[0].stride, (rank,)),))


class Run:
    """A training of the small model, cut by hand; its arithmetic is that of one process, so all are alike to the bit.

    Args:
        seed: Of the weights.
    """

    group_size = 1

    def __init__(self, seed: int = 0) -> None:
        self.group = neighbours(self.group_size)
        self.ranks = dist.get_process_group_ranks(self.group)
        self.place = dist.get_rank(self.group)
        self.names: dict[Tensor, str] = {}
        start = dict(make_model(seed).named_parameters())
        self.model = self.cut({name: each.detach() for name, each in start.items()})
        self.optimizer = torch.optim.AdamW(list(self.names), lr=1e-2)

    def cut(self, weights: dict[str, Tensor]) -> nn.Module | dict[str, Tensor]:
        """What this rank holds; notes the tensors to be optimized."""
        model = make_model()
        model.load_state_dict(weights)
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        return model

    def whole(self) -> dict[str, Tensor]:
        """Weights and slots, put together from what the ranks of the group own."""
        found = {
            f"{name}{slot}": torch.zeros(shape, dtype=torch.float64)
            for slot in ("", *(f".{each}" for each in SLOTS))
            for name, shape in SHAPES.items()
        }
        for name, box, slot, view in self._views():
            if box.owns(dist.get_rank(), self.ranks):
                found[name + slot][box.slices] = view
        flat = torch.cat([each.view(-1) for each in found.values()])
        dist.all_reduce(flat, group=self.group)  # each element is zero but on its owner
        parts = flat.split([each.numel() for each in found.values()])
        return {name: part.view(each.shape) for (name, each), part in zip(found.items(), parts, strict=True)}

    def steps(self, steps: range) -> list[float]:
        """Takes steps; the losses."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        weights = {name: each.requires_grad_() for name, each in self.whole().items() if name in SHAPES}
        loss = functional_call(make_model(), weights, batch(step)).square().mean()
        gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        for tensor, name in self.names.items():
            tensor.grad = torch.zeros_like(tensor)
            for part, box, view in segments_of(tensor, name).views(tensor.grad):
                view.copy_(gradients[part][box.slices])
        self.optimizer.step()
        self.refresh()
        return loss.item()

    def refresh(self) -> None:
        """Brings the weights from the optimizer's tensors to the model's, if they are not the same."""

    def _views(self) -> Iterator[tuple[str, Box, str, Tensor]]:
        for tensor, name in self.names.items():
            state = self.optimizer.state.get(tensor, {})
            slots = {"": tensor, **{f".{slot}": state[slot] for slot in SLOTS if slot in state}}
            for slot, value in slots.items():
                local = getattr(value, "_local_tensor", value).detach()
                for part, box, view in segments_of(tensor, name).views(local):
                    yield part, box, slot, view


class Tensor2(Run):
    """Tensor parallel over 2: the first layer by rows, the second by columns, its bias replicated."""

    group_size = 2
    dims: ClassVar = {"0.weight": 0, "0.bias": 0, "2.weight": 1}

    def cut(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._part(name, each) for name, each in weights.items()}

    def _part(self, name: str, weight: Tensor) -> Tensor:
        sharding, part = whole(weight.shape, self.ranks), weight.clone()
        if name in self.dims:
            half = weight.shape[self.dims[name]] // 2
            begin = half * self.place
            sharding = rectangle(tuple(weight.shape), self.dims[name], begin, begin + half, dist.get_rank())
            part = weight[sharding.boxes[0].slices].clone()
        set_sharding(part, sharding)
        self.names[part] = name
        return part


class Pipeline2(Run):
    """A pipeline of 2 stages: each rank has a layer, under its name in the whole model."""

    group_size = 2

    def cut(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        mine = {name: each.clone() for name, each in weights.items() if name.startswith("02"[self.place])}
        self.names = {each: name for name, each in mine.items()}
        return mine


def flat_segments(bounds: list[int], rank: int, shapes: dict[str, tuple[int, ...]], world: int) -> Segments:
    """What lies in one rank's part of all tensors laid end to end, wherever that cuts them."""
    begin, end = bounds[rank], bounds[rank + 1]
    numels = [torch.Size(shape).numel() for shape in shapes.values()]
    segments = []
    for (name, shape), (first, last) in zip(shapes.items(), pairwise(accumulate(numels, initial=0)), strict=True):
        low, high = max(first, begin), min(last, end)
        if low < high:
            record = whole(shape, range(world))
            part = cut_range(record, low - first, high - first, offset=low - begin, holders=(rank,))
            segments.append(Segment(name, part))
    return Segments(segments)


class Zero1(Run):
    """Optimizer state in equal flat parts over 4 ranks, padded at the end; the model on every rank."""

    group_size = 4
    bounds: ClassVar = [0, 38, 76, 114, 152]  # 149 elements: rows are cut, and 3 elements of padding are left

    def cut(self, weights: dict[str, Tensor]) -> nn.Module:
        model = super().cut(weights)
        self.flat = self._flat(weights)
        self.names = {self.flat: ""}
        self.registration = on_written(model.parameters(), lambda _: self._take_weights())
        return model

    def refresh(self) -> None:
        self.model.load_state_dict({name: each for name, each in self.whole().items() if name in SHAPES})

    def _take_weights(self) -> None:
        weights = dict(self.model.named_parameters())
        for name, box, view in segments_of(self.flat).views(self.flat):
            view.copy_(weights[name].detach()[box.slices])

    def _flat(self, weights: dict[str, Tensor]) -> Tensor:
        segments = flat_segments(self.bounds, self.place, SHAPES, self.group_size)
        flat = torch.full((self.bounds[self.place + 1] - self.bounds[self.place],), 3.0, dtype=torch.float64)
        for name, box, view in segments.views(flat):
            view.copy_(weights[name][box.slices])
        set_segments(flat, segments)
        return flat


class Zero3(Zero1):
    """Everything in flat parts, of four sizes; one rank has nothing."""

    bounds: ClassVar = [0, 50, 61, 61, 152]

    def cut(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        self.flat = self._flat(weights)
        self.names = {self.flat: ""}
        held = {segment.name: segment.sharding for segment in segments_of(self.flat)}
        model = {}
        for name, shape in SHAPES.items():
            boxes = held[name].boxes if name in held else ()
            first, last = (boxes[0].offset, boxes[-1].last + 1) if boxes else (0, 0)
            model[name] = self.flat[first:last]
            set_sharding(model[name], Sharding(shape, cut_range(held[name], first, last).boxes if boxes else ()))
        return model

    def refresh(self) -> None:
        """The model's tensors are views of the flat one."""


class Strided(Run):
    """FSDP2 over tensor parallelism, each over 2: DTensors whose rows are dealt out in strides, trained by torch."""

    group_size = 4

    def cut(self, weights: dict[str, Tensor]) -> nn.Module:
        mesh = init_device_mesh(default_device_type(), (2, 2), mesh_dim_names=("data", "tensor"))
        model = super().cut(weights)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        return model

    def steps(self, steps: range) -> list[float]:
        return train(self.model, self.optimizer, steps)


RUNS = {"one": Run, "tensor": Tensor2, "pipeline": Pipeline2, "zero1": Zero1, "zero3": Zero3, "strided": Strided}


def policies(**options: Any) -> dict[str, Any]:
    """The keywords of `save` or `load` for fields of policies, so that tests can vary one field by its name."""
    fields = {kind: [field.name for field in dataclasses.fields(kind)] for kind in (Format, Transfer)}
    keywords: dict[str, Any] = {}
    for name, kind in (("format", Format), ("transfer", Transfer)):
        given = {key: options.pop(key) for key in fields[kind] if key in options}
        if given:
            keywords[name] = kind(**given)
    if "tiers" in options:
        copies = options.pop("copies", None)
        tiers = options.pop("tiers")
        keywords["tiers"] = None if tiers is None else Tiers(tiers, copies=copies)
    return {**options, **keywords}
