"""Formulas for a GPT of par-layers' own layers, in every tensor mode."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ..costs.memory import ZeroSharding, saved_block, saved_ends
from ..costs.pipeline import PipelineCost, PipelineRank, stage_run
from ..costs.sequence import RankAttention, SequenceSplit, local_tokens, reach
from ..costs.traffic import AxisTraffic, tensor_traffic
from ..experts.costs import saved_mixture
from ..experts.mixture import Mixture
from ..inputs import RECOMPUTES, NumberWidths, TrainingJob
from ..shape import ModelSlice, ParameterCount, Shape, TensorSplit, count, count_experts, why_not_sharded

FLOPS_A_BYTE = 150
"""Operations in the time in which a device reads or writes a byte of its memory, by what an H100 reaches of both."""


@dataclass(frozen=True)
class GPTPlan:
    """A GPT as the planner sees it; see `PlannedModel`.

    Args:
        shape: Sizes of the model.
        recompute: Name of the recomputation, as in `TrainingJob`.
    """

    shape: Shape
    recompute: str = ""

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return self.shape.layers

    @property
    def context(self) -> int:
        """Number of tokens in a window."""
        return self.shape.context

    @property
    def width(self) -> int:
        """Number of features of the residual stream."""
        return self.shape.width

    @property
    def tied(self) -> bool:
        """Whether the table of the embedding is the classifier's weight, too."""
        return self.shape.tied

    @property
    def checkpointing(self) -> bool:
        """Whether blocks keep their inputs alone."""
        return self.recompute == "layers"

    @property
    def recomputes(self) -> tuple[str, ...]:
        """All that there are."""
        return RECOMPUTES

    def with_recompute(self, recompute: str) -> "GPTPlan":
        """Return the same sizes with another kind of recomputation."""
        return self if recompute == self.recompute else replace(self, recompute=recompute)

    @property
    def sums_losses(self) -> bool:
        """True: the loss is the mean over a whole sequence."""
        return True

    @property
    def keys(self) -> dict[str, str]:
        """Config keys of the sizes that a remedy may name."""
        return {"heads": "model.heads", "layers": "model.layers", "context": "model.context"}

    def describe(self) -> str:
        """Return the model's sizes as one line of text for the report."""
        shape = self.shape
        return (
            f"{shape.parameters:.4g} parameters: {shape.layers} layers, width {shape.width}, {shape.heads} heads, "
            f"context {shape.context}, vocabulary {shape.vocabulary}"
            + (f", {shape.experts.number} experts, top {shape.experts.top_k}" if shape.experts else "")
            + (f", {shape.experts.shared} shared" if shape.experts and shape.experts.shared else "")
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes as plain values."""
        return {**asdict(self.shape), "parameters": self.shape.parameters}

    def part(self, pipeline: PipelineCost, place: PipelineRank) -> ModelSlice:
        """Return the slice of the model on a pipeline rank."""
        runs = [stage_run(self.layers, pipeline.stages, stage) for stage in place.stages]
        return replace(pipeline.part(place, self.layers), mixtures=sum(self.shape.mixtures(*run) for run in runs))

    def why_not_sharded(self, split: TensorSplit, rows: int = 0) -> str | None:
        """Return why a tensor mode cannot split the model or a microbatch, and the fix."""
        problem = why_not_sharded(self.shape, split, rows)
        return None if problem is None else f"{problem}; change one of the two"

    def why_no_stages(self) -> None:
        """Return None, since stages consist of blocks."""
        return

    def why_no_tensor_ranks(self) -> None:
        """Return None, since every tensor mode has layers for the GPT."""
        return

    def tensor_configs(self, size: int, precision: str) -> Iterator[dict[str, Any]]:
        """Yield every mode that supports this number of ranks and the precision."""
        yield {"mode": "1d"}
        yield {"mode": "1d", "sequence_parallel": True}
        if precision == "fp8":  # which multiplies in mode 1d alone
            return
        for q in range(2, math.isqrt(size) + 1):  # squares, as many of them side by side as one has sides, and cubes
            depth, rest = divmod(size, q * q)
            # Mode 2.5d has at most as many squares as a square has sides.
            if rest == 0 and depth == 1:
                yield {"mode": "2d"}
            elif rest == 0 and depth <= q:
                yield {"mode": "2.5d", "depth": depth}
            if q**3 == size:
                yield {"mode": "3d"}

    @cached_property
    def mixture(self) -> Mixture | None:
        """Mixture of experts in the place of the MLP."""
        return self.shape.mixture

    def count(self, split: TensorSplit, part: ModelSlice) -> ParameterCount:
        """Return the parameter count of a rank, without distributed experts."""
        return count(self.shape, split, part)

    def count_experts(self, split: TensorSplit, part: ModelSlice) -> ParameterCount | None:
        """Return the parameter count of a rank's distributed experts; None without them."""
        if self.mixture is None or not split.experts.is_dealt or not part.mixtures:
            return None
        return count_experts(self.mixture, split.experts, part.mixtures)

    def activations(
        self,
        split: TensorSplit,
        sequence: SequenceSplit,
        pipeline: PipelineCost,
        place: PipelineRank,
        job: TrainingJob,
        rows: int,
    ) -> tuple[float, float]:
        """Return the saved bytes; logits over 256 tokens are part of the activations."""
        shape, part, numbers = self.shape, self.part(pipeline, place), job.numbers
        tokens = rows * local_tokens(sequence, shape.context, job.documents)
        first = saved_ends(shape, split, numbers, tokens, first=part.first)
        last = saved_ends(shape, split, numbers, tokens, last=part.last)
        cheap, once, reached = self.recompute == "cheap", 0.0, 0.0
        if sequence.ranks > 1:
            # What attention keeps of other ranks' tokens belongs to no layer's formula.
            taken = reach(sequence, self._attention(split), shape.context, job.documents)
            reached = taken.kept * rows / split.inner_tokens * numbers.product
            once = 8 * tokens // rows if part.first else 0  # the places of tokens, as int64
        block = with_experts = saved_block(shape, split, numbers, tokens, cheap=cheap) + reached
        if self.mixture is not None:
            mixture = saved_mixture(self.mixture, split.experts, numbers, tokens, job.imbalance)
            with_experts = saved_block(shape, split, numbers, tokens, cheap=cheap, mixture=mixture) + reached
        if self.checkpointing:  # of one block at a time the rest is there, when what the loss has kept is gone
            whole = max(with_experts if part.mixtures else 0.0, block if part.mixtures < part.blocks else 0.0)
            # From here a block counts as its input alone.
            block = with_experts = tokens / split.tokens * shape.width / split.features * numbers.residual
            once += max(0.0, whole - block - (last if part.last else 0))
        stages = []
        # Stages of one rank differ where blocks with experts do not divide evenly; the fullest counts.
        for start, stop in (stage_run(shape.layers, pipeline.stages, number) for number in place.stages):
            mixtures = shape.mixtures(start, stop)
            stages.append((stop - start - mixtures) * block + mixtures * with_experts)
        kept = place.kept * (max(stages) + first) + place.kept_last * last
        return kept + once, 0.0

    def attentions(self, split: TensorSplit, sequence: SequenceSplit, part: ModelSlice) -> dict[RankAttention, int]:
        """Return the attentions of a rank, which are identical."""
        del sequence
        return {self._attention(split): part.blocks}

    def _attention(self, split: TensorSplit) -> RankAttention:
        head = self.shape.width // self.shape.heads
        keys = self.shape.keys // split.inner
        return RankAttention(heads=self.shape.heads // split.inner, key_heads=keys, width=head, key_width=head)

    @property
    def passes_states(self) -> bool:
        """False: no layer is recurrent."""
        return False

    def states(self, sequence: SequenceSplit, part: ModelSlice, job: TrainingJob) -> list[float]:
        """Return no states."""
        del sequence, part, job
        return []

    def why_no_sequence_ranks(self) -> None:
        """Return None, since every layer supports a split sequence."""
        return

    def tensor_traffic(
        self,
        split: TensorSplit,
        numbers: NumberWidths,
        part: ModelSlice,
        microbatches: Mapping[int, int],
        replicas: ZeroSharding,
    ) -> list[AxisTraffic]:
        """Return the traffic over the tensor axis."""
        return tensor_traffic(self.shape, split, numbers, part, microbatches, replicas)

    def flops(self, part: ModelSlice) -> tuple[float, float]:
        """Return the floating-point operations per token of matmuls and of attention."""
        return self.shape.flops(part)

    def recompute_flops(self, part: ModelSlice) -> tuple[float, float]:
        """Return the floating-point operations per token that backward repeats.

        A block is recomputed up to the input of its last matmul, so this matmul is not repeated. The last matmul of
        experts is repeated, since its output is exchanged. Memory traffic of norms and activation functions counts as
        operations of the same duration.
        """
        shape = self.shape
        if self.checkpointing:
            matrices = (part.blocks - part.mixtures) * 2 * (shape.block_matrices - shape.width * shape.mlp)
            if self.mixture is not None:
                matrices += part.mixtures * 2 * (shape.attention_matrices + self.mixture.active)
            # A third of a step's attention is its forward, which is all that is repeated.
            return float(matrices), self.flops(part)[1] / 3
        if self.recompute == "cheap":
            features = (part.blocks - part.mixtures) * (2 * shape.width + shape.mlp) + part.mixtures * shape.width
            return 2.0 * features * 2 * FLOPS_A_BYTE, 0.0
        return 0.0, 0.0
