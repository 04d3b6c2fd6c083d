"""The interface between the planner and a model."""

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
    """Interface of a model for the planner. `GPTPlan` is par-train's own, `PretrainedShape` one of transformers."""

    def __hash__(self) -> int:
        """Return a hash, so that results per model are cached."""

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
        """Whether the embedding and the classifier share one weight."""

    @property
    def checkpointing(self) -> bool:
        """Whether layers are computed once more in backward."""

    @property
    def recomputes(self) -> tuple[str, ...]:
        """Supported values of `TrainingJob.recompute`, including ""."""

    def with_recompute(self, recompute: str) -> "PlannedModel":
        """Return the model with another kind of recomputation.

        Args:
            recompute: Name of the recomputation, as in `TrainingJob`.

        Raises:
            ValueError: There are no formulas for it.
        """

    def recompute_flops(self, part: ModelSlice) -> tuple[float, float]:
        """Return the floating-point operations per token that backward repeats: matmuls, and attention."""

    @property
    def sums_losses(self) -> bool:
        """Whether the loss itself adds up what the ranks of a sequence have; else their gradients are weighted."""

    @property
    def keys(self) -> Mapping[str, str]:
        """Config keys of the sizes that a remedy may name: heads, layers, context."""

    def describe(self) -> str:
        """Return the model's line in a report."""

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes as plain values."""

    def part(self, pipeline: PipelineCost, place: PipelineRank) -> ModelSlice:
        """Return the slice of the model on a pipeline rank."""

    def why_not_sharded(self, split: TensorSplit, rows: int = 0) -> str | None:
        """Return why a tensor mode cannot split the model or a microbatch, and the fix; None if it can.

        Args:
            split: The cut of the tensor mode.
            rows: Number of rows in a microbatch; 0: they are not looked at.
        """

    def why_no_stages(self) -> str | None:
        """Return why the model has no pipeline stages, and the fix; None if stages are possible."""

    def why_no_tensor_ranks(self) -> str | None:
        """Return why the model has no tensor parallelism, and the fix; None if some number of ranks works."""

    def tensor_configs(self, size: int, precision: str) -> Iterator[dict[str, Any]]:
        """Yield the tensor modes for a number of ranks, as entries of a config; some may not fit the model."""

    @property
    def mixture(self) -> Mixture | None:
        """The model's layers of experts, which are alike; None if it has none."""

    def count(self, split: TensorSplit, part: ModelSlice) -> ParameterCount:
        """Return the parameter count of a rank, without distributed experts."""

    def count_experts(self, split: TensorSplit, part: ModelSlice) -> ParameterCount | None:
        """Return the parameter count of a rank's distributed experts; None without them."""

    def activations(
        self,
        split: TensorSplit,
        sequence: SequenceSplit,
        pipeline: PipelineCost,
        place: PipelineRank,
        job: TrainingJob,
        rows: int,
    ) -> tuple[float, float]:
        """Return the bytes saved for all microbatches in flight, and the bytes of logits.

        Args:
            split: The cut of the tensor mode.
            sequence: The cut of a row's tokens.
            pipeline: The pipeline.
            place: The rank's place in it.
            job: The job, of which precision and the documents of a row matter here.
            rows: Number of rows in a microbatch.
        """

    def attentions(self, split: TensorSplit, sequence: SequenceSplit, part: ModelSlice) -> Mapping[RankAttention, int]:
        """Return the different attentions of a rank, with the number of each.

        Args:
            split: The cut of the tensor mode.
            sequence: The cut of a row's tokens.
            part: Slice of the model on the rank.

        Raises:
            ValueError: The model's sequence cannot be cut.
        """

    @property
    def passes_states(self) -> bool:
        """Whether recurrent layers pass states along the sequence, so that ranks hold consecutive tokens."""

    def states(self, sequence: SequenceSplit, part: ModelSlice, job: TrainingJob) -> list[float]:
        """Return the bytes per row that each recurrent layer of a rank passes to the next sequence rank.

        Args:
            sequence: The cut of a row's tokens.
            part: Slice of the model on the rank.
            job: The job, of which precision and the documents of a row matter here.
        """

    def why_no_sequence_ranks(self) -> str | None:
        """Return why the sequence cannot be split, and the fix; None if it can."""

    def tensor_traffic(
        self,
        split: TensorSplit,
        numbers: NumberWidths,
        part: ModelSlice,
        microbatches: Mapping[int, int],
        replicas: ZeroSharding,
    ) -> list[AxisTraffic]:
        """Return the traffic over the tensor axis; arguments as in `costs.traffic.tensor_traffic`."""

    def flops(self, part: ModelSlice) -> tuple[float, float]:
        """Return the floating-point operations per token without attention, and of attention.

        The latter are those of a causal mask over a row of one document.
        """
