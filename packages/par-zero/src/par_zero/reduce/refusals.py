"""Errors for gradients that cannot be summed over the ranks. They name the parameter and the fix."""

from collections.abc import Mapping
from typing import NoReturn

import torch


def refuse_gradient(name: str, gradient: torch.Tensor) -> NoReturn:
    """Raise for a gradient that is sparse or has a graph, because chunks cannot sum it."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"the gradient of {name!r} is sparse, and chunks are dense; set sparse=False where it is looked up"
        )
    raise RuntimeError(
        f"the gradient of {name!r} has a graph itself, which would end at the sum over the ranks; leave out "
        "create_graph=True, or ask torch.autograd.grad for gradients of inputs alone"
    )


def refuse_arriving(name: str) -> NoReturn:
    """Raise for a gradient of a parameter that was in flight when it was read."""
    raise RuntimeError(
        f"{name!r} was read after a step while it was on its way from the other ranks, by something that reads memory "
        "past torch's functions, such as a captured graph or an extension; enter par_zero.summon(module) before that, "
        "which waits"
    )


def refuse_given_up(name: str) -> NoReturn:
    """Raise for a gradient of a chunk that was reduced because autograd had announced none."""
    raise RuntimeError(
        f"{name!r} got a gradient after its sum over the ranks had begun without it: it came from a backward within "
        "backward, as of a reentrant checkpoint, which no pass before had; pass use_reentrant=False, or use such "
        "checkpoints from the first step on"
    )


def refuse_closed(name: str) -> NoReturn:
    """Raise for a gradient of a chunk that was closed."""
    raise RuntimeError(
        f"{name!r} got a gradient when backward had gone on to what was called before its module, and its sum over the "
        "ranks had begun without it: it was read outside of a call of its module; call that, or give units= that make "
        "one of both modules"
    )


def refuse_another(name: str) -> NoReturn:
    """Raise for a second gradient of a parameter whose reduction has begun with the first."""
    raise RuntimeError(
        f"{name!r} got another gradient after its sum over the ranks had begun: it is used in two reentrant "
        "checkpoints; pass use_reentrant=False"
    )


def refuse_steps(steps: Mapping[int, int]) -> NoReturn:
    """Raise on all ranks because they have taken different numbers of steps since the last pass.

    Args:
        steps: Number of steps of optimizers, by global rank.
    """
    first = min(steps)
    other = next(rank for rank in steps if steps[rank] != steps[first])
    raise RuntimeError(
        f"rank {other} has taken {steps[other]} steps of its optimizers since the last pass where rank {first} has "
        f"taken {steps[first]}, so their weights belong to different versions of the model; load the latest "
        "checkpoint, and skip a step on all ranks or on none, such as by the norm of `clip_grad_norm_`"
    )
