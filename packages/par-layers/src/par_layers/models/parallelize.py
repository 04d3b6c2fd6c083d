"""Tensor parallelism for an existing model: shard it in place over the tensor ranks, without a change of its code."""

import hashlib
import inspect
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from par_groups import Collective, ProcessGroups, Sharding, Topology, agree, attributes, check_alike, check_collectives

from .._layer_set import LayerSet, layer_set
from ..context.context import Context
from ..layers.parallel_layer import RECORDS_OF_MODULE, ParallelLayer
from ..modes.grid import EXPERTS
from ..modes.layout import ActivationLayout
from ..modes.rules import ParallelMatmul
from .adapters import adopt_magnitudes_, base_model, check_kind, replicate_prompts_, wrapper_around
from .counts import LocalConfig
from .cutting import ShardingRecords, keep_part_, make_alike_
from .dropout import AdoptedDropout, SameDraws, adopt_dropout_, has_dropout
from .generation import Generation
from .guards import ModelEntry, RequestedOutputs, check_whole, guard_
from .hooks import CutExperts, CutFeatures, LatentOutput, PartialOutput, ShardedVocabularyHook, SharedExpert
from .lanes.gradients import make_gradients_exact_
from .lanes.plan import in_lanes
from .linear import AdoptedColumn, AdoptedRow, GatheredLogits, RegionEntry, adopt_linear_
from .loss import AdoptedLoss, VocabularyLoss, shifts_labels
from .packed.forward import DealtForward, deal_
from .packed.routed import RoutedForward
from .parallel import KEPT_AS, LogitsLayout, Parallelization, parallelization_of, table_of
from .plans import families  # noqa: F401 - registers its plans
from .plans.plans import Plan, names_around, resolve
from .plans.styles import (
    ColumnParallel,
    EmbeddingParallel,
    ExpertTensorParallel,
    IdentityExpert,
    LatentProjection,
    RowParallel,
    SummedOutput,
)
from .proof import Proof
from .regions import FirstLayer, FullSequenceBlock, LastLayer, Region
from .sequence import Begins, CutSequence
from .survey.kinds import is_conv1d
from .survey.survey import RegionPlan, Survey, deals_experts, survey, survey_planned, tensor_axes

M = TypeVar("M", bound=nn.Module)


def parallelize(
    model: M,
    groups: ProcessGroups | LayerSet,
    plan: str | Plan = "auto",
    *,
    logits: LogitsLayout = "auto",
) -> M:
    """Shard an existing model over the tensor ranks, in place and in mode 1d. The model's code runs unchanged.

    Every parameter keeps its identity and its name, and holds this rank's shard with its sharding metadata. Outputs,
    loss, gradients and generated tokens equal one device's. Call `PartialGradientReducer(model, groups)` once a step:
    it sums the gradients of replicated parameters that are used inside sharded regions. A second call with the same
    groups and plan changes nothing. If the topology also splits sequences, call `Context.transformers_` first;
    `parallelize` then shards the model within each sequence rank.

    Args:
        model: A Hugging Face Transformers model or any module, on the CPU, an accelerator or the meta device. A
            PeftModel works too: the LoRA adapters around its linears are sharded with them.
        groups: The live groups, whose topology specifies the tensor ranks; or a layer set of mode 1d.
        plan: Rules by pattern, such as `{"layers.*.mlp.up": "colwise"}`, in which `*` matches a number. "auto" uses the
            plan that is registered for the family of a Transformers model, or else the model's own plan.
        logits: "sharded" leaves logits sharded over the vocabulary, and "full" gathers them. "auto" gathers them too,
            except in training with labels: the loss then is computed over the ranks, and the logits of the output are
            gathered when you read them, on all tensor ranks. A forward of a model whose code computes a loss from
            sharded logits itself raises an error.

    Returns:
        The model.

    Raises:
        TypeError: The model has no plan, a rule does not fit its module, the model is already sharded by another
            library, or its sequence cannot be split.
        ValueError: A rule of the plan is wrong, a size does not divide by the ranks, or the mode is not 1d. Or the
            sequence is split over ranks that the model's attention does not include, the model was sharded over other
            groups, ranks passed different plans, or the backend of their group lacks a collective. Every rank raises
            before anything changes.

    Example:
        model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
        parallelize(model, groups)
        loss = model(input_ids=ids, labels=ids).loss
    """
    layers = groups if isinstance(groups, LayerSet) else layer_set("auto", groups)
    grid, rules = layers.grid, layers.rules
    inner = base_model(model)
    problem: Exception | None = None
    found: Survey | None = None
    digest = ""
    try:
        if layers.mode not in (None, "1d"):
            raise ValueError(
                f"mode {layers.mode!r} splits activations that this model's code needs in full; use mode='1d'"
            )
        if rules.residual.context:
            _check_context(inner, grid.size(rules.residual.context))
        if logits not in ("auto", "full", "sharded"):
            raise ValueError(f"logits={logits!r}: unknown layout; pass 'auto', 'full' or 'sharded'")
        before = parallelization_of(inner)
        if before is None:
            check_kind(model)
            check_whole(inner)
            ways: dict[str, Any] = {"shares_inputs": not rules.lanes.in_layers, "expert_lanes": rules.expert_lanes}
            found = survey(inner, plan, grid, sequence=bool(rules.residual.sequence), **ways)
            if rules.lanes.in_layers:
                found = in_lanes(found, dict(inner.named_modules(remove_duplicate=False)), rules.lanes)
            digest = _digest(inner, found, logits)
        else:
            digest = _again(inner, before, layers, plan, logits)
    except (TypeError, ValueError) as error:
        problem = error
    axes = tensor_axes(grid)
    needed = _needed(layers, found)
    check_alike(agree(problem, digest, *needed), "plans or models to cut", show=False)
    if found is not None and grid.groups is not None:
        for group, collectives in needed.items():
            check_collectives(group, grid.groups.device, collectives, "parallelize")
    if found is not None:
        if axes and grid.groups is not None:
            make_alike_(model, grid.group(axes), grid.groups.device)
        _Adoption(inner, layers, found, logits, digest).apply()
        if inner is not model and (axes or found.experts):
            replicate_prompts_(model, grid)
            guard_(model, sharded_logits=logits == "sharded")
    return model


def plan_shardings(
    model: nn.Module, topology: Topology, rank: int = 0, plan: str | Plan = "auto"
) -> dict[str, Sharding]:
    """Return how `parallelize` will shard each parameter. Pure: it needs no live groups and changes nothing.

    Args:
        model: The unsharded model, which may be on the meta device.
        topology: The topology, whose tensor mode is 1d.
        rank: Global rank.
        plan: Rules by pattern, or "auto".

    Raises:
        TypeError: The model has no plan, or a rule does not fit its module.
        ValueError: A rule of the plan is wrong, a size does not divide by the ranks, or the mode is not 1d.
    """
    return {name: part.sharding for name, part in survey_planned(model, topology, rank, plan).parts.items()}


def _needed(layers: LayerSet, found: Survey | None) -> dict[dist.ProcessGroup, list[Collective]]:
    """Return the collectives that a sharded model needs, by group."""
    grid, axes = layers.grid, tensor_axes(layers.grid)
    needed: dict[dist.ProcessGroup, list[Collective]] = {}
    if axes:
        needed[grid.group(axes)] = ["all_reduce", "all_gather", "broadcast"]
        if found is not None and found.layers is not None:  # activations are cut along the sequence
            needed[grid.group(axes)].append("reduce_scatter")
        if layers.rules.lanes.in_layers:  # trees over the ranks
            needed[grid.group(axes)].append("all_to_all")
    if deals_experts(grid) and (of_experts := grid.seen_as(EXPERTS)).size(("expert_parallel",)) > 1:
        needed.setdefault(of_experts.group(("expert_parallel",)), []).append("all_to_all")
    return needed


def _check_context(model: nn.Module, ranks: int) -> None:
    """Raise unless a model's attention covers all ranks of its sequence.

    Args:
        model: The model.
        ranks: Number of ranks that the sequence is split over.

    Raises:
        ValueError: No module has a context over these ranks as an attribute, or a dropout is active.
    """
    if not any(
        isinstance(x, Context) and x.ranks == ranks for module in model.modules() for x in vars(module).values()
    ):
        raise ValueError(
            f"the sequence is split over {ranks} ranks, but attention of this model would only see a rank's own "
            "tokens; call context.transformers_(model) first, or keep the Context as an attribute of the module that "
            "attends with it, or give the ranks of 'sequence' to data, tensor or pipeline"
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0.0:
            raise ValueError(
                f"{name!r} drops a part of {module.p} of its input, and each of the {ranks} ranks of a sequence would "
                "drop the same places of its own tokens; set it to 0"
            )


def _again(model: nn.Module, before: Parallelization, layers: LayerSet, plan: str | Plan, logits: LogitsLayout) -> str:
    """Return the digest of the first call, after a check that the second call requests the same.

    Raises:
        ValueError: The second call differs in the topology, the logits, the parameters or the plan.
    """
    if before.layers.grid.topology != layers.grid.topology:
        raise ValueError(
            f"this model is already sharded over {before.layers.grid.topology}, not over {layers.grid.topology}; "
            "make a new model, and shard it once"
        )
    if logits != before.logits:
        raise ValueError(f"this model was cut with logits={before.logits!r}, not {logits!r}; make it anew")
    for name, parameter in model.named_parameters():
        if not attributes.SHARDING.is_on(parameter):
            raise ValueError(
                f"parameter {name!r} was added after this model was sharded; make a new model with it, and shard that"
            )
    experts = deals_experts(layers.grid) or layers.rules.expert_lanes is not None
    if resolve(model, plan, experts=experts).rules != before.plan:
        raise ValueError("this model was cut by another plan, which parallelization_of(model).plan has; make it anew")
    return before.digest


def _digest(model: nn.Module, found: Survey, logits: LogitsLayout) -> str:
    """Return a hash of everything that must be identical on all ranks: shapes, dtypes, rules and the logits' layout."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    shapes = [(name, tuple(each.shape), str(each.dtype), each.is_meta) for name, each in tensors]
    text = repr((shapes, sorted((name, repr(style)) for name, style in found.resolved.rules.items()), logits))
    return hashlib.sha256(text.encode()).hexdigest()


class _Adoption:
    """Application of a survey to a model: keeps this rank's shards, converts modules and registers hooks.

    Args:
        model: The model.
        layers: The layer set.
        found: The survey.
        logits: Whether logits stay sharded.
        digest: Hash that all ranks agreed on.
    """

    def __init__(self, model: nn.Module, layers: LayerSet, found: Survey, logits: LogitsLayout, digest: str) -> None:
        self.model, self.layers, self.found, self.logits, self.digest = model, layers, found, logits, digest
        self.grid, self.axes = layers.grid, tensor_axes(layers.grid)
        # Products in lanes differ from torch's on one rank, too.
        self.converts = bool(self.axes) or layers.rules.lanes.in_layers
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.sequence = CutSequence()

    def _sequence_at(self, name: str) -> CutSequence | None:
        """Return the object that reports whether activations around a module are split; None if they never are."""
        return self.sequence if self.found.is_cut_along_sequence(name) else None

    def apply(self) -> None:
        gives_logits = self._head()
        vocabulary = None if gives_logits is None else self._classes(gives_logits)
        for name, parameter in self.model.named_parameters():
            keep_part_(parameter, self.found.parts[name])
        regions = {name: self._region(name, region) for name, region in self.found.regions.items()}
        head = GatheredLogits(self.logits == "sharded") if vocabulary is not None else None
        if self.converts:
            self._adopt_modules(regions, gives_logits, head)
        if self.layers.rules.lanes.in_layers:
            make_gradients_exact_(self.modules, self.found, self.grid, self.axes, self.layers.rules)
        if self.axes:
            self._cut_the_sequence()
            for name, region in self.found.regions.items():
                self._set_counts(self.modules[name], region)
            for name, wrapper in self.found.wrappers.items():
                adopt_magnitudes_(self.modules, wrapper, self.found.rules[name], self.grid, self.axes)
        for name, experts in self.found.experts.items():
            block = self._routed(name)
            deal_(DealtForward(self.modules[name], experts, self.grid.seen_as(EXPERTS), self.axes, name, block))
        self._begin_and_end(regions)
        self._adopt_dropouts(regions)
        drops = (has_dropout(each) or isinstance(each, AdoptedDropout) for each in self.model.modules())
        if self.axes and any(drops):
            self.model.register_forward_pre_hook(SameDraws(self.grid, self.axes).before)
        for module in self.model.modules():
            if module._parameters and not isinstance(module, ParallelLayer):
                module.__dict__[RECORDS_OF_MODULE] = ShardingRecords(module._parameters)
        self._adopt_ends(vocabulary, head)

    def _head(self) -> str | None:
        """Return the name of the module that computes logits: the output embedding, or the only gathered Column."""
        rules = self.found.rules
        gathered = [name for name, style in rules.items() if isinstance(style, ColumnParallel) and style.gather]
        return self.found.head or (gathered[0] if len(gathered) == 1 else None)

    def _classes(self, head: str) -> int:
        """Return the number of classes of the logits."""
        weight: Any = self.modules[head].weight
        return int(weight.shape[1 if is_conv1d(self.modules[head]) else 0])

    # Modules

    def _adopt_modules(self, regions: dict[str, Region], gives_logits: str | None, head: GatheredLogits | None) -> None:
        """Convert each module that has a rule, or register the hooks of its rule."""
        adopted: set[int] = set()
        rules = self.layers.rules
        column = replace(rules.column_product, sequence=False)  # type: ignore[type-var]  # of mode 1d
        rows = tuple(replace(rules.row_product, sequence=cut) for cut in (False, True))  # type: ignore[type-var]
        for name, style in self.found.rules.items():
            module = self.modules.get(name)
            if module is None or id(module) in adopted or name in self.found.wrappers:
                continue
            adopted.add(id(module))
            region = regions.get(self.found.region_around(name))
            if isinstance(style, ColumnParallel):
                adopt_linear_(
                    module,
                    AdoptedColumn,
                    self.grid,
                    self.axes,
                    transposed=is_conv1d(module),
                    product=self._product(name, style, column, region),
                    region=region,
                    gather=style.gather and bool(self.axes),
                    logits=head if gives_logits is not None and module is self.modules[gives_logits] else None,
                )
            elif isinstance(style, RowParallel):
                adopt_linear_(
                    module,
                    AdoptedRow,
                    self.grid,
                    self.axes,
                    transposed=is_conv1d(module),
                    split=style.split and bool(self.axes),
                    products=rows,
                    sequence=self._sequence_at(name),
                    region=region,
                )
            elif not self.axes:
                continue
            elif isinstance(style, EmbeddingParallel):
                self._adopt_embedding(module, style)
            elif (isinstance(style, ExpertTensorParallel) and name not in self.found.experts) or (
                isinstance(style, SummedOutput) and style.copies
            ):
                experts = CutExperts(self.grid, self.axes)
                module.register_forward_pre_hook(experts.before, with_kwargs=True)
                module.register_forward_hook(experts.after)
            elif isinstance(style, IdentityExpert):
                module.register_forward_pre_hook(SharedExpert(self.grid, self.axes).before)
            elif isinstance(style, SummedOutput):
                module.register_forward_hook(PartialOutput(self.grid, self.axes).after)
            elif isinstance(style, LatentProjection):
                module.register_forward_hook(LatentOutput(self.grid, self.axes, style.around).after)

    def _product(
        self, name: str, style: ColumnParallel, column: ParallelMatmul, region: Region | None
    ) -> ParallelMatmul:
        """Return the matmul of a Column: that of its region, if the region copies the input for all its Columns."""
        if region is not None and region.entry is not None:
            return region.entry.product
        weight: Any = self.modules[name].weight
        local = weight.shape[1 if is_conv1d(self.modules[name]) else 0]
        blocks = style.blocks if isinstance(style.blocks, tuple) else (1,) * style.blocks
        return self.layers.rules.of_runs(column, tuple(block * local // sum(blocks) for block in blocks))

    def _adopt_embedding(self, module: nn.Module, style: EmbeddingParallel) -> None:
        if style.features:
            module.register_forward_hook(CutFeatures(self.grid, self.axes).after)
            return
        embedding: Any = module
        cut = ShardedVocabularyHook(self.grid, self.axes, embedding.num_embeddings, embedding.weight.shape[0])
        if embedding.padding_idx is not None:
            local = embedding.padding_idx - cut.first
            embedding.padding_idx = local if 0 <= local < cut.rows else None
        module.register_forward_pre_hook(cut.before)
        module.register_forward_hook(cut.after)

    def _routed(self, name: str) -> RoutedForward | None:
        """Replace the forward of the block around packed experts, and return it; None without such a block."""
        containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
        around = next((each for each in names_around(name) if not isinstance(self.modules[each], containers)), None)
        if around is None:
            return None
        block = vars(self.modules[around]).get("forward")
        if not isinstance(block, RoutedForward):
            block = RoutedForward(self.modules[around], around)
            self.modules[around].__dict__["forward"] = block
        return block

    # Regions

    def _region(self, name: str, plan: RegionPlan) -> Region:
        entry = RegionEntry(self.grid, self.axes) if self.axes and self.found.has_entry(name) else None
        inner = plan.heads and has_dropout(self.modules[name])
        watched = self.axes and (entry is not None or not plan.closed)
        return Region(
            self.grid,
            self.axes,
            name,
            entry=entry,
            sequence=self._sequence_at(name),
            inner_dropout=inner,
            proof=Proof(name, closed=entry is not None) if watched else None,
        )

    def _begin_and_end(self, regions: dict[str, Region]) -> None:
        for name, region in regions.items():
            module = self.modules[name]
            drops = region.inner_dropout or any(isinstance(child, nn.Dropout) for child in module.modules())
            gathers = region.sequence is not None and bool(self.axes)
            if region.entry is None and region.proof is None and not gathers and not drops:
                continue
            module.register_forward_pre_hook(region.before, with_kwargs=True)
            module.register_forward_hook(region.after)
            if self.axes:
                continue
            # With one rank no linear becomes a Row, so the region's hook on the Row is registered here.
            for child_name, child in module.named_children():
                if isinstance(self.found.rules.get(f"{name}.{child_name}"), RowParallel):
                    child.register_forward_hook(region.after_row)

    def _set_counts(self, module: nn.Module, region: RegionPlan) -> None:
        for name, number in region.counts.items():
            setattr(module, name, number)
        if region.config:
            setattr(module, "config", LocalConfig(module.config, region.config))  # noqa: B010 - for the type checker

    def _cut_the_sequence(self) -> None:
        """Register hooks that split the sequence before the layers and gather it after them and around some blocks."""
        if self.found.layers is None:
            return
        stack: Any = self.modules[self.found.layers]
        at = self.grid, self.axes, self.sequence
        first, last, begins = FirstLayer(*at), LastLayer(*at), Begins(*at, len(stack))
        around = self.modules[next(names_around(self.found.layers))]
        # The hook is on the module around the layers, because callers may run the layers without the model's head.
        around.register_forward_pre_hook(begins.before, with_kwargs=True)
        around.register_forward_hook(begins.after, always_call=True)
        stack[0].register_forward_pre_hook(first.before, with_kwargs=True)
        for name in self.found.blocks:
            block = FullSequenceBlock(self.grid, self.axes, name, self.sequence)
            self.modules[name].register_forward_pre_hook(block.before, with_kwargs=True)
            self.modules[name].register_forward_hook(block.after)
        stack[-1].register_forward_hook(last.after)

    def _adopt_dropouts(self, regions: dict[str, Region]) -> None:
        for name, module in self.modules.items():
            if type(module) is not nn.Dropout or module.p == 0.0:
                continue
            wrapper = wrapper_around(name, self.found.wrappers)
            # The dropout of an adapter sees the sharded input of a Row, or the replicated input of a Column.
            if wrapper is not None:
                axes = self.axes if isinstance(self.found.rules[wrapper], RowParallel) else ()
                adopt_dropout_(module, self.grid, self.axes, None, layout=ActivationLayout(features=axes))
                continue
            region = next((regions[around] for around in names_around(name) if around in regions), None)
            layout = ActivationLayout(sequence=self.axes if self.found.is_cut_along_sequence(name) else ())
            adopt_dropout_(module, self.grid, self.axes, region, layout=layout, sequence=self._sequence_at(name))

    # The ends of the model

    def _adopt_ends(self, vocabulary: int | None, head: GatheredLogits | None) -> None:
        """Replace the model's loss, register the hooks around its forward, and disable methods that would be wrong."""
        losses = self.layers.rules.token_losses
        over = None if vocabulary is None else VocabularyLoss(self.grid, self.axes, vocabulary, losses)
        shifts = shifts_labels(self.model)
        is_loss_ours = False
        if over is not None and shifts is not None and self.converts:
            self.model.loss_function = AdoptedLoss(over, shifts)  # type: ignore[assignment]  # not a module
            is_loss_ours = True
        forward = inspect.unwrap(type(self.model).forward)
        names = [name for name in inspect.signature(forward).parameters if name != "self"]
        labels = names.index("labels") if "labels" in names else None
        is_switched = labels is not None and is_loss_ours and self.logits == "auto"
        sequence = None if self.found.layers is None else self.sequence
        heads = any(region.heads for region in self.found.regions.values())
        if self.axes and (is_switched or sequence is not None or (head is not None and not is_loss_ours)):
            entry = ModelEntry(
                self.grid,
                self.axes,
                logits=head,
                labels=labels,
                switched=over if is_switched else None,
                is_loss_own=not is_loss_ours,
                sequence=sequence,
            )
            self.model.register_forward_pre_hook(entry.before, with_kwargs=True)
            self.model.register_forward_hook(entry.after, always_call=True)  # also if the forward raises
        if self.axes and (sequence is not None or heads):
            around = {"", *(() if self.found.layers is None else names_around(self.found.layers))}
            for name, module in self.modules.items():
                # Each model of Transformers within the model collects its outputs itself, and callers may run it alone.
                if not name or hasattr(type(module), "get_input_embeddings"):
                    # Other models, such as a tower for images, do not split the sequence.
                    split = sequence if name in around else None
                    requested = RequestedOutputs(self.grid, self.axes, sequence=split, heads=heads)
                    module.register_forward_pre_hook(requested.before, with_kwargs=True)
        if self.axes or self.found.experts:
            guard_(self.model, sharded_logits=self.logits == "sharded")
        if self.axes and self.logits != "sharded" and hasattr(type(self.model), "generate"):
            self.model.__dict__["generate"] = Generation(self.model, self.grid, self.axes, self.sequence)
        resolved, table = self.found.resolved, table_of(self.model, self.found.rules)
        self.model.__dict__[KEPT_AS] = Parallelization(
            resolved.rules, resolved.unmatched, self.layers, self.logits, vocabulary, table, over, self.digest, head
        )
