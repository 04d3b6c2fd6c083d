"""Layers of a Hugging Face Transformers model, modules outside them, and modules that a plan shards."""

import copy
import warnings
from collections.abc import Collection, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import nn

from par_groups import Sharding, Topology, attributes
from par_layers import CommunicationVolume, communication_volumes, plan_shardings
from par_pipeline import build_stage, schedule

from ...experts.mixture import Mixture
from ...experts.spread import ExpertPlacement
from .kept import TensorRoles

SMALL = (2, 3, 5, 7, 11, 13)
"""Numbers of ranks by which a plan is looked at: what it cuts is the same for all that divide."""


class Structure:
    """Model on the meta device, described by the names of its parameters and layers.

    Args:
        model: Model; its values are not read.

    Attributes:
        model: A copy on the meta device.
        config: Config of the model, or of the text part of a multimodal model.
        parameters: Parameters by name.
        table: The name of the embedding's table.
        head: The name of the module that gives logits, or None.
        layers: The name of the list of layers.
        kinds: The kind of every layer.
        samples: First layer of each kind, by kind.
        sampled: Model with only these layers, under their original names; it answers the same questions in less time.
        ends: Names of the parameters outside of the layers on the first, a middle and the last stage; or the reason why
            the model cannot be split into stages.

    Raises:
        TypeError: The model has no list of layers.
        ValueError: The model is already sharded over ranks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = _on_meta(model)
        self.config: Any = self.model.config.get_text_config()
        self.parameters: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        # Transformers declares these two for every family, whatever their names are.
        table, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        self.table = next(name for name, parameter in self.parameters.items() if parameter is table.weight)
        self.head = next((name for name, module in self.model.named_modules() if module is head), None)
        self.vocabulary, self.width = (int(size) for size in table.weight.shape)
        self.tied = head is not None and head.weight is table.weight
        self.layers = _layers_of(self.model)
        self.kinds = self._kinds_of_layers()
        self.samples = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
        self.ends = self._ends_of_stages()
        self.sampled = self._with_samples_alone()

    @property
    def experts_per_token(self) -> int:
        """Number of experts that a token goes to."""
        return getattr(self.config, "num_experts_per_tok", None) or 1

    @cached_property
    def packed(self) -> frozenset[str]:
        """The names of the modules with the packed weights of experts."""
        modules = {name.rpartition(".")[0] for name, each in self.parameters.items() if each.dim() == 3}
        # The weights of short convolutions have three dims, too.
        return frozenset(name for name in modules if not isinstance(self.model.get_submodule(name), nn.Conv1d))

    @cached_property
    def experts(self) -> frozenset[str]:
        """The names of the parameters of experts."""
        return frozenset(name for name in self.parameters if name.rpartition(".")[0] in self.packed)

    @cached_property
    def mixture(self) -> Mixture | None:
        """The layers of experts, by the first of them; None if there are none.

        Shared experts count as dense layers, because they do not overlap with dispatch.
        """
        if not self.packed:
            return None
        module = next(name for name, _ in self.model.named_modules() if name in self.packed)
        own = [each for each in self.model.get_submodule(module).parameters(recurse=False) if each.dim() == 3]
        experts, total = own[0].shape[0], sum(each.numel() for each in own)
        # Transformers declares the output weight of experts last.
        down = own[-1].numel()
        return Mixture(
            hidden=self.width,
            intermediate=down // (experts * self.width),
            experts=experts,
            top_k=self.experts_per_token,
            # With a gate, the input weights are twice as large as the output weight.
            gated=total == 3 * down,
        )

    @cached_property
    def of_samples(self) -> tuple[tuple[str, ...], ...]:
        """Names of the parameters of each kind's sample layer."""
        return tuple(
            tuple(name for name in self.parameters if name.startswith(f"{self.layers}.{number}."))
            for number in self.samples
        )

    @cached_property
    def items(self) -> Mapping[str, str]:
        """Names of the modules outside the layers that par-zero makes units of, by the name of each parameter.

        These are the outermost items of containers, such as the blocks of an encoder of images.
        """
        modules, kinds = self.model.named_modules(remove_duplicate=False), (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        containers = {name for name, module in modules if isinstance(module, kinds)}
        found: dict[str, str] = {}
        for name in self.parameters:
            parts = name.split(".")
            around = [".".join(parts[:length]) for length in range(1, len(parts))]
            item = next((one for one in around if one.rpartition(".")[0] in containers), None)
            if item is not None and not name.startswith(f"{self.layers}."):
                found[name] = item
        return found

    @cached_property
    def have_experts(self) -> tuple[bool, ...]:
        """Whether each kind of layer has experts."""
        return tuple(any(name in self.experts for name in names) for names in self.of_samples)

    def _with_samples_alone(self) -> Any:
        """Return a copy of the model with only the sampled layers, which keep their numbers."""
        # `deepcopy` takes objects in its memo as they are, so the copy shares all tensors.
        kept = {id(each): each for each in (*self.model.parameters(), *self.model.buffers())}
        sampled = copy.deepcopy(self.model, kept)
        layers = sampled.get_submodule(self.layers)
        for number in {*range(len(self.kinds))}.difference(self.samples):
            delattr(layers, str(number))
        return sampled

    def _kinds_of_layers(self) -> list[int]:
        """Return the kind of every layer; layers of one kind have identical parameter names and shapes.

        Layers with different `layer_types` in the config, such as full and sliding attention, are different kinds, too.
        The first and the last layer are separate kinds, because under sequence parallelism the first layer splits the
        sequence and the last layer gathers it.
        """
        count = len(self.model.get_submodule(self.layers))
        contents: list[list[tuple[str, torch.Size]]] = [[] for _ in range(count)]
        for name, parameter in self.parameters.items():
            if name.startswith(f"{self.layers}."):
                number, _, rest = name.removeprefix(f"{self.layers}.").partition(".")
                contents[int(number)].append((rest, parameter.shape))
        known: dict[Any, int] = {}
        sees = getattr(self.config, "layer_types", None) or [None] * count
        return [
            known.setdefault((tuple(content), sees[number], number == 0, number == count - 1), len(known))
            for number, content in enumerate(contents)
        ]

    def _ends_of_stages(self) -> dict[str, frozenset[str]] | str:
        """Return parameter names outside the layers for the first, a middle and the last stage.

        If the model cannot be split into stages, return the reason as text.
        """
        # Three stages show all cases: the first, a middle and the last one.
        stages = min(3, len(self.kinds))
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        found: list[frozenset[str]] = []
        try:
            for rank in range(stages):
                (stage,) = build_stage(self.model, schedule("1f1b", stages, stages), rank)
                own = {names[id(parameter)] for parameter in stage.parameters()}
                found.append(frozenset(name for name in own if not name.startswith(f"{self.layers}.")))
        except TypeError as error:
            return str(error)
        # With two stages, parameters outside the layers that both have would be on every stage.
        middle = found[1] if stages == 3 else found[0] & found[-1]
        return {"first": found[0], "middle": middle, "last": found[-1]}

    @cached_property
    def roles(self) -> TensorRoles:
        """Roles of the modules under the plan; empty without a plan."""
        records: Mapping[str, Sharding] = {}
        volumes: Mapping[str, CommunicationVolume] = {}
        ranks = SMALL[0]
        for ranks in SMALL:
            try:
                records, volumes = self._planned(alone({"mode": "1d"}, ranks))
                break
            except (TypeError, ValueError):
                continue
        columns, rows, experts = set[str](), set[str](), set[str]()
        for name, record in records.items():
            module, _, own = name.rpartition(".")
            size = record.boxes[0].size
            is_cut = [length < whole for length, whole in zip(size, record.shape, strict=True)]
            if module == self.head or name == self.table or own == "bias" or not any(is_cut):
                continue
            if module in self.packed:
                experts.add(module)
            elif len(size) == 2:
                # GPT-2 stores the weights of its Conv1D transposed, so sharded rows and columns change places.
                turned = type(self.model.get_submodule(module)).__name__ == "Conv1D"
                is_column = is_cut[0] != turned
                out, inner = reversed(record.shape) if turned else record.shape
                found = volumes.get(module)
                # A column whose output is gathered opens no region: what follows it is whole.
                if is_column and found is not None and found.elements == Fraction(ranks - 1, ranks) * (2 * inner + out):
                    continue
                (columns if is_column else rows).add(module)
        blocks = frozenset(name.rpartition(".")[0] for name in experts) | self._gathered(columns, ranks)
        return TensorRoles(self.layers, frozenset(columns), frozenset(rows), blocks, self.packed)

    def _planned(self, topology: Topology) -> tuple[Mapping[str, Sharding], Mapping[str, CommunicationVolume]]:
        """Return the sharding of each parameter, and the traffic of each module for one token."""
        with warnings.catch_warnings():
            # A plan without layers matters only to jobs with tensor ranks, which look at the plan again.
            warnings.filterwarnings("ignore", ".* shards no layer", UserWarning)
            experts = self.experts_per_token
            return (
                plan_shardings(self.model, topology),
                communication_volumes(self.model, topology, 1, experts_per_token=experts),
            )

    def _gathered(self, columns: Collection[str], ranks: int) -> frozenset[str]:
        """Return the modules in layers that get the gathered sequence under sequence parallelism, without any rule.

        Args:
            columns: Linears that open a region.
            ranks: Number of ranks by which the plan is looked at.
        """
        topology = alone({"mode": "1d", "sequence_parallel": True}, ranks)
        try:
            _, names = self._planned(topology)
        except (TypeError, ValueError):  # the sequence cannot be split, or the model has no plan
            return frozenset()
        regions = {name.rpartition(".")[0] for name in columns}
        inside = (name for name in names if name.rpartition(".")[0].startswith(f"{self.layers}."))
        return frozenset(
            name for name in inside if name not in regions and any(self.model.get_submodule(name).children())
        )


def alone(tensor: Mapping[str, Any], ranks: int, spread: ExpertPlacement | None = None) -> Topology:
    """Return a topology with one tensor group.

    Args:
        tensor: Tensor mode and its options.
        ranks: Number of ranks of the tensor group.
        spread: Placement of experts, with all experts on one rank; None means no placement.
    """
    dealt = spread is not None and spread.is_dealt
    expert = {"expert": {"size": 1, "tensor": spread.tensor}} if spread is not None and dealt else {}
    return Topology.from_config({"tensor": {"size": ranks, **tensor}, **expert}, ranks)


def _layers_of(model: nn.Module) -> str:
    """Return the name of the list of layers: the nn.ModuleList with most parameters, next to the embedding's table.

    The encoder of images of a small vision-language model may have more.

    Raises:
        TypeError: There is none.
    """
    sizes: dict[str, int] = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    table = model.get_input_embeddings()  # type: ignore[operator]  # of transformers
    around = next(name for name, module in model.named_modules() if module is table).rpartition(".")[0]
    of_text = {name: size for name, size in sizes.items() if size and name.startswith(f"{around}.".lstrip("."))}
    sizes = of_text or sizes
    if not sizes or not max(sizes.values()):
        raise TypeError(
            f"{type(model).__name__} has no nn.ModuleList of layers, whose activations could be counted one by one; "
            "give predict() a par_plan.Shape with its sizes"
        )
    return max(sizes, key=lambda name: sizes[name])


def _on_meta(model: nn.Module) -> Any:
    """Return a copy of a model on the meta device, without reading its values.

    Raises:
        ValueError: Its parameters are parts.
    """
    kept: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if attributes.SHARDING.is_on(parameter):
            raise ValueError(f"{name!r} is sharded already; plan the model before it is sharded")
        data = torch.empty_like(parameter, device="meta")
        kept[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        kept[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, kept)
