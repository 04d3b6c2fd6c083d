"""A probe of this machine's kernels: whether their bits depend on more than the shapes that lanes fix.

Canonical numerics fix shapes, because torch's kernels have equal bits for equal shapes. Another version of torch, or
another processor, may have kernels of which that is not true. Such a kernel would make weights depend on the topology
without an error, so the probe calls each kind of kernel twice in ways in which two topologies would.
"""

from collections.abc import Callable, Iterator
from itertools import starmap

import torch
from torch import Tensor
from torch.nn import functional

ROWS, FEATURES, HEADS, HEAD = 24, 128, 4, 32

Draw = Callable[..., Tensor]
"""Function from a shape to random numbers on the device, in the dtype that is probed."""

Pairs = Iterator[tuple[Tensor, Tensor]]
"""Results that must have equal bits."""


def unstable_kernels(device: torch.device, dtype: torch.dtype, *, lanes: int) -> list[str]:
    """Return descriptions of kernels whose bits two topologies would not share; empty if there are none.

    It takes a few milliseconds, and leaves random generators unchanged.

    Args:
        device: Device of a run.
        dtype: Dtype of its activations.
        lanes: Number of lanes in layers. With one lane, only repeated calls must agree.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    kernels = {"a repeated matmul": _repeated_matmuls}
    if lanes > 1:
        kernels |= {
            "a matmul at another address": _moved_matmuls,
            "a softmax or norm of a row, next to other rows": _rows,
            "an activation function of part of the features": _parts_of_features,
            "attention next to other heads": _heads,
        }
    return [name for name, pairs in kernels.items() if not all(starmap(torch.equal, pairs(draw)))]


def _repeated_matmuls(draw: Draw) -> Pairs:
    x, weight, gradient = draw(ROWS, FEATURES), draw(3 * FEATURES, FEATURES), draw(ROWS, 3 * FEATURES)
    yield x @ weight.t(), x @ weight.t()
    yield gradient @ weight, gradient @ weight
    yield gradient.t() @ x, gradient.t() @ x


def _moved_matmuls(draw: Draw) -> Pairs:
    """Blocks of a weight are copied on one rank, and a tensor of their own on another."""
    x, weight = draw(ROWS, FEATURES), draw(2 * FEATURES + 1, FEATURES)
    for first in (0, 1, FEATURES):
        block = weight[first : first + FEATURES]
        yield x @ block.t(), x @ block.clone().t()


def _rows(draw: Draw) -> Pairs:
    x, weight = draw(ROWS, FEATURES), draw(FEATURES)
    for function in (
        lambda rows: functional.softmax(rows, -1),
        lambda rows: functional.layer_norm(rows, (FEATURES,), weight),
        lambda rows: functional.rms_norm(rows, (FEATURES,), weight),
        lambda rows: rows.float().sum(-1),
    ):
        # Ranks that split a sequence call the kernel for fewer rows.
        for length in (1, ROWS // 4):
            yield function(x)[:length], function(x[:length].clone())


def _parts_of_features(draw: Draw) -> Pairs:
    x = draw(ROWS, FEATURES)
    for function in (functional.silu, functional.gelu, torch.sigmoid, torch.exp):
        # Tensor ranks call it for a part of the features.
        for part in (32, 64):
            yield function(x)[:, :part], function(x[:, :part].contiguous())


def _heads(draw: Draw) -> Pairs:
    q, k, v, gradient = (draw(2, HEADS, ROWS, HEAD) for _ in range(4))

    def attend(first: int, last: int) -> list[Tensor]:
        given = [each[:, first:last].clone().requires_grad_() for each in (q, k, v)]
        queries, keys, values = given
        y = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        with torch.enable_grad():
            return [y.detach(), *torch.autograd.grad(y, given, gradient[:, first:last])]

    whole = attend(0, HEADS)
    for first, last in ((0, 1), (HEADS // 2, HEADS)):
        for all_heads, part in zip(whole, attend(first, last), strict=True):
            yield all_heads[:, first:last], part
