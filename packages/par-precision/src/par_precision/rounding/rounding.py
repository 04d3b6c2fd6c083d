"""Stochastic rounding of fp32 values, with random numbers that depend on the element alone, not on who holds it.

A value between two neighbours of the target's grid becomes the upper one with the probability of its distance from the
lower one. So the mean of many roundings is the value, and updates too small for round-to-nearest are not lost.
"""

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn

from par_groups import Segment, Segments, segments_of, whole

from .._dtensor import local_part
from . import tiles
from .matrices import DROPPED, Matrix, keys_of, matrices_of

ORDINARY = (Tensor, nn.Parameter)
"""Types of tensors that say of themselves only what stands in `__dict__`."""


class Rounding(NamedTuple):
    """A tensor to be rounded.

    Args:
        target: bf16 or fp16, of any shape.
        source: fp32, laid out like the target.
        packed: Segments of the target, or the name of an unsharded tensor.
        suffix: Added to names.
    """

    target: Tensor
    source: Tensor
    packed: Segments | str
    suffix: str = ""


@torch.no_grad()
def stochastic_round_(target: Tensor, source: Tensor, seed: int, step: int, *, name: str = "") -> None:
    """Write fp32 values into a bf16 or fp16 tensor, each rounded up or down at random, without bias.

    The random number of an element is a hash of (seed, step, name, index in the unsharded tensor). It is identical on
    every replica and for every sharding. The target may be a plain tensor, a DTensor, a tensor with a `Sharding`, or a
    flat tensor with `Segments`; elements outside its boxes stay unchanged. Elements of one tensor whose indices differ
    by 2**32 share a random number.

    A value that the target can represent stays unchanged, as do NaN and infinities. The upper neighbour of the largest
    finite number is infinity: a finite value above that number becomes infinite with the usual probability. An fp16
    target rounds all values from 65536 on to infinity, and values below 2**-38 to zero.

    Args:
        target: bf16 or fp16, of any shape.
        source: fp32, laid out like the target.
        seed: Seed of the run, the same on all ranks.
        step: Number of the training step. Another step has other random numbers.
        name: The parameter's name in the uncut model. Tensors of equal names share random numbers. Unused if the target
            has `Segments`, which have names.

    Raises:
        TypeError: Another dtype of target or source.
        ValueError: Shapes or devices that differ.

    Source: Gupta et al. 2015, "Deep Learning with Limited Numerical Precision", section 3 (the rounding); the hash is
        C. Wellons' "lowbias32", keyed, without the last shift, since only upper bits of it are used.
    """
    if target.dtype not in DROPPED:
        raise TypeError(f"the target has dtype {target.dtype}; stochastic rounding writes bfloat16 or float16")
    if source.dtype != torch.float32:
        raise TypeError(f"the source has dtype {source.dtype}; stochastic rounding reads float32: call .float()")
    if target.shape != source.shape:
        raise ValueError(f"target {tuple(target.shape)} and source {tuple(source.shape)} must have the same shape")
    if target.device != source.device:
        raise ValueError(f"the target is on {target.device}, the source on {source.device}; move one to the other")
    plain = type(target) is Tensor and not target.__dict__ and target.numel()
    if plain and target.is_contiguous() and source.is_contiguous():  # what the other way comes to, sooner
        rounds_on(target.device)([Matrix(target, source, 0, None, keys_of(seed, step, name))])
    else:
        round_all_([Rounding(target, source, packed_in(target, name))], seed, step)


@torch.no_grad()
def round_all_(roundings: Iterable[Rounding], seed: int, step: int) -> None:
    """Round many tensors as `stochastic_round_` rounds one; those on a GPU share one kernel."""
    by_device: dict[torch.device, list[Matrix]] = {}
    for target, source, packed, suffix in roundings:
        into, given = local_part(target), local_part(source)
        matrices = by_device.setdefault(into.device, [])
        if isinstance(packed, str) and into.is_contiguous() and given.is_contiguous():  # the usual one, quickly
            if into.numel():
                matrices.append(Matrix(into, given, 0, None, keys_of(seed, step, packed + suffix)))
        else:
            segments = Segments([Segment(packed, whole(into.shape, ()))]) if isinstance(packed, str) else packed
            matrices.extend(matrices_of(into, given, segments, suffix, seed, step))
    for device, matrices in by_device.items():
        rounds_on(device)(matrices)


def packed_in(tensor: Tensor, name: str) -> Segments | str:
    """Return the segments that a tensor packs.

    For an ordinary tensor without metadata only its name, which is faster.
    """
    return name if type(tensor) in ORDINARY and not tensor.__dict__ else segments_of(tensor, name)


def rounds_on(device: torch.device) -> Callable[[Sequence[Matrix]], None]:
    """Return the function that rounds matrices on a device: a Triton kernel on a GPU if possible, else torch's ops."""
    if device.type == "cuda" and find_spec("triton"):
        from .triton import round_matrices_  # noqa: PLC0415 - it imports Triton

        return round_matrices_
    return tiles.round_matrices_
