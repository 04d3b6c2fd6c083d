"""`Recipe` and `JobData`: what a job needs of a model and of its rows. The trainer knows everything else."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from par_checkpoint import Format
from par_data import MixtureDataset, PackedDataset

from ..strategy.execute import Criterion
from ..strategy.strategy import Strategy

BatchDict = Mapping[str, Tensor]
Rows = PackedDataset | MixtureDataset


@dataclass(frozen=True, kw_only=True)
class JobData:
    """Rows of tokens, the same on every rank.

    Args:
        train: Rows to train on.
        held_out: Rows to validate on.
        context: Tokens in a row.
        vocabulary: Number of tokens that the tokenizer has.
        digest: Hash of all tokens and documents, which differs for other data.
        names: Paths of the data as the user wrote them, for messages.
        summary: Lines that describe the data in the banner.
        formats: Formats of the documents: "text", "jsonl" or "chat".
    """

    train: Rows
    held_out: Rows
    context: int
    vocabulary: int
    digest: str
    names: tuple[str, ...]
    summary: tuple[str, ...]
    formats: frozenset[str] = field(default_factory=lambda: frozenset({"text"}))


class Recipe(ABC):
    """A model to train: how to make it, call it, describe it and save it.

    Attributes:
        title: Title of the loss curve and name of the model in the banner.
        unit: Name of a token, which the loss is a mean over: "byte" or "token".
        source_digest: Hash of the model that training starts from; "" for the byte GPT.
        plan: "peft" if checkpoints have adapters only, otherwise "huggingface".
    """

    title: str
    unit: str
    source_digest: str
    plan: str = "huggingface"

    @abstractmethod
    def make_model(self, strategy: Strategy) -> nn.Module:
        """Make this rank's part of the model. Collective."""

    @abstractmethod
    def prepare(self, batch: BatchDict) -> tuple[Any, Criterion | None]:
        """Turn a collated batch of complete rows, or one that the loader split, into arguments of `execute_pipeline`.

        Returns:
            The batch and the criterion; None stands for the model's own causal loss.
        """

    @abstractmethod
    def describe(self) -> Sequence[str]:
        """Return the lines of the banner that describe the model, except for its name and size."""

    @property
    @abstractmethod
    def flops(self) -> float | None:
        """Operations for one token, forward and backward, with causal attention at half; None if no formula exists."""

    @abstractmethod
    def kept_options(self) -> dict[str, Any]:
        """Return the options that must stay the same when a run resumes, by name."""

    @abstractmethod
    def format(self, model: nn.Module, held: ExitStack) -> Format:
        """Return the format of checkpoints, with the files next to the weights. Collective.

        Args:
            model: This rank's part of the model.
            held: Stack that keeps temporary files until the end of the run.
        """

    def write_samples(self, strategy: Strategy, model: nn.Module) -> list[dict[str, str]]:
        """Generate texts, each as "prompt" and "text". Collective."""
        del strategy, model
        return []
