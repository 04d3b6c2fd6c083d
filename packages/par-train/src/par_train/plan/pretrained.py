"""Models of transformers, unchanged: their sizes from the model itself, which needs no memory and no weights.

Parameters are those that `par_layers.cuts` gives a rank, traffic is what `par_layers.costs` says, stages are those of
`par_pipeline.build_stage`, and activations what autograd keeps of the model's own forward (`kept`).
"""

import copy
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import nn

from par_groups import Sharding, Topology
from par_layers import Traffic, costs, cuts
from par_pipeline import build_stage, schedule

from .inputs import Numbers
from .kept import Kept, Roles, kept_of
from .memory import Replicas
from .pipeline import Pipe, Place, stage_size
from .shape import Count, Cut, Part
from .traffic import Move

_SMALL = (2, 3, 5, 7, 11, 13)
"""Numbers of ranks by which a plan is looked at: what it cuts is the same for all that divide."""


@dataclass(frozen=True)
class _Share:
    """What one tensor rank has of some modules.

    Args:
        elements: Number of elements in their parameters.
        matrices: Number of those in matrices.
        largest: Number of elements in the largest parameter.
        tensors: Number of parameters.
        partial: Elements that are received once a step to sum partial gradients.
        axes: The sets of axes over which these are summed.
        traffic: What linears receive for one token in forward and backward, in the width of products.
        stream: What all else receives, such as embeddings and the entries of regions, in that of activations.
    """

    elements: int = 0
    matrices: int = 0
    largest: int = 0
    tensors: int = 0
    partial: float = 0.0
    axes: frozenset[tuple[str, ...]] = frozenset()
    traffic: Traffic = field(default_factory=Traffic)
    stream: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True)
class _Rank:
    """What one tensor rank has of a model.

    Args:
        kinds: By kind of layer: its share of one layer.
        ends: By whether the first and the last stage are its own: its share of what lies outside of the layers.
        table: Number of elements in its part of the embedding's table.
        loss: What the loss over cut logits receives for one token, in fp32.
    """

    kinds: tuple[_Share, ...]
    ends: Mapping[tuple[bool, bool], _Share]
    table: int
    loss: Traffic


class PretrainedShape:
    """The sizes of a causal language model of transformers, as `predict` takes them.

    Args:
        model: The model, whose values are not read: it may be on the meta device, made from its config alone.
        context: Number of tokens in a row of the batch; None: as many as the model has positions.
        checkpointing: Whether layers keep their input alone, and are computed once more in backward; None: as the model
            is set.
        packed: Whether a row holds several documents, as those of `PackedRows` do. torch's own attention, "sdpa", is
            then given a mask, of which every layer keeps context x context numbers a row.

    Raises:
        TypeError: The model has no list of layers.
        ValueError: The context is below 1, or the model was cut over ranks before.

    Example:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("Qwen/Qwen3-8B"))
        predict(PretrainedShape(model, context=4096), Topology.from_config({}, 8), Job(batch=64, zero=3))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        context: int | None = None,
        checkpointing: bool | None = None,
        packed: bool = False,
    ) -> None:
        self.model = _on_meta(model)
        self._config: Any = self.model.config.get_text_config()
        self.context: int = self._config.max_position_embeddings if context is None else context
        if self.context < 1:
            raise ValueError(f"context is {self.context}; it must be at least 1")
        self.checkpointing = checkpointing is True or (
            checkpointing is None and any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
        )
        self.packed = packed
        self._masked = packed and self.model.config._attn_implementation == "sdpa"
        self._parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        table, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self._table = self._name_of(table.weight)
        self._head = next((name for name, module in self.model.named_modules() if module is head), None)
        self.vocabulary, self.width = (int(size) for size in table.weight.shape)
        self.tied = head is not None and head.weight is table.weight
        self._list = _layers_of(self.model)
        self._kinds = self._kinds_of_layers()
        self._samples = [self._kinds.index(kind) for kind in range(max(self._kinds) + 1)]
        self._ends = self._ends_of_stages()
        self._ranks: dict[Cut, _Rank | str] = {}
        self._kept: dict[Numbers, Mapping[int, Kept]] = {}

    @property
    def layers(self) -> int:
        """Number of layers that pipeline stages can be made of."""
        return len(self._kinds)

    @property
    def parameters(self) -> int:
        """Number of elements in all parameters."""
        return sum(parameter.numel() for parameter in self._parameters.values())

    @property
    def keys(self) -> dict[str, str]:
        """What a remedy calls the sizes: they are the model's, but for the length of rows."""
        return {"heads": "the model", "layers": "layers", "context": "data.context"}

    def describe(self) -> str:
        """The line of a report."""
        return (
            f"{self.parameters:.4g} parameters: {type(self.model).__name__}, {self.layers} layers, width {self.width}, "
            f"{self._config.num_attention_heads} heads, context {self.context}, vocabulary {self.vocabulary}"
            + (", packed rows" if self.packed else "")
            + (", activation checkpointing" if self.checkpointing else "")
        )

    def as_dict(self) -> dict[str, Any]:
        """The sizes as plain values."""
        names = ("layers", "width", "context", "vocabulary", "tied", "packed", "checkpointing", "parameters")
        return {"class": type(self.model).__name__, **{name: getattr(self, name) for name in names}}

    # What a topology leaves of it

    def part(self, pipeline: Pipe, place: Place) -> Part:
        """What a rank of a pipeline has; layers that differ are told apart by their kinds."""
        runs = []
        for stage in place.stages:
            start = sum(stage_size(self.layers, pipeline.stages, before) for before in range(stage))
            kinds = self._kinds[start : start + stage_size(self.layers, pipeline.stages, stage)]
            runs.append(tuple(sorted(Counter(kinds).items())))
        return Part(
            blocks=sum(times for run in runs for _, times in run),
            first=0 in place.stages,
            last=pipeline.stages - 1 in place.stages,
            runs=tuple(runs),
        )

    def misfit(self, cut: Cut, rows: int = 0) -> str | None:
        """Why a tensor mode cannot cut the model, and what to change; None if it can. Rows are never cut."""
        del rows
        if cut.mode not in (None, "1d"):
            return f"tensor mode {cut.label} cuts activations that this model's code takes whole; use mode 1d"
        if cut.sequence and self.context % cut.ranks:
            return (
                f"the context is {self.context} tokens, which sequence parallelism cuts into {cut.ranks} parts; change "
                "one of the two"
            )
        found = self._rank(cut)
        return found if isinstance(found, str) else None

    def not_staged(self) -> str | None:
        """Why the model cannot be cut into pipeline stages, and what to do; None if it can."""
        return self._ends if isinstance(self._ends, str) else None

    def not_cut(self) -> str | None:
        """Why no number of tensor ranks can cut the model, and what to do; None if some can."""
        try:
            cuts(self.model, _alone({"mode": "1d"}, _SMALL[0]))
        except TypeError as error:  # there is no plan
            return str(error)
        except ValueError:  # of these sizes, for these ranks
            return None
        return None

    def tensor_configs(self, size: int, precision: str) -> Iterator[dict[str, Any]]:
        """Mode 1d, with and without sequence parallelism; heads of keys are copied where they are fewer than ranks."""
        del precision
        keys = getattr(self._config, "num_key_value_heads", None)
        copied = {"kv_heads": keys} if isinstance(keys, int) and keys < size and size % keys == 0 else {}
        yield {"mode": "1d", **copied}
        yield {"mode": "1d", "sequence_parallel": True, **copied}

    def count(self, cut: Cut, part: Part) -> Count:
        """The parameters of a rank: what `par_layers.cuts` gives it of the layers and ends that it has."""
        rank = self._known(cut)
        ends, shares = rank.ends[part.first, part.last], _in_runs(part, rank.kinds)
        return Count(
            total=ends.elements + sum(share.elements * times for share, times in shares),
            block=max(share.elements for share, _ in shares),
            blocks=part.blocks,
            ends=ends.elements,
            table=rank.table if part.first or (self.tied and part.last) else 0,
            largest=max(ends.largest, *(share.largest for share, _ in shares)),
            tensors=ends.tensors + sum(share.tensors * times for share, times in shares),
        )

    def activations(self, cut: Cut, numbers: Numbers, pipeline: Pipe, place: Place, tokens: int) -> tuple[float, float]:
        """Bytes that wait for backward, without logits, and the bytes of these."""
        rank, part, kept = self._known(cut), self.part(pipeline, place), self._kept_in(numbers)
        rows = tokens / self.context
        layers = [
            rows * kept[sample].on_rank(cut.ranks, sequence=cut.sequence) + numbers.cast * share.matrices
            for sample, share in zip(self._samples, rank.kinds, strict=True)
        ]
        logits = self._logits(cut, numbers, place, tokens) if part.last else 0.0
        once = 0.0
        if self.checkpointing:  # every layer keeps its input; one of them at a time is computed again, after the loss
            once = max(0.0, max(layers) - logits)
            layers = [tokens / cut.tokens * self.width * numbers.residual] * len(layers)
            if self._masked:  # the mask itself, a byte each, which all layers are given
                once += place.kept * rows * self.context**2
        total = once + place.kept * max(sum(layers[kind] * times for kind, times in run) for run in part.runs)
        if part.first:
            of_ids = tokens if cut.ranks > 1 else 0  # which of them are a cut table's own
            total += place.kept * (rows * kept[-1].whole + of_ids)
        if part.last:
            head = numbers.cast * self.width * math.ceil(self.vocabulary / cut.ranks)
            total += place.kept_last * (rows * kept[self.layers].whole + head)
        return total + kept[-1].fixed, logits

    def _logits(self, cut: Cut, numbers: Numbers, place: Place, tokens: int) -> float:
        """Bytes of logits at the beginning of backward.

        Cut ones are kept as they are; the loss goes back through one gradient in fp32, which it makes of a copy of
        logits in less. Of whole ones a log-softmax in fp32 is kept, and goes back through two gradients, its own and
        theirs.
        """
        copied = 0 if numbers.product == 4 else 4
        kept, gradient = (numbers.product, 4 + copied) if cut.ranks > 1 else (4, 8)
        return tokens * math.ceil(self.vocabulary / cut.ranks) * (place.kept_last * kept + gradient)

    def tensor_traffic(
        self, cut: Cut, numbers: Numbers, part: Part, microbatches: Mapping[int, int], replicas: Replicas
    ) -> list[Move]:
        """What comes over the tensor axis: activations of every microbatch, and partial gradients once a step."""
        if cut.ranks == 1:
            return []
        rank = self._known(cut)
        shares = [*_in_runs(part, rank.kinds), (rank.ends[part.first, part.last], 1)]
        loss = rank.loss if part.last else Traffic()
        a_token = float(loss.elements) * 4 + sum(
            times * float(share.traffic.elements * numbers.product + share.stream.elements * numbers.residual)
            for share, times in shares
        )
        calls = loss.calls + sum((share.traffic + share.stream).calls * times for share, times in shares)
        tokens = sum(size * times for size, times in microbatches.items())
        moves = [
            Move(
                axis="tensor",
                what="activations",
                operations=calls * sum(microbatches.values()),
                bytes=tokens * a_token,
            )
        ]
        partial = sum(share.partial * times for share, times in shares) / (replicas.ranks if replicas.zero else 1)
        if partial:
            sums = len({axes for share, _ in shares for axes in share.axes})
            moves.append(Move(axis="tensor", what="partial gradients", operations=sums, bytes=partial * numbers.master))
        return moves

    def flops(self, part: Part) -> float:
        """Floating-point operations for one token in forward and backward; of experts, those that it goes to.

        In forward a matrix takes two operations for each of its elements; backward takes twice as many as forward.
        Attention is causal, so that half of its products are computed.
        """
        block = sum(self._flops_of_layer(kind) * times for run in part.runs for kind, times in run)
        return 3.0 * (block + (2 * self.width * self.vocabulary if part.last and self._head is not None else 0))

    def _flops_of_layer(self, kind: int) -> float:
        config, total = self._config, 0.0
        for name in self._in_layer(self._samples[kind]):
            shape = self._parameters[name].shape
            if len(shape) == 3:  # the weights of all experts
                total += 2 * shape.numel() * self._experts_per_token / shape[0]
            elif len(shape) == 2:
                total += 2 * shape.numel()
        heads: int = config.num_attention_heads
        head: int = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or self.width // heads
        return total + 2 * self.context * heads * head

    # The model's own structure

    @property
    def _experts_per_token(self) -> int:
        return getattr(self._config, "num_experts_per_tok", None) or 1

    def _name_of(self, parameter: nn.Parameter) -> str:
        return next(name for name, own in self._parameters.items() if own is parameter)

    def _in_layer(self, number: int) -> list[str]:
        """The names of the parameters of a layer."""
        return [name for name in self._parameters if name.startswith(f"{self._list}.{number}.")]

    def _kinds_of_layers(self) -> list[int]:
        """The kind of every layer: alike are those whose parameters have the same names and shapes, but for both ends.

        The first and the last one are kinds of their own: under sequence parallelism they cut and gather.
        """
        count = len(self.model.get_submodule(self._list))
        contents: list[list[tuple[str, torch.Size]]] = [[] for _ in range(count)]
        for name, parameter in self._parameters.items():
            if name.startswith(f"{self._list}."):
                number, _, rest = name.removeprefix(f"{self._list}.").partition(".")
                contents[int(number)].append((rest, parameter.shape))
        known: dict[Any, int] = {}
        return [
            known.setdefault((tuple(content), number == 0, number == count - 1), len(known))
            for number, content in enumerate(contents)
        ]

    def _ends_of_stages(self) -> dict[str, frozenset[str]] | str:
        """The names of the parameters outside of the layers that the first, a middle and the last stage have."""
        stages = min(3, self.layers)
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        found: list[frozenset[str]] = []
        try:
            for rank in range(stages):
                (stage,) = build_stage(self.model, schedule("1f1b", stages, stages), rank)
                own = {names[id(parameter)] for parameter in stage.parameters()}
                found.append(frozenset(name for name in own if not name.startswith(f"{self._list}.")))
        except TypeError as error:
            return str(error)
        middle = found[1] if stages == 3 else found[0] & found[-1]
        return {"first": found[0], "middle": middle, "last": found[-1]}

    def _kept_in(self, numbers: Numbers) -> Mapping[int, Kept]:
        """What autograd keeps, by number of the layer."""
        if numbers not in self._kept:
            self._kept[numbers] = kept_of(
                self.model,
                self._roles(),
                self.context,
                numbers,
                self._experts_per_token,
                packed=self.packed,
                masked=self._masked,
            )
        return self._kept[numbers]

    def _roles(self) -> Roles:
        """What the plan makes of the modules; nothing without a plan."""
        records: Mapping[str, Sharding] = {}
        for ranks in _SMALL:
            try:
                records = cuts(self.model, _alone({"mode": "1d"}, ranks))
                break
            except (TypeError, ValueError):
                continue
        columns, rows, experts = set[str](), set[str](), set[str]()
        for name, record in records.items():
            module, _, own = name.rpartition(".")
            size = record.boxes[0].size
            is_cut = [length < whole for length, whole in zip(size, record.shape, strict=True)]
            if module == self._head or name == self._table or own == "bias" or not any(is_cut):
                continue
            if len(size) == 3:
                experts.add(module)
            elif len(size) == 2:
                turned = type(self.model.get_submodule(module)).__name__ == "Conv1D"
                (columns if is_cut[0] != turned else rows).add(module)
        blocks = frozenset(name.rpartition(".")[0] for name in experts)
        packed = frozenset(name.rpartition(".")[0] for name, each in self._parameters.items() if each.dim() == 3)
        return Roles(self._list, frozenset(columns), frozenset(rows), blocks, packed)

    def _known(self, cut: Cut) -> _Rank:
        found = self._rank(cut)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _rank(self, cut: Cut) -> _Rank | str:
        """What a rank has under a cut, or why it cannot be cut so."""
        if cut not in self._ranks:
            self._ranks[cut] = self._look(cut)
        return self._ranks[cut]

    def _look(self, cut: Cut) -> _Rank | str:
        records: Mapping[str, Sharding] = {}
        traffic: Mapping[str, Traffic] = {}
        topology = Topology({})
        if cut.ranks > 1:
            keys = {"kv_heads": dict(cut.axes)["kv_head"]} if "kv_head" in dict(cut.axes) else {}
            topology = _alone({"mode": "1d", "sequence_parallel": cut.sequence, **keys}, cut.ranks)
            try:
                records, traffic = cuts(self.model, topology), costs(self.model, topology, 1)
            except (TypeError, ValueError) as error:
                return str(error)
        shapes = {name: _sizes(record) for name, record in records.items()}
        shapes = shapes or {name: [tuple(parameter.shape)] for name, parameter in self._parameters.items()}

        kinds = (nn.Linear, import_module("transformers.pytorch_utils").Conv1D)
        linears = {name for name, module in self.model.named_modules() if isinstance(module, kinds)}

        def share(names: Collection[str], modules: tuple[str, ...]) -> _Share:
            sizes = {name: sum(map(math.prod, shapes[name])) for name in names}
            own = [name for name in traffic if _is_inside(name, modules)]
            partial = [
                (box.sum_over, 2 * (1 - 1 / topology.size(box.sum_over)) * math.prod(box.size))
                for name in names
                if name in records
                for box in records[name].boxes
                if box.sum_over
            ]
            return _Share(
                elements=sum(sizes.values()),
                matrices=sum(size for name, size in sizes.items() if self._parameters[name].dim() > 1),
                largest=max(sizes.values(), default=0),
                tensors=len(sizes),
                partial=sum(elements for _, elements in partial),
                axes=frozenset(axes for axes, _ in partial),
                traffic=sum((traffic[name] for name in own if name in linears), Traffic()),
                stream=sum((traffic[name] for name in own if name not in linears), Traffic()),
            )

        outside = frozenset(name for name in self._parameters if not name.startswith(f"{self._list}."))
        of_stages = self._ends if isinstance(self._ends, dict) else dict.fromkeys(("first", "middle", "last"), outside)
        embedding, head = self._table.rpartition(".")[0], (() if self._head is None else (self._head,))
        return _Rank(
            kinds=tuple(share(self._in_layer(number), (f"{self._list}.{number}",)) for number in self._samples),
            ends={
                (False, False): share(of_stages["middle"], ()),
                (True, False): share(of_stages["first"], (embedding,)),
                (False, True): share(of_stages["last"], head),
                (True, True): share(outside, (embedding, *head)),
            },
            table=sum(map(math.prod, shapes[self._table])),
            loss=traffic.get("", Traffic()),
        )


def _in_runs(part: Part, shares: tuple[_Share, ...]) -> list[tuple[_Share, int]]:
    """The shares of all layers of a rank, and how many layers are of each."""
    return [(shares[kind], times) for run in part.runs for kind, times in run]


def _is_inside(name: str, modules: tuple[str, ...]) -> bool:
    """Whether a name is that of one of these modules, or of one within."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _sizes(record: Sharding) -> list[tuple[int, ...]]:
    """The shapes of what the first rank has, which has no padding, and so as much as any other."""
    return [box.size for box in record.boxes]


def _alone(tensor: Mapping[str, Any], ranks: int) -> Topology:
    """A world of one tensor group."""
    return Topology.from_config({"tensor": {"size": ranks, **tensor}}, ranks)


def _layers_of(model: nn.Module) -> str:
    """The name of the list of layers: the nn.ModuleList that has most of the parameters.

    Raises:
        TypeError: There is none.
    """
    sizes: dict[str, int] = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    if not sizes or not max(sizes.values()):
        raise TypeError(
            f"{type(model).__name__} has no nn.ModuleList of layers, whose activations could be counted one by one; "
            "give predict() a par_train.Shape with its sizes"
        )
    return max(sizes, key=lambda name: sizes[name])


def _on_meta(model: nn.Module) -> Any:
    """A copy of a model on the meta device, of which nothing is read.

    Raises:
        ValueError: Its parameters are parts.
    """
    kept: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "par_sharding"):
            raise ValueError(f"{name!r} was cut over ranks already; plan the whole model, before it is cut")
        data = torch.empty_like(parameter, device="meta")
        kept[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        kept[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, kept)
