"""Errors instead of silently wrong results: for models that cannot be sharded, and for calls on a sharded model."""

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from par_groups import attributes

from ..modes.grid import Axes, Grid
from .hooks import Hook
from .linear import GatheredLogits
from .loss import VocabularyLoss, defer_logits
from .sequence import CutSequence


def check_whole(model: nn.Module) -> None:
    """Raise unless a model is unsharded on every rank and has no gradients.

    Raises:
        TypeError: The model is wrapped, is already sharded, or runs fused kernels.
        ValueError: A parameter has a gradient.
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
        # The attribute shows a DTensor without an import of its class.
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
    """Replacement of a method whose result would be silently wrong.

    Args:
        name: Name of the method.
        why: Reason and fix, the rest of the error message.
    """

    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise RuntimeError."""
        del args, kwargs
        raise RuntimeError(f"{self.name} {self.why}")


class NoShape:
    """Replacement of Transformers' early shape of a static cache: the first keys, of local heads, determine it."""

    def __call__(self) -> None:
        """Return None."""


def guard_(model: nn.Module, *, sharded_logits: bool) -> None:
    """Replace methods of a model, on the instance, that would be silently wrong after sharding.

    Args:
        model: A sharded model.
        sharded_logits: Whether its logits are always sharded, so that it cannot generate.
    """
    fix = "par_checkpoint.save(path, model=model)"
    if getattr(model, "peft_config", None):
        fix = "Strategy.save(model, path, plan='peft') of par-train"
    part = f"would write this rank's part alone; use {fix}"
    whole = "would make whole weights in a model that is cut; do it before parallelize"
    reasons = {
        "save_pretrained": part,
        "push_to_hub": part,
        "resize_token_embeddings": whole,
        "add_adapter": whole,
        "load_adapter": whole,
    }
    if sharded_logits:
        reasons["generate"] = "needs full logits, and this model was cut with logits='sharded'; use logits='auto'"
    for name, why in reasons.items():
        # The replacement is on the instance, so that other models of this class keep their method.
        if hasattr(type(model), name):
            model.__dict__[name] = Refusal(name, why)
    if hasattr(type(model), "_get_static_cache_init_shape"):
        model.__dict__["_get_static_cache_init_shape"] = NoShape()


class ModelEntry(Hook):
    """Hooks before and after the forward of the complete model.

    Args:
        grid: This rank's coordinates.
        axes: Axes of the tensor group.
        logits: Switch of the head, which gathers logits or not; None if the head needs no switch.
        labels: Position of `labels` among the model's arguments; None if the model has no such argument.
        switched: The loss over the vocabulary, if logits stay sharded exactly in training with labels; else None.
        is_loss_own: Whether the model's own code computes its loss, for which logits must be full.
        sequence: Switch for activations split along the sequence; None if they never are.
    """

    def __init__(
        self,
        grid: Grid,
        axes: Axes,
        *,
        logits: GatheredLogits | None,
        labels: int | None,
        switched: VocabularyLoss | None,
        is_loss_own: bool,
        sequence: CutSequence | None,
    ) -> None:
        super().__init__(grid, axes)
        self.logits, self.labels, self.sequence = logits, labels, sequence
        self.switched, self.is_loss_own = switched, is_loss_own
        if logits is not None:
            logits.watched = is_loss_own

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set both switches for this forward: logits stay sharded in training with labels.

        Raises:
            ValueError: The caller passes labels to a model that would compute its own loss from sharded logits.
        """
        if self.logits is not None and self.labels is not None:
            given = kwargs.get("labels", args[self.labels] if len(args) > self.labels else None)
            if self.switched is not None:
                # In evaluation and without labels the caller wants the logits themselves.
                self.logits.cut = module.training and given is not None
            elif self.is_loss_own and given is not None and self.logits.is_sharded:
                self._refuse_own_loss(module)
        if self.sequence is not None:
            self.sequence.begin(module)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Reset both switches, so that the head gathers logits when it is called without the model.

        Returns:
            The output, in which logits that stayed sharded are gathered when they are read.

        Raises:
            ValueError: The model's own code has computed a loss from sharded logits.
        """
        del args
        if self.sequence is not None:
            self.sequence.end(module)
        if self.logits is None:
            return output
        # Dropped here, because it would hold the graph of this forward.
        sharded, self.logits.latest = self.logits.latest, None
        if self.switched is not None:
            if self.logits.cut and not self.logits.held:  # inside `sharded_logits` the caller wants the shard
                output = defer_logits(output, self.switched)
            self.logits.cut = False
        if not self.is_loss_own or sharded is None or sharded.grad_fn is None:
            return output
        # Other scalars, such as losses of routers, are right, so the graph says which ones come from the logits.
        if _depend((each for each in _tensors_in(output) if each.dim() == 0 and each.grad_fn is not None), sharded):
            self._refuse_own_loss(module)
        return output

    def _refuse_own_loss(self, module: nn.Module) -> NoReturn:
        raise ValueError(
            f"{type(module).__name__} computes its loss itself, and its logits are sharded over the vocabulary on "
            f"{self.grid.size(self.axes)} ranks, so that each rank would get the loss of its own classes; pass "
            "logits='auto' to parallelize instead of 'sharded', or compute the loss by "
            "parallelization_of(model).cross_entropy(logits, labels)"
        )


class RequestedOutputs(Hook):
    """Check of the outputs that a caller requests: hidden states and attention weights can be shards.

    A caller may run a model without its head, or an encoder without its decoder. Each of these modules therefore has
    this hook, behind the hook that decides whether the forward splits activations along the sequence.

    Args:
        grid: This rank's coordinates.
        axes: Axes of the tensor group.
        sequence: Switch for activations split along the sequence; None if they never are.
        heads: Whether attentions are sharded by heads.
    """

    def __init__(self, grid: Grid, axes: Axes, *, sequence: CutSequence | None, heads: bool) -> None:
        super().__init__(grid, axes)
        self.sequence, self.heads = sequence, heads

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse outputs of which this rank has only a shard.

        Raises:
            ValueError: The caller requests hidden states, which are split along the sequence, or attention weights, of
                which this rank has only its own heads.
        """
        del args
        is_cut = self.sequence is not None and self.sequence.is_cut(module)
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


def _is_asked(output: str, model: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether a call requests an output, by a keyword argument or else by the model's config."""
    asked = kwargs.get(output)
    return bool(getattr(getattr(model, "config", None), output, False) if asked is None else asked)


def _tensors_in(output: Any) -> Iterator[Tensor]:
    """Yield the tensors of a model's output."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, dict | list | tuple):
        for value in output.values() if isinstance(output, dict) else output:
            yield from _tensors_in(value)


def _depend(tensors: Iterable[Tensor], on: Tensor) -> bool:
    """Return whether autograd would reach a tensor from any of the others."""
    # A loop and not a recursion: the graph of a deep model is deeper than Python's stack.
    pending = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set(pending)
    while pending:
        node = pending.pop()
        if node is on.grad_fn:
            return True
        found = [each for each, _ in node.next_functions if each is not None and each not in seen]  # type: ignore[union-attr]
        seen.update(found)
        pending += found
    return False
