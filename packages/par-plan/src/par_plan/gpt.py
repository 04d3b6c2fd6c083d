"""A GPT of par-layers' own layers, in every tensor mode: its formulas, as the planner asks for them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from .experts.costs import saved_mixture
from .experts.mixture import Mixture
from .inputs import RECOMPUTES, Job, Numbers
from .memory import Replicas, saved_block, saved_ends
from .pipeline import Pipe, Place, stage_run
from .sequence import Attention, SequenceCut, local_tokens, reach
from .shape import Count, Cut, Part, Shape, count, count_experts, misfit
from .traffic import Move, tensor_traffic

FLOPS_A_BYTE = 150
"""Operations in the time in which a device reads or writes a byte of its memory, by what an H100 reaches of both."""


@dataclass(frozen=True)
class GPTPlan:
    """A GPT as the planner sees it; see `PlannedModel`.

    Args:
        shape: Its sizes.
        recompute: What its blocks compute again in backward, as in `Job`.
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

    def again(self, recompute: str) -> "GPTPlan":
        """The same sizes, with something that is computed again."""
        return self if recompute == self.recompute else replace(self, recompute=recompute)

    @property
    def sums_losses(self) -> bool:
        """True: the loss is the mean over a whole sequence."""
        return True

    @property
    def keys(self) -> dict[str, str]:
        """What the config calls the sizes that a remedy may name."""
        return {"heads": "model.heads", "layers": "model.layers", "context": "model.context"}

    def describe(self) -> str:
        """The line of a report."""
        shape = self.shape
        return (
            f"{shape.parameters:.4g} parameters: {shape.layers} layers, width {shape.width}, {shape.heads} heads, "
            f"context {shape.context}, vocabulary {shape.vocabulary}"
            + (f", {shape.experts} experts, {shape.top_k} of them for a token" if shape.experts else "")
            + (f" and {shape.shared} for all" if shape.experts and shape.shared else "")
        )

    def as_dict(self) -> dict[str, Any]:
        """The sizes as plain values."""
        return {**asdict(self.shape), "parameters": self.shape.parameters}

    def part(self, pipeline: Pipe, place: Place) -> Part:
        """What a rank of a pipeline has."""
        runs = [stage_run(self.layers, pipeline.stages, stage) for stage in place.stages]
        return replace(pipeline.part(place, self.layers), mixtures=sum(self.shape.mixtures(*run) for run in runs))

    def misfit(self, cut: Cut, rows: int = 0) -> str | None:
        """Why a tensor mode cannot cut the model, or a microbatch of so many rows, and what to change."""
        problem = misfit(self.shape, cut, rows)
        return None if problem is None else f"{problem}; change one of the two"

    def not_staged(self) -> None:
        """None: the GPT is made of blocks, which stages share out."""
        return

    def not_cut(self) -> None:
        """None: every tensor mode has layers that cut the GPT."""
        return

    def tensor_configs(self, size: int, precision: str) -> Iterator[dict[str, Any]]:
        """Every mode that takes some ranks, and that a precision multiplies in."""
        yield {"mode": "1d"}
        yield {"mode": "1d", "sequence_parallel": True}
        if precision == "fp8":  # which multiplies in mode 1d alone
            return
        for q in range(2, math.isqrt(size) + 1):  # squares, as many of them side by side as one has sides, and cubes
            depth, rest = divmod(size, q * q)
            if rest == 0 and depth == 1:
                yield {"mode": "2d"}
            elif rest == 0 and depth <= q:
                yield {"mode": "2.5d", "depth": depth}
            if q**3 == size:
                yield {"mode": "3d"}

    @cached_property
    def mixture(self) -> Mixture | None:
        """What takes the place of the MLP."""
        return self.shape.mixture

    def count(self, cut: Cut, part: Part) -> Count:
        """The parameters of a rank, without those of experts that are dealt out."""
        return count(self.shape, cut, part)

    def count_experts(self, cut: Cut, part: Part) -> Count | None:
        """The parameters of a rank in experts that are dealt out; None if it has none."""
        if self.mixture is None or not cut.experts.is_dealt or not part.mixtures:
            return None
        return count_experts(self.mixture, cut.experts, part.mixtures)

    def activations(
        self, cut: Cut, sequence: SequenceCut, pipeline: Pipe, place: Place, job: Job, rows: int
    ) -> tuple[float, float]:
        """Bytes that wait for backward; the few logits over a byte's values are among the activations."""
        shape, part, numbers = self.shape, self.part(pipeline, place), job.numbers
        tokens = rows * local_tokens(sequence, shape.context, job.documents)
        first = saved_ends(shape, cut, numbers, tokens, first=part.first)
        last = saved_ends(shape, cut, numbers, tokens, last=part.last)
        cheap, once, reached = self.recompute == "cheap", 0.0, 0.0
        if sequence.ranks > 1:
            taken = reach(sequence, self._attention(cut), shape.context, job.documents)
            reached = taken.kept * rows / cut.inner_tokens * numbers.product
            once = 8 * tokens // rows if part.first else 0  # the places of tokens, as int64
        block = with_experts = saved_block(shape, cut, numbers, tokens, cheap=cheap) + reached
        if self.mixture is not None:
            mixture = saved_mixture(self.mixture, cut.experts, numbers, tokens, job.imbalance)
            with_experts = saved_block(shape, cut, numbers, tokens, cheap=cheap, mixture=mixture) + reached
        if self.checkpointing:  # of one block at a time the rest is there, when what the loss has kept is gone
            whole = max(with_experts if part.mixtures else 0.0, block if part.mixtures < part.blocks else 0.0)
            block = with_experts = tokens / cut.tokens * shape.width / cut.features * numbers.residual
            once += max(0.0, whole - block - (last if part.last else 0))
        stages = []
        for start, stop in (stage_run(shape.layers, pipeline.stages, number) for number in place.stages):
            mixtures = shape.mixtures(start, stop)
            stages.append((stop - start - mixtures) * block + mixtures * with_experts)
        kept = place.kept * (max(stages) + first) + place.kept_last * last
        return kept + once, 0.0

    def attentions(self, cut: Cut, sequence: SequenceCut, part: Part) -> dict[Attention, int]:
        """The attentions of a rank, which are all alike."""
        del sequence
        return {self._attention(cut): part.blocks}

    def _attention(self, cut: Cut) -> Attention:
        head = self.shape.width // self.shape.heads
        keys = self.shape.keys // cut.inner
        return Attention(heads=self.shape.heads // cut.inner, key_heads=keys, width=head, key_width=head)

    def not_sequenced(self) -> None:
        """None: every layer knows of a sequence that is cut."""
        return

    def tensor_traffic(
        self, cut: Cut, numbers: Numbers, part: Part, microbatches: Mapping[int, int], replicas: Replicas
    ) -> list[Move]:
        """What comes over the tensor axis."""
        return tensor_traffic(self.shape, cut, numbers, part, microbatches, replicas)

    def flops(self, part: Part) -> tuple[float, float]:
        """Floating-point operations for one token in forward and backward: of matrices, and of attention."""
        return self.shape.flops(part)

    def flops_again(self, part: Part) -> tuple[float, float]:
        """Floating-point operations for one token that backward does again.

        A block runs again up to what its last product needs, so that this one is left out; but for that of experts,
        whose outputs come back in an exchange. What norms and the activation read and write counts as the operations
        that take as long.
        """
        shape = self.shape
        if self.checkpointing:
            matrices = (part.blocks - part.mixtures) * 2 * (shape.block_matrices - shape.width * shape.mlp)
            if self.mixture is not None:
                matrices += part.mixtures * 2 * (shape.attention_matrices + self.mixture.active)
            return float(matrices), self.flops(part)[1] / 3
        if self.recompute == "cheap":
            features = (part.blocks - part.mixtures) * (2 * shape.width + shape.mlp) + part.mixtures * shape.width
            return 2.0 * features * 2 * FLOPS_A_BYTE, 0.0
        return 0.0, 0.0
