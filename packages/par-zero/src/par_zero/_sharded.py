"""Functions for a sharded module: contexts, its memory, its program, and the repair after an error."""

from contextlib import AbstractContextManager

from torch import nn

from ._engine import Engine
from .checks.module import ENGINE
from .offload.tier import DiskUsage
from .placement.moments import Trace
from .programs.ledger import ZeroProgram
from .residency.table import Residency


def no_sync(module: nn.Module, *, keep: bool = True) -> AbstractContextManager[None]:
    """Accumulate gradients locally inside; the first backward pass outside reduces them together.

    At stages 2 and 3 each rank then stores full gradients, as at stage 1.

    Args:
        module: Module that was passed to `shard`, or an item of it that is called.
        keep: Whether stage 3 keeps gathered parameters for the next passes, which needs memory for the full model.
            False: every pass gathers and frees them, as outside.

    Raises:
        ValueError: The module is not sharded.
    """
    return _engine_of(module).no_sync(keep=keep)


def reduces_gradients(module: nn.Module) -> bool:
    """Return whether the next backward pass reduces gradients, as it does outside of all `no_sync` contexts.

    Args:
        module: Module, which may be the result of torch.compile. A module that is not sharded never reduces gradients.
    """
    engine = getattr(module, ENGINE, None)
    return isinstance(engine, Engine) and engine.reduces_gradients


def summon(module: nn.Module) -> AbstractContextManager[None]:
    """Show full parameters inside, at stage 3 too, and keep what you write to them. Collective.

    At stages 1 and 2 it waits for the all-gathers of the latest step. Without it, the first torch operation on a
    parameter waits. Enter `summon` before code that reads the memory without torch, such as a captured graph.

    Args:
        module: Module that was passed to `shard`, or an item of it that is called.

    Raises:
        ValueError: The module is not sharded.
        RuntimeError: A parameter was replaced inside instead of written in place; raised on leaving.
    """
    return _engine_of(module).summon()


def residency(module: nn.Module) -> Residency:
    """Return the bytes of a sharded module by tier and kind, now and at the peak of the latest step.

    The result prints as a table. The call neither waits nor communicates. Saved activations are not counted, nor is the
    copy of parameters by which `summon` finds writes.

    Args:
        module: Module that was passed to `shard`, or an item of it that is called.

    Raises:
        ValueError: The module is not sharded.
    """
    return _engine_of(module).residency()


def disk_usage(module: nn.Module) -> DiskUsage:
    """Return what this rank stores on a disk, and measure the disk's speed by reading and writing some of it.

    The call waits for the writes of the latest step. Ranks that share a disk should call it at the same time, so that
    each measures its share of the bandwidth.

    Args:
        module: Module that was passed to `shard`, or an item of it that is called.

    Raises:
        ValueError: The module is not sharded.
        OSError: The disk has failed.
    """
    return _engine_of(module).disk_usage()


def reload_state(module: nn.Module, size: int) -> int:
    """Load optimizer state from the disk into memory for good, piece by piece. Call it between steps.

    Each rank may load another amount, and no result changes. The space in the file stays reserved.

    Args:
        module: Module that was passed to `shard`, or an item of it that is called.
        size: Largest number of bytes to load. Pieces that a step waits for longest are loaded first.

    Returns:
        Number of bytes that were loaded.

    Raises:
        ValueError: The module is not sharded, or `size` is negative.
    """
    if size < 0:
        raise ValueError(f"size={size}: it is a number of bytes; pass 0 or more")
    return _engine_of(module).reload_state(size)


def trace(module: nn.Module) -> Trace | None:
    """Return what the last complete step needed on this rank, as input of `place`.

    Args:
        module: Module that was passed to `shard` at stage 3 with a budget, such as `Offload(budget="80GB")`.

    Returns:
        The trace; None before the first complete step, and without a budget, since steps are then not recorded.

    Raises:
        ValueError: The module is not sharded.
    """
    return _engine_of(module).trace


def program(module: nn.Module) -> ZeroProgram | None:
    """Return what this rank did in the latest step, entry by entry. It prints as text, and its `peak` is in bytes.

    Before the first step, it is the program that is predicted: one forward and one backward of all units in the order
    in which the module registers them. If no `Overlap(inflight=...)` bounds the reductions on a CPU, its bytes are an
    upper bound.

    Args:
        module: Module that was passed to `shard`, or an item of it that is called.

    Returns:
        The program; None after a step of more than 50,000 entries.

    Raises:
        ValueError: The module is not sharded.
    """
    return _engine_of(module).program()


def reset(module: nn.Module) -> None:
    """Drop partial gradients after an exception in forward or backward, so that the next step is correct.

    Call it on all ranks: each rank completes the collectives that other ranks may have begun in the failed pass. The
    pass must have begun on every rank. If it has failed on some ranks only, these call `reset` at once. At stage 3 the
    other ranks then raise an error that names one of them. Below stage 3 all ranks raise an error and cannot continue.

    Args:
        module: Module that was passed to `shard`, or an item of it that is called.

    Raises:
        ValueError: The module is not sharded.
    """
    _engine_of(module).reset()


def _engine_of(module: nn.Module) -> Engine:
    # A module that torch.compile returned passes attribute reads on to the original module.
    engine = getattr(module, ENGINE, None)
    if not isinstance(engine, Engine):
        raise ValueError(f"this {type(module).__name__} is not sharded; pass the module that you passed to shard()")
    return engine
