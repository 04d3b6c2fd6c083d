"""Prove that a parallel run computed what one device computes, box by box."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from par_groups import Box, gradients, sharding_of

Tensors = torch.nn.Module | Mapping[str, torch.Tensor]


def assert_equal_to_one_device(
    parallel: Tensors,
    whole: Tensors,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    reason: str | None = None,
    gradients: bool = False,
) -> None:
    """Compares every tensor of this rank with the part of the whole tensor that it is a shard of.

    `parallel` may hold fewer names than `whole`, as a pipeline stage does. Nothing is communicated: every rank compares
    what it holds.

    Args:
        parallel: The module of this rank, or its tensors by name.
        whole: The module on one device, or its tensors, by the same names.
        rtol: Tolerated difference, relative to the one device's value.
        atol: Tolerated difference, absolute.
        reason: Why the results may differ at all; needed when a tolerance is not 0.
        gradients: Compare the gradients of the tensors instead of their values.

    Raises:
        ValueError: A tolerance without a reason, nothing to compare, or a name that `whole` lacks.
        AssertionError: A difference; the message names the tensor, the box, and where they differ most.
    """
    tolerance = _Tolerance(rtol, atol, reason)
    here, there = _named(parallel), _named(whole)
    _validate(here, there, tolerance)
    for piece in _pieces_of_gradients(here, there) if gradients else _pieces_of_values(here, there):
        _compare(piece, tolerance)


@dataclass(frozen=True)
class _Tolerance:
    rtol: float
    atol: float
    reason: str | None

    def __str__(self) -> str:
        if not (self.rtol or self.atol):
            return "must be equal exactly"
        return f"rtol={self.rtol}, atol={self.atol}: {self.reason}"


@dataclass(frozen=True)
class _Piece:
    """One box: the shard's view of it, and the one device's tensor from which it is cut."""

    name: str
    box: Box
    shard: torch.Tensor
    whole: torch.Tensor


def _validate(here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor], tolerance: _Tolerance) -> None:
    if tolerance.rtol < 0 or tolerance.atol < 0:
        raise ValueError(f"rtol={tolerance.rtol}, atol={tolerance.atol}: a tolerance is not negative")
    if (tolerance.rtol or tolerance.atol) and not tolerance.reason:
        raise ValueError(
            f"rtol={tolerance.rtol}, atol={tolerance.atol} without a reason: say why the parallel result may differ, "
            'such as reason="the all-reduce adds in another order"'
        )
    if not here:
        raise ValueError("the parallel side has no tensor: there is nothing to compare")
    if unknown := sorted(here.keys() - there.keys()):
        raise ValueError(f"one device has no tensor called {unknown}; it has {sorted(there)}")


def _named(tensors: Tensors) -> dict[str, torch.Tensor]:
    """A module's parameters and buffers, with every name of a shared one."""
    if isinstance(tensors, torch.nn.Module):
        parameters = tensors.named_parameters(remove_duplicate=False)
        return {**dict(parameters), **dict(tensors.named_buffers(remove_duplicate=False))}
    return dict(tensors)


def _pieces_of_values(here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor]) -> Iterator[_Piece]:
    for name, tensor in here.items():
        sharding = sharding_of(tensor)
        if sharding.shape != tuple(there[name].shape):
            raise AssertionError(
                f"{name}: a tensor of shape {sharding.shape}, but on one device of shape {tuple(there[name].shape)}"
            )
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for box in sharding.boxes:
            yield _Piece(name, box, box.of(local.detach()), there[name].detach())


def _pieces_of_gradients(here: Mapping[str, torch.Tensor], there: Mapping[str, torch.Tensor]) -> Iterator[_Piece]:
    for name, tensor in here.items():
        if (tensor.grad is None) != (there[name].grad is None):
            sides = ("on one device", "here") if tensor.grad is None else ("here", "on one device")
            raise AssertionError(f"{name}: there is a gradient {sides[0]}, but none {sides[1]}")
    whole = {name: tensor.grad.detach() for name, tensor in there.items() if tensor.grad is not None}
    for name, box, shard in gradients(here.items()):
        yield _Piece(name, box, shard.detach(), whole[name])


def _compare(piece: _Piece, tolerance: _Tolerance) -> None:
    whole = piece.whole[piece.box.slices].to(piece.shard.device)
    if piece.shard.dtype != whole.dtype:
        raise AssertionError(f"{piece.name}: {piece.shard.dtype} here, {whole.dtype} on one device")
    wide = torch.complex128 if whole.is_complex() else torch.float64 if whole.is_floating_point() else torch.int64
    difference = (piece.shard.to(wide) - whole.to(wide)).abs()
    fine = (difference <= tolerance.atol + tolerance.rtol * whole.to(wide).abs()) | (piece.shard == whole)
    if not fine.all():
        raise AssertionError(_describe(piece, whole, difference, fine, tolerance))


def _describe(
    piece: _Piece, whole: torch.Tensor, difference: torch.Tensor, fine: torch.Tensor, tolerance: _Tolerance
) -> str:
    # A difference that is no number is the worst of all.
    ranked = difference.double().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(fine, -1.0)
    worst = torch.unravel_index(ranked.argmax(), ranked.shape)
    place = [start + int(index) for start, index in zip(piece.box.start, worst, strict=True)]
    box = ", ".join(f"{part.start}:{part.stop}" for part in piece.box.slices)
    return (
        f"{piece.name}: box [{box}] of {tuple(piece.whole.shape)} differs from one device in "
        f"{int((~fine).sum())} of {fine.numel()} elements, at most by {difference[worst].item():.6g} at {place}: "
        f"{piece.shard[worst].item():.9g} here, {whole[worst].item():.9g} on one device ({tolerance})"
    )
