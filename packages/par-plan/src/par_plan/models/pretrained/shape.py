"""`PretrainedShape`: the sizes of a model of transformers, as the planner asks for them.

`par_layers.plan_shardings` gives the parameters of a rank, `par_layers.communication_volumes` its traffic,
`par_pipeline.build_stage` the stages, and autograd the activations that the model's own forward saves.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from functools import cached_property
from inspect import signature
from typing import Any

from torch import nn

from par_layers import CommunicationVolume, plan_shardings

from ...costs.memory import ZeroSharding
from ...costs.pipeline import PipelineCost, PipelineRank, stage_run
from ...costs.sequence import RankAttention, SequenceSplit, local_tokens, reach
from ...costs.traffic import AxisTraffic
from ...experts.costs import layer_cost
from ...experts.mixture import Mixture
from ...inputs import NumberWidths, TrainingJob
from ...shape import ModelSlice, ParameterCount, TensorSplit
from .shares import RankShard, in_runs, look
from .structure import SMALL, Structure, alone
from .towers import TowerActivations, trace_tower
from .traces import Traces


class PretrainedShape:
    """The sizes of a causal language model of transformers, as `predict` takes them.

    Args:
        model: The model, whose values are not read: it may be on the meta device, made from its config alone.
        context: Number of tokens in a row of the batch; None: as many as the model has positions.
        checkpointing: Whether layers keep their input alone, and are computed once more in backward; None: as the model
            is set.
        packed: Whether a row holds several documents, as those of `PackedDataset` do. torch's own attention, "sdpa", is
            then given a mask, of which every layer keeps context x context numbers a row.
        images: Number of images in a row of a vision-language model. Default: 0, rows of text.
        image_size: Height and width of an image in pixels, as the processor gives it to the model. Default: the size in
            the model's configuration, which a model for images of any size, such as Qwen3-VL, does not have.

    Raises:
        TypeError: The model has no list of layers.
        ValueError: The context is below 1, the model was cut over ranks before, or it takes no such images.

    Example:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("Qwen/Qwen3-8B"))
        predict(PretrainedShape(model, context=4096), Topology.from_config({}, 8), TrainingJob(batch=64, zero=3))
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        context: int | None = None,
        checkpointing: bool | None = None,
        packed: bool = False,
        images: int = 0,
        image_size: tuple[int, int] | None = None,
    ) -> None:
        self._structure = structure = Structure(model)
        self.model, self.tied = structure.model, structure.tied
        self.vocabulary, self.width = structure.vocabulary, structure.width
        self.context: int = structure.config.max_position_embeddings if context is None else context
        if self.context < 1:
            raise ValueError(f"context is {self.context}; it must be at least 1")
        self.checkpointing = checkpointing is True or (
            checkpointing is None and any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
        )
        self.packed, self.images, self.image_size = packed, images, image_size
        self._again: PretrainedShape | None = None
        takes = signature(self.model.forward).parameters
        # A model that takes types of tokens lets the tokens of an image see each other, which takes a mask.
        has_mask = packed or (images > 0 and "token_type_ids" in takes)
        self._masked = has_mask and self.model.config._attn_implementation == "sdpa"
        # Rows with images have positions of their own in models that rotate by time, height and width.
        own_positions = packed or (images > 0 and "image_grid_thw" in takes)
        # Plans and traces of a large model take seconds, and a search asks for each of them thousands of times.
        self._ranks: dict[TensorSplit, RankShard | str] = {}
        self._traces = Traces(structure, self.context, packed=own_positions, masked=self._masked)
        self._towers: dict[NumberWidths, TowerActivations] = {}
        if images < 0 or (images == 0 and image_size is not None):
            raise ValueError(f"images={images}: it must be 0 or more, and positive with image_size; pass a number")
        self._tower(NumberWidths())  # an encoder that cannot be followed raises here

    @property
    def recomputes(self) -> tuple[str, ...]:
        """No recomputation, or full layers. Single modules of foreign code are not inspected."""
        return ("",) if self.checkpointing else ("", "layers")

    def with_recompute(self, recompute: str) -> "PretrainedShape":
        """Return the same model, with its traces, and with recomputed layers."""
        if recompute == "" or (recompute == "layers" and self.checkpointing):
            return self
        if recompute != "layers":
            raise ValueError(
                f"recompute is {recompute!r}, and of a model of transformers 'layers' is planned alone; use that, or "
                "leave it out"
            )
        if self._again is None:
            # A shallow copy shares the traces, because recomputation changes no layer.
            self._again = copy(self)
            self._again.checkpointing = True
        return self._again

    @property
    def layers(self) -> int:
        """Number of layers that pipeline stages can be made of."""
        return len(self._structure.kinds)

    @property
    def parameters(self) -> int:
        """Number of elements in all parameters."""
        return sum(parameter.numel() for parameter in self._structure.parameters.values())

    @property
    def sums_losses(self) -> bool:
        """False: the ranks' sums of losses are weighted by the targets of whole rows."""
        return False

    @property
    def keys(self) -> dict[str, str]:
        """Names of sizes for remedies: names of the model's config, and the option for the row length."""
        return {"heads": "the model", "layers": "layers", "context": "data.context"}

    def describe(self) -> str:
        """Return the model's line in a report."""
        images = "without images"
        if self.images:
            size = "" if self.image_size is None else " of {} x {} pixels".format(*self.image_size)
            images = f"{self.images} {'image' if self.images == 1 else 'images'}{size} a row"
        return (
            f"{self.parameters:.4g} parameters: {type(self.model).__name__}, {self.layers} layers, width {self.width}, "
            f"{self._structure.config.num_attention_heads} heads, context {self.context}, vocabulary {self.vocabulary}"
            + (f", {images}" if hasattr(self.model.config, "vision_config") else "")
            + (", packed rows" if self.packed else "")
            + (", activation checkpointing" if self.checkpointing else "")
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes as plain values."""
        names = ("layers", "width", "context", "vocabulary", "tied", "packed", "images", "checkpointing", "parameters")
        return {"class": type(self.model).__name__, **{name: getattr(self, name) for name in names}}

    # What a topology leaves of it

    def part(self, pipeline: PipelineCost, place: PipelineRank) -> ModelSlice:
        """Return the layers of the model on a pipeline rank, counted by kind (such as dense or mixture of experts)."""
        runs = []
        for stage in place.stages:
            start, stop = stage_run(self.layers, pipeline.stages, stage)
            kinds = self._structure.kinds[start:stop]
            runs.append(tuple(sorted(Counter(kinds).items())))
        has = self._structure.have_experts
        return ModelSlice(
            blocks=sum(times for run in runs for _, times in run),
            mixtures=sum(times for run in runs for kind, times in run if has[kind]),
            first=0 in place.stages,
            last=pipeline.stages - 1 in place.stages,
            runs=tuple(runs),
        )

    def why_not_sharded(self, split: TensorSplit, rows: int = 0) -> str | None:
        """Return why a tensor mode cannot split the model, and the fix; None if it can. Rows are never split."""
        del rows
        if split.mode not in (None, "1d"):
            return f"tensor mode {split.label} cuts activations that this model's code takes whole; use mode 1d"
        if split.sequence and self.context % split.ranks:
            return (
                f"the context is {self.context} tokens, which sequence parallelism cuts into {split.ranks} parts; "
                "change one of the two"
            )
        found = self._rank(split)
        return found if isinstance(found, str) else None

    def why_no_stages(self) -> str | None:
        """Return why the model has no pipeline stages, and the fix; None if stages are possible."""
        return self._structure.ends if isinstance(self._structure.ends, str) else None

    def why_no_tensor_ranks(self) -> str | None:
        """Return why the model has no tensor parallelism, and the fix; None if some number of ranks works."""
        try:
            plan_shardings(self._structure.sampled, alone({"mode": "1d"}, SMALL[0]))
        except TypeError as error:  # there is no plan
            return str(error)
        except ValueError:  # of these sizes, for these ranks
            return None
        return None

    def tensor_configs(self, size: int, precision: str) -> Iterator[dict[str, Any]]:
        """Yield mode 1d with and without sequence parallelism; key heads are copied if there are too few."""
        del precision
        keys = getattr(self._structure.config, "num_key_value_heads", None)
        copied = {"kv_heads": keys} if isinstance(keys, int) and keys < size and size % keys == 0 else {}
        yield {"mode": "1d", **copied}
        yield {"mode": "1d", "sequence_parallel": True, **copied}

    @property
    def mixture(self) -> Mixture | None:
        """The model's layers of experts; shared ones are not among them."""
        return self._structure.mixture

    def count_experts(self, split: TensorSplit, part: ModelSlice) -> ParameterCount | None:
        """Return the parameter count of a rank's distributed experts; None without them."""
        dealt = [(share.experts, times) for share, times in in_runs(part, self._known(split).kinds) if share.experts]
        if not dealt:
            return None
        ranks = split.experts.parallel
        return ParameterCount(
            total=sum(sum(tensors) * times for tensors, times in dealt) // ranks,
            block=max(sum(tensors) for tensors, _ in dealt) // ranks,
            blocks=sum(times for _, times in dealt),
            ends=0,
            table=0,
            largest=max(max(tensors) for tensors, _ in dealt) // ranks,
            tensors=sum(len(tensors) * times for tensors, times in dealt),
        )

    def count(self, split: TensorSplit, part: ModelSlice) -> ParameterCount:
        """Return the parameter count of a rank, with the shards that `par_layers.plan_shardings` plans."""
        rank = self._known(split)
        ends, shares = rank.ends[part.first, part.last], in_runs(part, rank.kinds)
        return ParameterCount(
            total=ends.elements + sum(share.elements * times for share, times in shares),
            block=max(share.elements for share, _ in shares),
            blocks=part.blocks,
            ends=ends.elements - sum(map(sum, ends.items)),
            items=ends.items,
            frozen=ends.frozen + sum(share.frozen * times for share, times in shares),
            frozen_block=max(share.frozen for share, _ in shares),
            table=rank.table if part.first or (self.tied and part.last) else 0,
            largest=max(ends.largest, *(share.largest for share, _ in shares)),
            tensors=ends.tensors + sum(share.tensors * times for share, times in shares),
        )

    def activations(
        self,
        split: TensorSplit,
        sequence: SequenceSplit,
        pipeline: PipelineCost,
        place: PipelineRank,
        job: TrainingJob,
        rows: int,
    ) -> tuple[float, float]:
        """Return the saved bytes without logits, and the bytes of logits."""
        is_cut, numbers = sequence.ranks > 1, job.numbers
        rank, part, local = self._known(split), self.part(pipeline, place), self._local(sequence, job)
        trace = self._traces.over_ranks(numbers, local) if is_cut else self._traces.alone(numbers)
        kept, tokens = trace.layers, rows * local
        share = tokens / trace.tokens
        layers = []
        structure = self._structure
        for sample, own, has in zip(structure.samples, rank.kinds, structure.have_experts, strict=True):
            dealt = split.experts.is_dealt and has
            layer = share * kept[sample].on_rank(split.ranks, sequence=split.sequence, experts=not dealt)
            layer += numbers.cast * (own.matrices + sum(own.experts) / split.experts.parallel)
            if dealt and self.mixture is not None:
                layer += float(layer_cost(self.mixture, split.experts, tokens, numbers.product, job.imbalance).saved)
            for attention in kept[sample].attentions(split.ranks) if is_cut else ():
                taken = reach(sequence, attention, self.context, job.documents)
                layer += taken.kept * rows * numbers.product
            layers.append(layer)
        logits = self._logits(split, numbers, place, tokens) if part.last else 0.0
        once = 0.0
        if self.checkpointing:
            # Every layer saves only its input. One layer at a time is recomputed in backward, after the logits are
            # free.
            once = max(0.0, max(layers) - logits)
            layers = [tokens / split.tokens * self.width * numbers.residual] * len(layers)
            if self._masked and not is_cut:
                # All layers of one type receive the same mask, one byte per element, saved once per microbatch.
                types = len({*(getattr(structure.config, "layer_types", None) or [None])})
                once += place.kept * rows * types * self.context**2
        total = once + place.kept * max(sum(layers[kind] * times for kind, times in run) for run in part.runs)
        if part.first:
            # A rank with a part of the vocabulary also saves which ids are its own, one byte each.
            of_ids = tokens if split.ranks > 1 else 0
            total += place.kept * (share * kept[-1].whole + of_ids)
            tower = self._tower(numbers)
            images = rows * (tower.checkpointed if self.checkpointing else tower.saved)
            # Backward recomputes the encoder when the layers have none of their activations left, and logits are gone.
            again = rows * tower.block - logits if self.checkpointing else 0.0
            total = max(total, again) + place.kept * images
            total += tower.fixed + numbers.cast * tower.casts
        if part.last:
            head = numbers.cast * self.width * math.ceil(self.vocabulary / split.ranks)
            total += place.kept_last * (share * kept[self.layers].whole + head)
        return total + kept[-1].fixed, logits

    def attentions(self, split: TensorSplit, sequence: SequenceSplit, part: ModelSlice) -> Mapping[RankAttention, int]:
        """Return the different attentions of a rank, with the number of each.

        Without sequence ranks, they are assumed to be causal with the sizes of the config.
        """
        if sequence.ranks == 1:
            heads: int = self._structure.config.num_attention_heads
            # On one sequence rank only the number of attentions matters, because nothing is sent.
            alike = RankAttention(heads=heads, key_heads=heads, width=1, key_width=1)
            return {alike: max(1, part.blocks)}
        kept, found = self._traces.any_over_ranks().layers, Counter[RankAttention]()
        for run in part.runs:
            for kind, times in run:
                for attention in kept[self._structure.samples[kind]].attentions(split.ranks):
                    found[attention] += times
        return found

    def why_no_sequence_ranks(self) -> str | None:
        """Return why the sequence cannot be split, and the fix; None if it can."""
        try:
            self._traces.any_over_ranks()
        except ValueError as error:
            return str(error)
        return None

    @property
    def passes_states(self) -> bool:
        """Whether recurrent layers pass states from each sequence rank to the next."""
        return self._traces.pass_states

    def states(self, sequence: SequenceSplit, part: ModelSlice, job: TrainingJob) -> list[float]:
        """Return the bytes per row that each recurrent layer passes to the next sequence rank.

        Tensor ranks do not split these layers, so each tensor rank passes all of its states.
        """
        if sequence.ranks == 1 or not self.passes_states:
            return []
        layers = self._traces.over_ranks(job.numbers, self._local(sequence, job)).layers
        samples = self._structure.samples
        return [size for run in part.runs for kind, times in run for size in layers[samples[kind]].passed * times]

    def _local(self, sequence: SequenceSplit, job: TrainingJob) -> int:
        return local_tokens(sequence, self.context, job.documents)

    def _logits(self, split: TensorSplit, numbers: NumberWidths, place: PipelineRank, tokens: float) -> float:
        """Return the bytes of logits at the beginning of backward.

        Cut ones are kept as they are; the loss goes back through one gradient in fp32, which it makes of a copy of
        logits in less. Unsharded logits save a log-softmax in fp32, and backward holds two gradients.
        """
        # The loss is computed in fp32, from a copy of logits that have a narrower dtype.
        copied = 0 if numbers.product == 4 else 4
        kept, gradient = (numbers.product, 4 + copied) if split.ranks > 1 else (4, 8)
        return tokens * math.ceil(self.vocabulary / split.ranks) * (place.kept_last * kept + gradient)

    def tensor_traffic(
        self,
        split: TensorSplit,
        numbers: NumberWidths,
        part: ModelSlice,
        microbatches: Mapping[int, int],
        replicas: ZeroSharding,
    ) -> list[AxisTraffic]:
        """Return the traffic over the tensor axis: activations per microbatch, and partial gradients per step."""
        if split.ranks == 1:
            return []
        rank = self._known(split)
        shares = [*in_runs(part, rank.kinds), (rank.ends[part.first, part.last], 1)]
        loss = rank.loss if part.last else CommunicationVolume()
        a_token = float(loss.elements) * 4 + sum(
            times * float(share.traffic.elements * numbers.product + share.stream.elements * numbers.residual)
            for share, times in shares
        )
        calls = loss.calls + sum((share.traffic + share.stream).calls * times for share, times in shares)
        tokens = sum(size * times for size, times in microbatches.items())
        transfers = [
            AxisTraffic(
                axis="tensor",
                what="activations",
                operations=calls * sum(microbatches.values()),
                bytes=tokens * a_token,
            )
        ]
        partial = sum(share.partial * times for share, times in shares) / (replicas.ranks if replicas.zero else 1)
        if partial:
            sums = len({axes for share, _ in shares for axes in share.axes})
            transfers.append(
                AxisTraffic(axis="tensor", what="partial gradients", operations=sums, bytes=partial * numbers.master)
            )
        return transfers

    def flops(self, part: ModelSlice) -> tuple[float, float]:
        """Return the floating-point operations per token, with the experts that it is routed to.

        In forward a matrix takes two operations for each of its elements; backward takes twice as many as forward.
        Attention is causal, so that half of its products are computed.
        """
        layers = [times * self._flops_of_layers[kind] for run in part.runs for kind, times in run]
        logits = 2 * self.width * self.vocabulary if part.last and self._structure.head is not None else 0
        config = self._structure.config
        heads: int = config.num_attention_heads
        head: int = getattr(config, "v_head_dim", None) or getattr(config, "head_dim", None) or self.width // heads
        tower = self._tower(NumberWidths()) if part.first else TowerActivations()
        of_images = tower.flops / self.context * (3 if tower.is_trained else 1)
        return 3.0 * (sum(layers) + logits) + of_images, 3.0 * part.blocks * 2 * self.context * heads * head

    def recompute_flops(self, part: ModelSlice) -> tuple[float, float]:
        """Return the floating-point operations per token that backward repeats: a forward of the layers."""
        if not self.checkpointing:
            return 0.0, 0.0
        layers = [times * self._flops_of_layers[kind] for run in part.runs for kind, times in run]
        tower = self._tower(NumberWidths()) if part.first else TowerActivations()
        of_images = tower.flops / self.context if tower.is_trained else 0.0
        return sum(layers) + of_images, self.flops(part)[1] / 3

    @cached_property
    def _flops_of_layers(self) -> tuple[float, ...]:
        """Floating-point operations of each kind of layer's matrices, for one token in forward."""
        structure, totals = self._structure, []
        for names in structure.of_samples:
            total = 0.0
            for name in names:
                shape = structure.parameters[name].shape
                if name not in structure.experts:  # matrices, and convolutions of each channel
                    total += 2 * shape.numel() * (len(shape) > 1)
                elif len(shape) == 3:  # the weights of all experts
                    total += 2 * shape.numel() * structure.experts_per_token / shape[0]
            totals.append(total)
        return tuple(totals)

    def _tower(self, numbers: NumberWidths) -> TowerActivations:
        """Return what is saved of the images of a row."""
        if not self.images:
            return TowerActivations()
        if numbers not in self._towers:
            self._towers[numbers] = trace_tower(self.model, self.images, self.image_size, self.context, numbers)
        return self._towers[numbers]

    def _known(self, split: TensorSplit) -> RankShard:
        found = self._rank(split)
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _rank(self, split: TensorSplit) -> RankShard | str:
        """Return the shard of a rank under a split, or the reason, as text, why the model cannot be split this way."""
        if split not in self._ranks:
            # Data ranks with different experts shard all other parameters identically, so they share one plan.
            alike = replace(split, experts=replace(split.experts, parallel=1, own=1, copies=1))
            if alike not in self._ranks:
                self._ranks[alike] = look(self._structure, alike)
            self._ranks[split] = self._ranks[alike]
        return self._ranks[split]
