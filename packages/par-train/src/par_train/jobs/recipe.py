"""`Recipe`: the properties of a model that a job needs. The trainer knows everything else."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ..strategy.execute import Criterion
from ..strategy.strategy import Strategy

BatchDict = Mapping[str, Tensor]


class Recipe(ABC):
    """A model to train: how to make it, call it, describe it and save it.

    Attributes:
        title: Title of the loss curve and name of the model in the banner.
        unit: Name of a token, which the loss is a mean over: "byte" or "token".
        source_digest: Hash of the model that training starts from; "" for the byte GPT.
    """

    title: str
    unit: str
    source_digest: str

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

    def parts(self, model: nn.Module) -> dict[str, Any]:
        """Return the keywords with which par-checkpoint saves and loads the weights."""
        return {"model": model}

    @abstractmethod
    def files(self, model: nn.Module) -> AbstractContextManager[dict[str, Any]]:
        """Yield the keywords of `par_checkpoint.Format` for files next to the weights. Collective."""

    def write_samples(self, strategy: Strategy, model: nn.Module) -> list[dict[str, str]]:
        """Generate texts, each as "prompt" and "text". Collective."""
        del strategy, model
        return []
