"""What the planner asks of a model, whatever it is: each question about what one rank has of it."""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ..costs.memory import ZeroSharding
from ..costs.pipeline import PipelineCost, PipelineRank
from ..costs.sequence import RankAttention, SequenceSplit
from ..costs.traffic import AxisTraffic
from ..experts.mixture import Mixture
from ..inputs import NumberWidths, TrainingJob
from ..shape import ModelSlice, ParameterCount, TensorSplit


class PlannedModel(Protocol):
    """A model as the planner sees it. `GPTPlan` is par-train's own, `PretrainedShape` one of transformers."""

    def __hash__(self) -> int:
        """What depends on a model alone is computed once."""

    @property
    def layers(self) -> int:
        """Number of layers that pipeline stages can be made of."""

    @property
    def context(self) -> int:
        """Number of tokens in a row of the batch."""

    @property
    def width(self) -> int:
        """Number of features between two layers."""

    @property
    def tied(self) -> bool:
        """Whether the table of the embedding is the classifier's weight, too."""

    @property
    def checkpointing(self) -> bool:
        """Whether layers are computed once more in backward."""

    @property
    def recomputes(self) -> tuple[str, ...]:
        """What there are formulas for of `TrainingJob.recompute`; "" among them."""

    def with_recompute(self, recompute: str) -> "PlannedModel":
        """The model as it is when it computes something again in backward.

        Args:
            recompute: As in `TrainingJob`.

        Raises:
            ValueError: There are no formulas for it.
        """

    def recompute_flops(self, part: ModelSlice) -> tuple[float, float]:
        """Floating-point operations for one token that backward does again: of matrices, and of attention."""

    @property
    def sums_losses(self) -> bool:
        """Whether the loss itself adds up what the ranks of a sequence have; else their gradients are weighted."""

    @property
    def keys(self) -> Mapping[str, str]:
        """What the config calls the sizes that a remedy may name: heads, layers, context."""

    def describe(self) -> str:
        """The line of a report."""

    def as_dict(self) -> dict[str, Any]:
        """The sizes as plain values."""

    def part(self, pipeline: PipelineCost, place: PipelineRank) -> ModelSlice:
        """What a rank of a pipeline has."""

    def why_not_sharded(self, split: TensorSplit, rows: int = 0) -> str | None:
        """Why a tensor mode cannot cut the model, or a microbatch of so many rows, and what to change; None if it can.

        Args:
            split: The cut of the tensor mode.
            rows: Number of rows in a microbatch; 0: they are not looked at.
        """

    def why_no_stages(self) -> str | None:
        """Why the model cannot be cut into pipeline stages, and what to do; None if it can."""

    def why_no_tensor_ranks(self) -> str | None:
        """Why no number of tensor ranks can cut the model, and what to do; None if some can."""

    def tensor_configs(self, size: int, precision: str) -> Iterator[dict[str, Any]]:
        """The tensor modes for some ranks, as a config writes them; not all of them need to fit."""

    @property
    def mixture(self) -> Mixture | None:
        """The model's layers of experts, which are alike; None if it has none."""

    def count(self, split: TensorSplit, part: ModelSlice) -> ParameterCount:
        """The parameters of a rank, without those of experts that are dealt out."""

    def count_experts(self, split: TensorSplit, part: ModelSlice) -> ParameterCount | None:
        """The parameters of a rank in experts that are dealt out; None if it has none."""

    def activations(
        self,
        split: TensorSplit,
        sequence: SequenceSplit,
        pipeline: PipelineCost,
        place: PipelineRank,
        job: TrainingJob,
        rows: int,
    ) -> tuple[float, float]:
        """Bytes that wait for backward of all microbatches that wait at a time, and of those the bytes of logits.

        Args:
            split: The cut of the tensor mode.
            sequence: The cut of a row's tokens.
            pipeline: The pipeline.
            place: The rank's place in it.
            job: The job, of which precision and the documents of a row matter here.
            rows: Number of rows in a microbatch.
        """

    def attentions(self, split: TensorSplit, sequence: SequenceSplit, part: ModelSlice) -> Mapping[RankAttention, int]:
        """The attentions of a rank, and how many of them are alike.

        Args:
            split: The cut of the tensor mode.
            sequence: The cut of a row's tokens.
            part: What the rank has of the model.

        Raises:
            ValueError: The model's sequence cannot be cut.
        """

    def why_no_sequence_ranks(self) -> str | None:
        """Why the model's sequence cannot be cut over ranks, and what to do; None if it can."""

    def tensor_traffic(
        self,
        split: TensorSplit,
        numbers: NumberWidths,
        part: ModelSlice,
        microbatches: Mapping[int, int],
        replicas: ZeroSharding,
    ) -> list[AxisTraffic]:
        """What comes over the tensor axis; arguments as those of `par_plan.traffic.tensor_traffic`."""

    def flops(self, part: ModelSlice) -> tuple[float, float]:
        """Floating-point operations for one token in forward and backward: all but attention's, and attention's.

        The latter are those of a causal mask over a row of one document.
        """
