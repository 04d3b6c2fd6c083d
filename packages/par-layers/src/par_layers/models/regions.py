"""Regions while they run: what enters is copied, or gathered along the sequence, once for all that is inside."""

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
    """The entry and the end of a module that directly holds Columns.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
        name: The name of the module, for messages.
        entry: What its columns share; None where each of them copies its input for itself.
        sequence: Says whether activations around it are cut along the sequence; None where they never are.
        inner_dropout: Whether code between entry and Row draws random numbers for what is cut over the ranks.
        proof: Looks at the first forward with a gradient; None where nothing can be wrong.
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
        """Enters the first tensor, and copies every other one that a gradient may go back to."""
        self.end_inner()  # of a call that raised
        gathering = self.sequence is not None and self.sequence.is_cut(module)
        proving = self.proof is not None and is_provable()
        if self.entry is not None or gathering or proving:
            positional, named = list(args), dict(kwargs)
            holder, key = first_tensor(module, positional, named, self.name)
            if self.proof is not None:
                self.proof.begin()
            held: Any
            for held in (positional, named):
                for at in range(len(held)) if isinstance(held, list) else list(held):
                    if held is not holder or at != key:
                        held[at] = self._copied(held[at])
            holder[key] = self._entered(holder[key], gathering=gathering)
            if self.proof is not None and proving:
                holder[key] = self.proof.enter(holder[key])
                if gathering and self.entry is not None:
                    self.entry.whole = holder[key]
            args, kwargs = tuple(positional), named
        self.inside = True
        if self.inner_dropout and module.training:
            self._begin_inner(_device(args, kwargs))
        return args, kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends the region.

        Raises:
            ValueError: The plan would give wrong gradients here.
        """
        del args
        self.end_inner()
        if self.entry is not None:
            self.entry.leave()
        if self.proof is not None and is_provable():
            self.proof.check(module, output)
            self.proof = None

    def column(self, y: Tensor) -> None:
        """What a Column of the module gave.

        Args:
            y: The Column's output.
        """
        if self.proof is not None:
            self.proof.columns.append(y.grad_fn)

    def row(self, y: Tensor) -> None:
        """What the module's Row gave.

        Args:
            y: The Row's output.
        """
        self.end_inner()
        if self.proof is not None:
            self.proof.rows.append(y.grad_fn)

    def after_row(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The end of a linear that is a Row, where one rank is alone and it stays what it was."""
        del module, args, output
        self.end_inner()

    def end_inner(self) -> None:
        """From the Row on, all ranks have the same again, and draw the same random numbers."""
        self.inside = False
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def _entered(self, x: Tensor, *, gathering: bool) -> Tensor:
        if self.entry is None:  # its columns copy; the gradient that comes back here is whole
            return gather_from(x, self.grid.group(self.axes), SEQUENCE) if gathering else x
        if gathering:
            return self.entry.gather(x)
        return self.copy(x) if x.requires_grad else x

    def _copied(self, value: Any) -> Any:
        """What comes in beside the first tensor; where that is entered, so are those that a gradient may go back to."""
        if isinstance(value, Tensor) and value.requires_grad:
            copied = value if self.entry is None else self.copy(value)
            return copied if self.proof is None or not is_provable() else self.proof.enter(copied)
        if type(value) in (list, tuple):
            return type(value)(self._copied(item) for item in value)
        return value

    def _begin_inner(self, device: torch.device) -> None:
        """Other random numbers on each tensor rank, from a key that all of them draw alike."""
        text = f"{draw_key().item()}/{self.grid.index(self.axes)}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
        generator = torch.default_generator
        if device.type != "cpu":
            index = torch.accelerator.current_device_index() if device.index is None else device.index
            generator = torch.get_device_module(device).default_generators[index]
        state = generator.get_state()
        generator.manual_seed(seed)
        self._put_back = lambda: generator.set_state(state) and None


class FullSequenceBlock(Hook):
    """A module inside which everything is as without sequence parallelism: experts, open regions with Rows, others.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
        name: The name of the module, for messages.
        sequence: Says whether activations around it are cut along the sequence.
    """

    def __init__(self, grid: Grid, axes: Axes, name: str, sequence: CutSequence) -> None:
        super().__init__(grid, axes)
        self.name, self.sequence = name, sequence
        self.rows = torch.Size()  # batch and length of what came in, between the two hooks of one call

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Gathers the first tensor along the sequence.

        Raises:
            ValueError: It is not [B, S/p, ...].
        """
        if not self.sequence.is_cut(module):
            return args, kwargs
        return _with_first(module, args, kwargs, self.name, self._gathered)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """This rank's part of the sequence, of an output [B, S, ...] or [B S, h].

        Raises:
            ValueError: The output is neither.
        """
        del args
        if not self.sequence.is_cut(module):
            return output
        return of_first(output, self._scattered)

    def _gathered(self, x: Tensor) -> Tensor:
        if x.dim() < 3:
            raise self._unknown("takes", x)
        whole = gather_from(x, self.grid.group(self.axes), SEQUENCE)
        self.rows = whole.shape[:2]
        return whole

    def _scattered(self, x: Tensor) -> Tensor:
        group = self.grid.group(self.axes)
        if x.dim() > 2 and x.shape[:2] == self.rows:
            return scatter_to(x, group, SEQUENCE)
        if x.dim() == 2 and len(x) == self.rows.numel():
            return scatter_to(x.unflatten(0, self.rows), group, SEQUENCE).flatten(0, 1)
        raise self._unknown("gives", x)

    def _unknown(self, what: str, x: Tensor) -> ValueError:
        return ValueError(
            f"{self.name!r} {what} a tensor of shape {tuple(x.shape)}, of which nobody knows where the sequence is: it "
            "may be [batch, sequence, features], or be given as [batch x sequence, features]; use "
            "sequence_parallel=False"
        )


class _EndOfLayers(Hook):
    """One end of the layers.

    Args:
        grid: This rank's place.
        axes: The axes of the tensor group.
        sequence: Says whether activations between the layers are cut along the sequence.
    """

    def __init__(self, grid: Grid, axes: Axes, sequence: CutSequence) -> None:
        super().__init__(grid, axes)
        self.sequence = sequence


class FirstLayer(_EndOfLayers):
    """Before the first layer, activations are cut along the sequence."""

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Keeps this rank's part of the sequence.

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
    """After the last layer, activations are whole again."""

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Gathers along the sequence."""
        del args
        if not self.sequence.is_cut(module):
            return output
        return of_first(output, lambda x: gather_from(x, self.grid.group(self.axes), SEQUENCE))


def first_tensor(module: nn.Module, args: Any, kwargs: dict[str, Any], name: str) -> tuple[Any, Any]:
    """Where the activations are among the arguments: the first one, else `hidden_states`, else the first by name.

    Args:
        module: The module that is called.
        args: Its positional arguments, in a list.
        kwargs: Its keyword arguments.
        name: Its name, for the message.

    Returns:
        The list or dict, and the place in it.

    Raises:
        TypeError: There is no tensor in any of these places.
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
    """The output of a layer, its first tensor changed."""
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
