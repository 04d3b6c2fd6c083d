"""What a model adds to the loss of its tokens, such as the balance of its routers, in a Trainer's step.

The Trainer divides the loss of each batch by the tokens of the whole step, which it passes as `num_items_in_batch`, and
adds up the batches of all data ranks and all accumulated parts. What a model adds to that loss is a mean already, so
the sum would have it once for each rank and each part.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from par_data import IGNORED

from .._torch_private import version_of
from ..strategy.pretrained.causal import pretrained_of

_Noted = tuple[Tensor, int, Tensor]
"""A loss, its version, and a copy of it to which nothing is added."""


class Additions:
    """Weighs additions by the part that a batch has of the tokens of its step.

    An addition is known as the difference between a model's loss and what its `loss_function` gave, whatever the model
    calls it and wherever its factor is kept.

    Args:
        pretrained: The model of transformers, whose `loss_function` is called once in a forward that adds to it.
        shifts: Whether the Trainer counts labels of the next token.
    """

    def __init__(self, pretrained: Any, *, shifts: bool) -> None:
        self._shifts = shifts
        self._losses: list[_Noted] = []
        pretrained.loss_function = _Noting(pretrained.loss_function, self._losses)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forgets what an earlier forward gave."""
        del module, args
        self._losses.clear()

    def after(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], outputs: Any) -> Any:
        """The outputs, with the loss that adds up to one device's."""
        del module, args
        items, labels = keywords.get("num_items_in_batch"), self._labels(keywords)
        if items is None or labels is None or len(self._losses) != 1:
            return outputs
        ((given, version, of_tokens),) = self._losses
        self._losses.clear()
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        if loss is given and version_of(loss) == version:  # nothing was added
            return outputs
        count = (labels != IGNORED).sum()
        weighed = of_tokens + (loss - of_tokens) * (count / items)
        if isinstance(outputs, Mapping):
            outputs["loss"] = weighed  # type: ignore[index]  # transformers' outputs are assigned to so
            return outputs
        return (weighed, *outputs[1:])

    def _labels(self, keywords: dict[str, Any]) -> Tensor | None:
        """The labels that the Trainer has counted."""
        shifted, labels = keywords.get("shift_labels"), keywords.get("labels")
        if shifted is not None or labels is None:
            return shifted
        own: Tensor = labels[..., 1:] if self._shifts else labels
        return own


class _Noting:
    """In the place of a model's `loss_function`: the same, and notes what it gave.

    Args:
        function: The function.
        losses: What it gave.
    """

    def __init__(self, function: Callable[..., Any], losses: list[_Noted]) -> None:
        self._function, self._losses = function, losses

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":  # while it is copied
            raise AttributeError(name)
        return getattr(self.__dict__["_function"], name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """The loss; models add to it in place, so that what is noted is another tensor."""
        loss = self._function(*args, **keywords)
        if isinstance(loss, Tensor):
            self._losses.append((loss, version_of(loss), loss.clone()))
        return loss


def weigh_additions_(model: nn.Module, *, shifts: bool) -> None:
    """Weighs what a model adds to the loss of its tokens, from now on, in forwards with `num_items_in_batch`.

    Args:
        model: What the Trainer calls: a model of transformers, or one with adapters around it.
        shifts: Whether the Trainer counts labels of the next token.
    """
    pretrained = pretrained_of(model)
    if pretrained is None or not hasattr(pretrained, "loss_function"):
        return
    additions = Additions(pretrained, shifts=shifts)
    model.register_forward_pre_hook(additions.before)
    model.register_forward_hook(additions.after, with_kwargs=True)
