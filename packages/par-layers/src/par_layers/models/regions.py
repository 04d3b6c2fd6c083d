"""Hooks of regions: they copy a region's input, or gather it along the sequence, once for all of its Columns."""

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._collectives import gather_from, scatter_to
from ..layers.dropout import draw_key
from ..modes.grid import Axes, Grid
from ..modes.product_1d import SEQUENCE
from .hooks import Hook
from .linear import RegionEntry
from .proof import Proof, is_provable
from .sequence import CutSequence


class Region(Hook):
    """Hooks before and after a region, a module with Columns as direct children.

    Args:
        grid: This rank's coordinates.
        axes: Axes of the tensor group.
        name: Name of the module, for messages.
        entry: Shared input of the Columns; None if each Column copies its own input.
        sequence: Switch for activations split along the sequence; None if they never are.
        inner_dropout: Whether code between entry and Row draws random numbers for sharded activations.
        proof: Check of the first forward with a gradient; None if the plan needs no check.
    """

    def __init__(
        self,
        grid: Grid,
        axes: Axes,
        name: str,
        *,
        entry: RegionEntry | None,
        sequence: CutSequence | None,
        inner_dropout: bool,
        proof: Proof | None,
    ) -> None:
        super().__init__(grid, axes)
        self.proof = proof
        self.name, self.entry, self.sequence, self.inner_dropout = name, entry, sequence, inner_dropout
        self.inside = False  # between the entry and the Row
        self._put_back: Callable[[], object] | None = None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Enter the first tensor, and copy all other tensors that need a gradient."""
        self.end_inner()  # of a call that raised
        gathering = self.sequence is not None and self.sequence.is_cut(module)
        proving = self.proof is not None and is_provable()
        if self.entry is not None or gathering or proving:
            positional, named = list(args), dict(kwargs)
            holder, key = first_tensor(module, positional, named, self.name)
            if self.proof is not None:
                self.proof.begin()
            # Other inputs, such as states for cross-attention, also reach the Columns, so their gradients are partial
            # sums, too.
            held: Any
            for held in (positional, named):
                for at in range(len(held)) if isinstance(held, list) else list(held):
                    if held is not holder or at != key:
                        held[at] = self._copied(held[at])
            holder[key] = self._entered(holder[key], gathering=gathering)
            if self.proof is not None and proving:
                holder[key] = self.proof.enter(holder[key])
                if gathering and self.entry is not None:
                    # The proof wraps the input in a new tensor, and the Columns recognise the region's input by
                    # identity.
                    self.entry.whole = holder[key]
            args, kwargs = tuple(positional), named
        self.inside = True
        if self.inner_dropout and module.training:
            self._begin_inner(_device(args, kwargs))
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the region, and check its graph once.

        Raises:
            ValueError: The plan would give wrong gradients in this region.
        """
        del args
        self.end_inner()
        if self.entry is not None:
            self.entry.leave()
        if self.proof is not None and is_provable():
            self.proof.check(module, output)
            # One proof is enough: the graph of a region is the same in every forward.
            self.proof = None

    def column(self, y: Tensor) -> None:
        """Register the output of a Column for the check.

        Args:
            y: The Column's output.
        """
        if self.proof is not None:
            self.proof.columns.append(y.grad_fn)

    def row(self, y: Tensor) -> None:
        """Register the output of the Row for the check, and end the sharded part of the region.

        Args:
            y: The Row's output.
        """
        self.end_inner()
        if self.proof is not None:
            self.proof.rows.append(y.grad_fn)

    def after_row(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End the sharded part of the region after an unconverted Row, on a tensor group of one rank."""
        del module, args, output
        self.end_inner()

    def end_inner(self) -> None:
        """Restore the random state of the tensor group: after the Row all ranks hold and draw the same values."""
        self.inside = False
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def _entered(self, x: Tensor, *, gathering: bool) -> Tensor:
        if self.entry is None:  # Each Column copies its own input, so the gradient that arrives here is full.
            return gather_from(x, self.grid.group(self.axes), SEQUENCE) if gathering else x
        if gathering:
            return self.entry.gather(x)
        return self.copy(x) if x.requires_grad else x

    def _copied(self, value: Any) -> Any:
        """Copy an additional input that needs a gradient, if the region's first input is copied, too."""
        if isinstance(value, Tensor) and value.requires_grad:
            copied = value if self.entry is None else self.copy(value)
            return copied if self.proof is None or not is_provable() else self.proof.enter(copied)
        if type(value) in (list, tuple):
            return type(value)(self._copied(item) for item in value)
        return value

    def _begin_inner(self, device: torch.device) -> None:
        """Seed each tensor rank differently, from one key that all ranks draw identically."""
        text = f"{draw_key().item()}/{self.grid.index(self.axes)}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        generator = torch.default_generator
        if device.type != "cpu":
            index = torch.accelerator.current_device_index() if device.index is None else device.index
            generator = torch.get_device_module(device).default_generators[index]
        # Ranks draw different dropout masks for their own features here, and must agree again after the Row.
        state = generator.get_state()
        generator.manual_seed(seed)
        self._put_back = lambda: generator.set_state(state) and None


class FullSequenceBlock(Hook):
    """Hooks of a module that runs on full sequences, such as experts or an open region with Rows.

    Args:
        grid: This rank's coordinates.
        axes: Axes of the tensor group.
        name: Name of the module, for messages.
        sequence: Switch for activations split along the sequence around the module.
    """

    def __init__(self, grid: Grid, axes: Axes, name: str, sequence: CutSequence) -> None:
        super().__init__(grid, axes)
        self.name, self.sequence = name, sequence
        self.rows = torch.Size()  # batch and length of what came in, between the two hooks of one call

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gather the first tensor along the sequence.

        Raises:
            ValueError: The tensor is not [B, S/p, ...].
        """
        if not self.sequence.is_cut(module):
            return args, kwargs
        return _with_first(module, args, kwargs, self.name, self._gathered)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return this rank's part of the sequence, of an output [B, S, ...] or [B S, h].

        Raises:
            ValueError: The output has another shape.
        """
        del args
        if not self.sequence.is_cut(module):
            return output
        output = of_first(output, self._scattered)
        if isinstance(output, (tuple, list)):
            # A block may return several activations, such as weights of a residual and the hidden states. Indices, such
            # as those of the tokens that sparse attention chose, are for attention, which sees the full sequence.
            first, *rest = output
            tensors = [isinstance(x, Tensor) and x.is_floating_point() and self._is_by_token(x) for x in rest]
            return type(output)(
                (first, *(self._scattered(x) if cut else x for x, cut in zip(rest, tensors, strict=True)))
            )
        return output

    def _is_by_token(self, x: Tensor) -> bool:
        return x.dim() > 2 and x.shape[:2] == self.rows

    def _gathered(self, x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise self._unknown("takes", x)
        whole = gather_from(x, self.grid.group(self.axes), SEQUENCE)
        self.rows = whole.shape[:2]
        return whole

    def _scattered(self, x: Tensor) -> Tensor:
        group = self.grid.group(self.axes)
        if self._is_by_token(x):
            return scatter_to(x, group, SEQUENCE)
        # Blocks of experts return their tokens flat, in the order in which they received them.
        if x.dim() == 2 and len(x) == self.rows.numel():
            return scatter_to(x.unflatten(0, self.rows), group, SEQUENCE).flatten(0, 1)
        raise self._unknown("gives", x)

    def _unknown(self, what: str, x: Tensor) -> ValueError:
        return ValueError(
            f"{self.name!r} {what} a tensor of shape {tuple(x.shape)}, whose sequence dim is unknown; it must be "
            "[batch, sequence, features] or [batch x sequence, features]: use sequence_parallel=False"
        )


class _EndOfLayers(Hook):
    """Hook at the first or the last layer.

    Args:
        grid: This rank's coordinates.
        axes: Axes of the tensor group.
        sequence: Switch for activations split along the sequence between the layers.
    """

    def __init__(self, grid: Grid, axes: Axes, sequence: CutSequence) -> None:
        super().__init__(grid, axes)
        self.sequence = sequence


class FirstLayer(_EndOfLayers):
    """Hook before the first layer that splits activations along the sequence."""

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keep this rank's part of the sequence.

        Raises:
            ValueError: The sequence does not divide by the ranks.
        """
        if not self.sequence.is_cut(module):
            return args, kwargs
        return _with_first(module, args, kwargs, "the first layer", self._cut)

    def _cut(self, x: Tensor) -> Tensor:
        ranks = self.grid.size(self.axes)
        if x.shape[SEQUENCE] % ranks:
            raise ValueError(
                f"the sequence has {x.shape[SEQUENCE]} tokens, which do not divide by {ranks} ranks; pad to a multiple "
                f"of {ranks}. To generate, call model.eval() and use torch.no_grad(): then nothing is cut"
            )
        return scatter_to(x, self.grid.group(self.axes), SEQUENCE)


class LastLayer(_EndOfLayers):
    """Hook that gathers activations along the sequence after the last layer."""

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Gather the output along the sequence."""
        del args
        if not self.sequence.is_cut(module):
            return output
        return of_first(output, lambda x: gather_from(x, self.grid.group(self.axes), SEQUENCE))


def first_tensor(module: nn.Module, args: Any, kwargs: dict[str, Any], name: str) -> tuple[Any, Any]:
    """Find the activations among a call's arguments: the first argument, `hidden_states`, or the first by name.

    Args:
        module: The called module.
        args: Positional arguments, in a list.
        kwargs: Keyword arguments.
        name: Name of the module, for the message.

    Returns:
        The list or dict, and the index or key in it.

    Raises:
        TypeError: None of these arguments is a tensor.
    """
    if args and isinstance(args[0], Tensor):
        return args, 0
    if isinstance(kwargs.get("hidden_states"), Tensor):
        return kwargs, "hidden_states"
    names = inspect.signature(type(module).forward).parameters
    first = next((key for key in names if key != "self"), None)
    if isinstance(kwargs.get(first or ""), Tensor):
        return kwargs, first
    raise TypeError(
        f"{name!r} was called without a tensor in its first argument, and without `hidden_states`, so nobody knows "
        "what enters it; call it with its activations first"
    )


def of_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the output of a layer with a function applied to its first tensor."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, (tuple, list)):
        first, *rest = output
        return type(output)((change(first), *rest))
    raise TypeError(f"a layer gave a {type(output).__name__}; only a tensor, or a tuple that begins with one, is known")


def _with_first(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    positional, named = list(args), dict(kwargs)
    holder, key = first_tensor(module, positional, named, name)
    holder[key] = change(holder[key])
    return tuple(positional), named


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    return next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
