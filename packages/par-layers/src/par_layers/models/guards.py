"""What would be silently wrong is refused: models that cannot be cut, and calls on one that was."""

from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from par_groups import attributes

from ..modes.grid import Axes, Grid
from .hooks import Hook
from .linear import GatheredLogits
from .sequence import CutSequence


def check_whole(model: nn.Module) -> None:
    """Raises unless a model is whole on every rank, and nobody has begun to train it.

    Raises:
        TypeError: It is wrapped, or cut by others, or it runs fused kernels.
        ValueError: It has gradients.
    """
    who = type(model).__name__
    if isinstance(model, DistributedDataParallel):
        raise TypeError("this is a DistributedDataParallel; cut the model inside first, and wrap what comes of it")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise TypeError(
            f"transformers has cut this {who} (tp_size={model._tp_size}); load it without distributed_config"
        )
    if getattr(model, "use_kernels", False) is True:
        raise TypeError(f"this {who} runs fused kernels, which have no cut form; load it with use_kernels=False")
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "placements"):
            raise TypeError(
                f"parameter {name!r} is a DTensor: FSDP2 or transformers has cut this {who}; cut it here first, and "
                "shard it with par-zero"
            )
        if attributes.SHARDING.is_on(parameter):
            raise TypeError(f"parameter {name!r} has a record already: {who} is, or holds, a model that was cut")
        if parameter.grad is not None:
            raise ValueError(f"parameter {name!r} has a gradient of the whole model; cut the model before its backward")


class Refusal:
    """In the place of a method that would be silently wrong.

    Args:
        name: The name of the method.
        why: Why, and what to do.
    """

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises RuntimeError."""
        del args, kwargs
        raise RuntimeError(f"{self.name} {self.why}")


class NoShape:
    """In the place of transformers' early shape of a static cache, which is then made with the first keys."""

    def __call__(self) -> None:
        """Nothing."""


def guard_(model: nn.Module, *, cut_logits: bool) -> None:
    """Refuses, on the instance, calls that would be silently wrong.

    Args:
        model: A model that was cut.
        cut_logits: Whether its logits are always cut, so that it cannot generate.
    """
    part = "would write this rank's part alone; use par_checkpoint.save(path, model=model)"
    whole = "would make whole weights in a model that is cut; do it before parallelize"
    reasons = {
        "save_pretrained": part,
        "push_to_hub": part,
        "resize_token_embeddings": whole,
        "add_adapter": whole,
        "load_adapter": whole,
    }
    if cut_logits:
        reasons["generate"] = "needs whole logits, and this model was cut with logits='cut'; use logits='auto'"
    for name, why in reasons.items():
        if hasattr(type(model), name):
            model.__dict__[name] = Refusal(name, why)
    if hasattr(type(model), "_get_static_cache_init_shape"):
        model.__dict__["_get_static_cache_init_shape"] = NoShape()


class ModelEntry(Hook):
    """The beginning and the end of a forward of the whole model.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
        logits: What the head is told; None where it always does the same.
        labels: The position of `labels` among the arguments of the model; None if it has none.
        sequence: Says whether activations between the layers are cut along the sequence; None where they never are.
        heads: Whether attentions are cut by heads.
    """

    def __init__(
        self,
        grid: Grid,
        axes: Axes,
        *,
        logits: GatheredLogits | None,
        labels: int | None,
        sequence: CutSequence | None,
        heads: bool,
    ) -> None:
        super().__init__(grid, axes)
        self.logits, self.labels, self.sequence, self.heads = logits, labels, sequence, heads

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Says whether logits stay cut, where labels come in training, and whether activations are cut.

        Raises:
            ValueError: Hidden states of all layers are asked for, which are cut along the sequence, or the weights of
                attentions, of which this rank has those of its own heads.
        """
        if self.logits is not None and self.labels is not None:
            given = kwargs.get("labels", args[self.labels] if len(args) > self.labels else None)
            self.logits.cut = module.training and given is not None
        is_cut = False
        if self.sequence is not None:
            self.sequence.begin(module)
            is_cut = self.sequence.is_cut(module)
        if is_cut and _is_asked("output_hidden_states", module, kwargs):
            raise ValueError(
                "output_hidden_states=True gives activations that are cut along the sequence; call model.eval() "
                "and use torch.no_grad(), or use sequence_parallel=False"
            )
        if self.heads and _is_asked("output_attentions", module, kwargs):
            raise ValueError(
                f"output_attentions=True gives the heads of this rank alone, one of {self.grid.size(self.axes)} ranks; "
                "ask the whole model on one device for them"
            )

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends what was said for this forward: called alone, the head gives whole logits."""
        del args, output
        if self.logits is not None and self.labels is not None:
            self.logits.cut = False
        if self.sequence is not None:
            self.sequence.end(module)


def _is_asked(output: str, model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Whether a call of a model asks for an output, in its keywords, or else by its config."""
    asked = kwargs.get(output)
    return bool(getattr(getattr(model, "config", None), output, False) if asked is None else asked)
