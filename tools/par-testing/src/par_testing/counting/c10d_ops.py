"""Read the operators by which torch communicates: which group, and how large the full tensor is."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Communication:
    """One operation: its plain name, its group's global ranks, and the size of its full tensor."""

    op: str
    ranks: tuple[int, ...]
    elements: int
    dtype: torch.dtype


def communications(func: Any, args: Sequence[Any], kwargs: Arguments) -> Iterator[Communication]:
    """What one call of an operator communicates: nothing for most, one entry for each dtype of a coalesced one.

    Raises:
        NotImplementedError: An operator of these namespaces that this module cannot read; to pass over it in silence
            would make a count that is too low.
    """
    if func.namespace not in _READERS:
        return
    name = func._opname
    if name in _SILENT:
        return
    names = [argument.name for argument in func._schema.arguments]
    arguments = dict(zip(names, args, strict=False)) | dict(kwargs)
    ranks = _ranks(arguments)
    if name == "batch_p2p_ops":
        for kind, tensor in zip(arguments["op_list"], arguments["tensors"], strict=True):
            yield Communication(kind.removeprefix("i"), ranks, tensor.numel(), tensor.dtype)
        return
    reader = _READERS[func.namespace].get(name)
    if reader is None:
        raise NotImplementedError(f"count_collectives cannot read {func}: teach it the operator's full size")
    op, elements_by_dtype = reader
    for dtype, elements in elements_by_dtype(arguments).items():
        yield Communication(op, ranks, elements, dtype)


# Operators that bring no data from rank to rank.
_SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"})


def _ranks(arguments: Arguments) -> tuple[int, ...]:
    group = arguments.get("process_group", arguments.get("group_name"))
    if isinstance(group, str):
        group = _resolve_process_group(group)  # type: ignore[arg-type]  # a NewType of str in torch
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


ElementsByDtype = Callable[[Arguments], dict[torch.dtype, int]]


def _size_of(name: str) -> ElementsByDtype:
    """The size of an argument that is a tensor, or tensors in lists."""

    def read(arguments: Arguments) -> dict[torch.dtype, int]:
        sizes: dict[torch.dtype, int] = {}
        for tensor in _flat(arguments[name]):
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        return sizes

    return read


def _size_over_group(name: str) -> ElementsByDtype:
    """As many elements from every rank of the group as there are in the argument."""

    def read(arguments: Arguments) -> dict[torch.dtype, int]:
        size = len(_ranks(arguments))
        return {dtype: elements * size for dtype, elements in _size_of(name)(arguments).items()}

    return read


def _nothing(name: str) -> ElementsByDtype:
    """No elements; the dtype of the tensor that is passed for form's sake."""

    def read(arguments: Arguments) -> dict[torch.dtype, int]:
        return {arguments[name].dtype: 0}

    return read


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    else:
        for part in tensors:
            yield from _flat(part)


# Of each operator: its plain name, and where its full size is read.
Readers = Mapping[str, tuple[str, ElementsByDtype]]

# What torch.distributed's functions and DDP's reducer call.
_C10D: Readers = {
    "allreduce_": ("all_reduce", _size_of("tensors")),
    "allreduce_coalesced_": ("all_reduce", _size_of("tensors")),
    "allgather_": ("all_gather", _size_of("output_tensors")),
    "allgather_coalesced_": ("all_gather", _size_of("output_lists")),
    "allgather_into_tensor_coalesced_": ("all_gather", _size_of("outputs")),
    "_allgather_base_": ("all_gather", _size_of("output_tensor")),
    "reduce_scatter_": ("reduce_scatter", _size_of("input_tensors")),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _size_of("inputs")),
    "_reduce_scatter_base_": ("reduce_scatter", _size_of("input_tensor")),
    "alltoall_": ("all_to_all", _size_of("input_tensors")),
    "alltoall_base_": ("all_to_all", _size_of("input")),
    "broadcast_": ("broadcast", _size_of("tensors")),
    "reduce_": ("reduce", _size_of("tensors")),
    "gather_": ("gather", _size_over_group("input_tensors")),
    "scatter_": ("scatter", _size_over_group("output_tensors")),
    "send": ("send", _size_of("tensors")),
    "recv_": ("recv", _size_of("tensors")),
    "recv_any_source_": ("recv", _size_of("tensors")),
    "barrier": ("barrier", _nothing("tensor")),
    "monitored_barrier_": ("barrier", _nothing("tensor")),
}

# What DTensor, the functional collectives and torch.compile call.
_FUNCTIONAL: Readers = {
    "all_reduce": ("all_reduce", _size_of("input")),
    "all_reduce_": ("all_reduce", _size_of("input")),
    "all_reduce_coalesced": ("all_reduce", _size_of("inputs")),
    "all_reduce_coalesced_": ("all_reduce", _size_of("inputs")),
    "all_gather_into_tensor": ("all_gather", _size_over_group("input")),
    "all_gather_into_tensor_out": ("all_gather", _size_over_group("input")),
    "all_gather_into_tensor_coalesced": ("all_gather", _size_over_group("inputs")),
    "reduce_scatter_tensor": ("reduce_scatter", _size_of("input")),
    "reduce_scatter_tensor_out": ("reduce_scatter", _size_of("input")),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _size_of("inputs")),
    "all_to_all_single": ("all_to_all", _size_of("input")),
    "broadcast": ("broadcast", _size_of("input")),
    "broadcast_": ("broadcast", _size_of("input")),
    "isend": ("send", _size_of("tensor")),
    "irecv": ("recv", _size_of("tensor")),
}

_READERS = {"c10d": _C10D, "_c10d_functional": _FUNCTIONAL}
