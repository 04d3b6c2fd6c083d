"""Arguments of a context: tensors of a batch and their split, agreement of the ranks, and checks of q, k and v."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import Axes, ProcessGroups, agree, check_alike

from .tokens import Tokens

TARGETS = frozenset({"targets", "labels", "shift_labels"})


def token_dims(batch: Any, names: Any, dims: Mapping[Any, int | None], shift: Sequence[Any]) -> dict[Any, int]:
    """Return the token dim of each tensor of a batch that has one."""
    for name in (*dims, *shift):
        if name not in names:
            raise ValueError(f"there is no {name!r} in the batch; it has {list(names)}")
    along = {}
    for name in names:
        x, dim = batch[name], dims.get(name, 1)
        if not isinstance(x, Tensor) or dim is None:
            continue
        if not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{name!r} is {list(x.shape)} and has no dim {dim} of tokens; name it, dims={{{name!r}: ...}}, or "
                f"leave the tensor whole, dims={{{name!r}: None}}"
            )
        along[name] = dim % x.dim()
    for name in shift:
        if name not in along:
            raise ValueError(f"{name!r} cannot be shifted: it has no tokens")
    if not along:
        raise ValueError(f"no tensor of the batch has tokens, of {list(names)}; give one to cut, [B, length, ...]")
    return along


def row_size(batch: Any, along: dict[Any, int]) -> tuple[int, int]:
    """Return the number of tokens of a row, and the number of rows."""
    lengths = {name: batch[name].shape[dim] for name, dim in along.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"tensors of the batch have different lengths: {lengths}; name the dim of tokens in dims=")
    # A tensor whose token dim is 0, such as [length], has no dim of rows.
    rows = [batch[name].shape[0] for name, dim in along.items() if dim > 0]
    return next(iter(lengths.values())), rows[0] if rows else 1


def next_tokens(whole: Tensor, following: Tensor, dim: int) -> Tensor:
    """Return the next token of the same document for each local token; -100 for the last token.

    Args:
        whole: Whole rows [B, ..., length, ...].
        following: The place of the next token, -1 where there is none, int64 [B or 1, s].
        dim: The dim of the tokens.
    """
    last = whole.movedim(dim, -1)  # [B, ..., length]
    # Documents may be equal for all rows, so the index broadcasts over the batch and over all dims between rows and
    # tokens.
    places = following.view(following.shape[0], *[1] * (last.dim() - 2), -1) if last.dim() > 1 else following[0]
    places = places.expand(*last.shape[:-1], -1)
    # A gather cannot index -1, so the last token of a document reads any value first and is overwritten.
    found = last.gather(-1, places.clamp_min(0)).masked_fill(places < 0, -100)
    return found.movedim(-1, dim)


def own_tokens(full: Tensor, index: Tensor, dim: int, tokens: Tokens, fill: int) -> Tensor:
    """Return this rank's tokens of full rows.

    Args:
        full: Full rows, [B, ..., length, ...].
        index: Positions of this rank's tokens in the padded row, int64 [s].
        dim: Dimension of the tokens.
        tokens: Split of the rows.
        fill: Value of padding tokens; floating-point tensors are padded with zero.
    """
    # Padding has positions behind the last token. It reads the last token first and is overwritten below.
    own = full.index_select(dim, index.clamp_max(tokens.length - 1))
    if tokens.padded > tokens.length:
        empty = (index >= tokens.length).view(-1, *[1] * (full.dim() - 1 - dim))
        own.masked_fill_(empty, 0 if full.is_floating_point() else fill)
    return own


def agree_on_batch(
    problem: Exception | None,
    said: str,
    content: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Raise on every rank of a sequence if one rank has a problem, or if they are about to split different batches.

    It is one all-reduce of five integers. Only if they differ do the ranks exchange texts to name what differs.

    Args:
        problem: Error of this rank, or None.
        said: Description of the batch and its split.
        content: Tensors of the batch, whose integers are compared by their sum.
        group: Process group of the sequence; None for one rank.
        device: Device of the group's collectives.
    """
    if group is None:
        if problem is not None:
            raise problem
        return
    text = "" if problem is not None else said
    # Halving keeps the hash positive in int64, so that its negative is exact as well.
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
    # One MAX all-reduce gives both the largest value and, by the negated copies, the smallest. All ranks agree exactly
    # if the two are equal.
    numbers = torch.tensor([digest, -digest, int(problem is not None), 0, 0], device=device)
    for x in content:
        # Integers sum exactly in any order. Sums of floats could differ in the last bit between equal batches.
        if not x.is_floating_point():
            numbers[3] += x.sum().to(device)
    summed = numbers[3].clone()
    numbers[4] = -summed
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    highest, negated_lowest, failed, most, negated_least = numbers.tolist()
    if highest != -negated_lowest or failed or most != -negated_least:
        if highest == -negated_lowest:
            said += f", of integers that add up to {int(summed)}"
        # Texts are exchanged only on a failure, because gathering objects is slow.
        check_alike(agree(problem, said, group), "tokens", remedy="cut the same batch on all ranks of a sequence")


def check_heads(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    """Raise ValueError unless the tensors of an attention fit. Shapes are equal on all ranks, so all of them raise."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have four dims, [B, tokens, heads, features]; it is {list(x.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.shape[:2] != q.shape[:2]:
            raise ValueError(
                f"q is {list(q.shape[:2])} and {name} {list(x.shape[:2])} in rows and tokens; they must be of the same "
                "tokens"
            )
        if (x.dtype, x.device) != (q.dtype, q.device):
            raise ValueError(f"q is {q.dtype} on {q.device}, {name} {x.dtype} on {x.device}; they must be alike")
    if k.shape[3] != q.shape[3] or v.shape[2] != k.shape[2]:
        raise ValueError(
            f"heads do not fit: q {list(q.shape[2:])}, k {list(k.shape[2:])}, v {list(v.shape[2:])} (heads, features); "
            "q and k have the same features, k and v the same heads"
        )
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"heads {q.shape[2]} are not a multiple of key heads {k.shape[2]}")
    if sinks is not None and sinks.shape != q.shape[2:3]:
        raise ValueError(f"sinks must be one number a head, [{q.shape[2]}]; they are {list(sinks.shape)}")


def in_autocast(*tensors: Tensor) -> list[Tensor]:
    """Cast tensors to the dtype of autocast, as torch's own attention does."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [x.to(dtype) if x.dtype in {torch.float32, torch.bfloat16, torch.float16} else x for x in tensors]


def axes_of(
    groups: ProcessGroups | None, axis: str, mode: str, options: Mapping[str, Any]
) -> tuple[Axes, Axes | None, str]:
    """Return the axes that exchange keys, the axes that exchange tokens for heads, and the mode of the key exchange."""
    if groups is not None:
        groups.size(axis)  # raises where there is no such axis
    if mode == "ulysses":
        return (), axis, "gather"
    if mode != "2d":
        return axis, None, mode
    known = () if groups is None else groups.topology.leaves(axis)
    # Only a topology can place the ranks of ulysses next to each other, so mode 2d cannot be chosen without one.
    if known != ("ring", "ulysses"):
        raise ValueError(
            f"mode '2d' needs the axes 'ring' and 'ulysses', but {axis!r} is {' x '.join(known) or 'one device'}; "
            "name the mode in the topology: sequence=dict(size=..., mode='2d', ulysses=...)"
        )
    return "ring", "ulysses", options.get("outer", "ring")
