"""The auxiliary losses of a model, such as load balancing, in the training step of a Trainer.

The Trainer divides the loss of each batch by the tokens of the whole step, which it passes as `num_items_in_batch`, and
sums over the batches of all data ranks and all accumulated microbatches. An auxiliary loss that the model adds is a
mean already, so the sum would count it once for each rank and each microbatch.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from .._torch_private import version_of
from .causal import IGNORE_INDEX, pretrained_of

_Recorded = tuple[Tensor, int, Tensor]
"""A loss, its version counter, and a copy of it to which nothing is added."""


class AuxiliaryLosses:
    """Forward hooks that weigh auxiliary losses by the batch's part of the tokens of the step.

    An auxiliary loss is the difference between the model's loss and the result of its `loss_function`, under whatever
    name the model keeps it and its coefficient.

    Args:
        pretrained: The transformers model. A forward that adds auxiliary losses calls its `loss_function` once.
        shifts: Whether the Trainer counts labels of the next token.
    """

    def __init__(self, pretrained: Any, *, shifts: bool) -> None:
        self._shifts = shifts
        self._losses: list[_Recorded] = []
        pretrained.loss_function = _RecordingLoss(pretrained.loss_function, self._losses)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Drop the losses of an earlier forward."""
        del module, args
        self._losses.clear()

    def after(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], outputs: Any) -> Any:
        """Return the outputs with a loss that sums up to the loss of one device."""
        del module, args
        items, labels = keywords.get("num_items_in_batch"), self._labels(keywords)
        # Only after exactly one call of the loss function it is known which part of the loss is one of tokens.
        if items is None or labels is None or len(self._losses) != 1:
            return outputs
        ((given, version, of_tokens),) = self._losses
        self._losses.clear()
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        # Models add to the loss in place, or make a new one of it; either is seen here.
        if loss is given and version_of(loss) == version:  # nothing was added
            return outputs
        count = (labels != IGNORE_INDEX).sum()
        weighed = of_tokens + (loss - of_tokens) * (count / items)
        if isinstance(outputs, Mapping):
            outputs["loss"] = weighed  # type: ignore[index]  # transformers' outputs allow assignment
            return outputs
        return (weighed, *outputs[1:])

    def _labels(self, keywords: dict[str, Any]) -> Tensor | None:
        """Return the labels that the Trainer has counted."""
        shifted, labels = keywords.get("shift_labels"), keywords.get("labels")
        if shifted is not None or labels is None:
            return shifted
        own: Tensor = labels[..., 1:] if self._shifts else labels
        return own


class _RecordingLoss:
    """A model's `loss_function` that records its results.

    Args:
        function: The function, also as `__wrapped__`, so that `inspect.unwrap` finds it.
        losses: The list to record in.
    """

    def __init__(self, function: Callable[..., Any], losses: list[_Recorded]) -> None:
        self.__wrapped__, self._losses = function, losses

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # while a copy has no attributes yet
            raise AttributeError(name)
        return getattr(self.__dict__["__wrapped__"], name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return the loss. Models add to it in place, so a copy is recorded."""
        loss = self.__wrapped__(*args, **keywords)
        if isinstance(loss, Tensor):
            self._losses.append((loss, version_of(loss), loss.clone()))
        return loss


def weigh_auxiliary_losses_(model: nn.Module, *, shifts: bool) -> None:
    """Weigh the auxiliary losses of a model from now on, in forwards that receive `num_items_in_batch`.

    Args:
        model: The model that the Trainer calls: a transformers model, or one with adapters around it.
        shifts: Whether the Trainer counts labels of the next token.
    """
    pretrained = pretrained_of(model)
    if pretrained is None or not hasattr(pretrained, "loss_function"):
        return
    losses = AuxiliaryLosses(pretrained, shifts=shifts)
    model.register_forward_pre_hook(losses.before)
    model.register_forward_hook(losses.after, with_kwargs=True)
