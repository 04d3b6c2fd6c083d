"""Checks of `mixed` before it changes any object; the result is identical on every rank."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import (
    JointOptimizer,
    Sharding,
    agree,
    attributes,
    check_alike,
    has_stepped,
    kept_tensors,
    segments_of,
    slots_of,
)

from ._dtensor import is_dtensor
from ._float8 import check_chosen, float8_layers
from ._masters import has_master
from ._optimizer import AROUND, MixedOptimizer
from ._precisions import check_device, precision_of
from .norm.ownership import Ownership, tensors_in


def is_own(module: nn.Module, optimizer: Optimizer) -> bool:
    """Return whether the optimizer holds the module's parameters, and not another package's masters."""
    # Tensors compare by element, so they are looked up by identity.
    own = {id(parameter) for parameter in module.parameters()}
    return all(id(tensor) in own for group in optimizer.param_groups for tensor in group["params"])


def check(module: nn.Module, optimizer: Optimizer, precision: str, *, accumulates: bool) -> None:
    """Raise an error unless a module and its optimizer support a precision.

    Raises:
        ValueError, TypeError, RuntimeError: The precision is not supported; the message names the reason and the fix.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"the optimizer is of type {type(optimizer).__name__}; give a torch.optim.Optimizer")
    # The second call may get the wrapper, or the user's own optimizer that a wrapper holds.
    if isinstance(optimizer, MixedOptimizer) or AROUND in optimizer.__dict__:
        inside = optimizer.inner if isinstance(optimizer, MixedOptimizer) else optimizer
        raise ValueError(
            f"this {type(inside).__name__} is mixed already; call mixed() once, and go on with what it returned"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "LBFGS computes gradients many times in a step, each to be scaled and clipped; use AdamW or SGD"
        )
    if isinstance(optimizer, JointOptimizer) and precision_of(precision).rounded:
        raise ValueError(
            f"{precision!r} rounds the steps of one optimizer, and here are {len(optimizer.optimizers)}; use 'bf16', "
            "or one optimizer with a param group for each"
        )
    if precision_of(precision).rounded and any(slots_of(tensor) for tensor in tensors_in(optimizer)):
        raise ValueError(
            f"{precision!r} rounds the state of the {type(optimizer).__name__} where it is stepped, and some of it has "
            "its place elsewhere, as with offload= of par-zero; use 'bf16', or leave offload out"
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ValueError(f"{name!r} has sparse gradients, and norms and casts are of dense ones; use sparse=False")
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise ValueError(f"{name!r} has dtype {parameter.dtype}; no precision is made for complex parameters")
        if parameter.is_meta:
            raise ValueError(f"{name!r} is on the meta device; materialise it first, or load a checkpoint into it")
        check_device(precision, parameter.device)
    if precision_of(precision).weights is None:
        _check_left(optimizer, precision, accumulates=accumulates)
    elif isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(f"{precision!r} casts parameters, which DDP has laid into buckets; mix first, then wrap")
    elif is_own(module, optimizer):
        _check_cast(optimizer, precision, accumulates=accumulates)
        _check_units(module, precision)
    else:
        _check_foreign(module, optimizer, precision, accumulates=accumulates)


def _check_left(optimizer: Optimizer, precision: str, *, accumulates: bool) -> None:
    """Check a precision without casts: bf16 and fp16 weights would lose small steps by rounding."""
    if accumulates:
        raise ValueError(
            f"masters=MasterWeights(accumulate=True): gradients are fp32 already under {precision!r}; remove it"
        )
    for tensor in tensors_in(optimizer):
        if tensor.dtype in {torch.bfloat16, torch.float16} and tensor.requires_grad:
            name = "fp16" if tensor.dtype == torch.float16 else "bf16"
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} has dtype {tensor.dtype}, and {precision!r} trains fp32 "
                f"ones; use {name!r}, which makes fp32 masters, or call module.float() first"
            )


def _check_units(module: nn.Module, precision: str) -> None:
    """Raise ValueError if FSDP2 shards a parameter that stays in fp32 together with parameters that are cast.

    FSDP2 gathers the parameters of a module that was passed to `fully_shard` in one dtype, and raises in the forward.
    """
    kept = kept_tensors(module, precision_of(precision).weights or torch.float32)
    # Without a DTensor that keeps its dtype there is no unit to check, and FSDP is not imported.
    if not any(name in kept and is_dtensor(parameter) for name, parameter in module.named_parameters()):
        return
    from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - only a model of DTensors pays for the import

    unit_of: dict[str, str] = {}
    for unit, part in module.named_modules():  # the outer units first
        if issubclass(type(part), FSDPModule):
            # An inner unit is visited after the unit around it and takes its own parameters over.
            unit_of |= {f"{unit}.{name}" if unit else name: unit for name, _ in part.named_parameters()}
    cast = {unit for name, unit in unit_of.items() if name not in kept}
    for name, unit in unit_of.items():
        if name in kept and unit in cast:
            raise ValueError(
                f"{name!r} stays in fp32, as its model declares, and FSDP2 gathers it with parameters that "
                f"{precision!r} casts; call fully_shard on the module of {name!r} first, or remove the name from "
                "par_keep_dtype or _keep_in_fp32_modules_strict"
            )


def _check_cast(optimizer: Optimizer, precision: str, *, accumulates: bool) -> None:
    """Check a precision that casts the optimizer's own parameters."""
    chosen, kind = precision_of(precision), type(optimizer).__name__
    for tensor in tensors_in(optimizer):
        if has_master(tensor):
            raise ValueError(
                f"a parameter of shape {tuple(tensor.shape)} has an fp32 master in an optimizer that was mixed before; "
                "go on with that one, or make the module anew and load its weights"
            )
    if chosen.masters and has_stepped(optimizer):
        raise ValueError(f"the {kind} has stepped already; mix first, then load its state")
    if chosen.rounded and accumulates:
        raise ValueError(f"masters=MasterWeights(accumulate=True): {precision!r} has no master weights; use 'bf16'")


def _check_foreign(module: nn.Module, optimizer: Optimizer, precision: str, *, accumulates: bool) -> None:
    """Check a precision if the optimizer holds another package's tensors, which are then the masters."""
    chosen = precision_of(precision)
    wanted = chosen.weights if chosen.rounded else torch.float32
    kept = kept_tensors(module, chosen.weights) if chosen.weights is not None else {}
    remedy = "cast the module before it is sharded"
    if not chosen.rounded:
        remedy = f"shard an fp32 module with precision=MixedPrecision(param_dtype={chosen.weights})"
    for tensor in tensors_in(optimizer):
        if tensor.dtype != wanted and not (kept and tensor.dtype == torch.float32):
            raise ValueError(
                f"the optimizer holds tensors of dtype {tensor.dtype} that are not the module's parameters, and "
                f"{precision!r} needs {wanted}; {remedy}"
            )
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != chosen.weights and name not in kept:
            raise ValueError(
                f"{name!r} has dtype {parameter.dtype}, and its optimizer holds other tensors, so {precision!r} cannot "
                f"cast it; shard with precision=MixedPrecision(param_dtype={chosen.weights})"
            )
    if accumulates:
        raise ValueError(
            "masters=MasterWeights(accumulate=True): par-zero already adds up the gradients of its tensors; "
            "remove it, and pass reduce_dtype=torch.float32 to par_zero.shard"
        )


def check_cut(optimizer: Optimizer, ownership: Ownership) -> None:
    """Raise ValueError if parameters are sharded over ranks and there is no group."""
    for tensor in tensors_in(optimizer):
        ownership.of(tensor)


def recorded(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Sharding]]:
    """Yield name and sharding of all tensors with sharding metadata, to check that the group counts them once.

    The names of DTensors include their mesh, because pipeline stages may use equal names.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    for tensor in tensors_in(optimizer):
        if is_dtensor(tensor) or attributes.SHARDING.is_on(tensor) or attributes.SEGMENTS.is_on(tensor):
            mesh = f" on ranks {tensor.device_mesh.mesh.flatten().tolist()}" if is_dtensor(tensor) else ""
            for segment in segments_of(tensor, names.get(tensor, "")):
                yield segment.name + mesh, segment.sharding


def lack_of_layers(module: nn.Module, precision: str, chosen: Callable[[str, nn.Linear], bool] | None) -> str:
    """Return an error message if a module has no layer for a precision, else "".

    A pipeline stage may have no such layer if another stage has one.

    Args:
        module: Module.
        precision: Name of the precision.
        chosen: Function that selects the linear layers for float8 matmuls. Default: the usual layers.

    Raises:
        ValueError: Layers are selected for another precision than "fp8", or their sizes do not fit float8.
    """
    if not precision_of(precision).float8:
        if chosen is not None:
            raise ValueError(f"float8_layers is for 'fp8', but the precision is {precision!r}; leave it out")
        return ""
    if chosen is not None and not callable(chosen):
        raise ValueError(f"float8_layers is {chosen!r:.80}; give a function of a layer's name and the layer")
    check_chosen(module, chosen)
    if float8_layers(module, chosen):
        return ""
    if chosen is not None:
        return "float8_layers chooses no linear layer on any rank; choose some, or use 'bf16'"
    return "'fp8' is for linear layers with sizes that are multiples of 16, and there is none; use 'bf16'"


def check_all(problem: Exception | None, text: str, lack: str, group: dist.ProcessGroup | None) -> None:
    """Raise an error on every rank if a rank has a problem, if settings differ, or if all ranks lack a layer."""
    every = agree(problem, (text, lack), *([] if group is None else [group]))
    check_alike({rank: chosen for rank, (chosen, _) in every.items()}, "settings")
    # A rank without such a layer is fine, as a pipeline stage may be; none on any rank is a mistake.
    if all(theirs for _, theirs in every.values()):
        raise ValueError(lack)
