"""What the tests share: one whole model's gradients, and ranks that hold parts of it in every way there is."""

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Segment, Segments, cut, set_segments, set_sharding, whole
from par_groups.sharding.sharding import Box, Sharding

SHAPES = {
    "embedding": (15, 17),
    "column": (12, 123),
    "row": (17, 16),
    "norm": (123,),
    "deep.column": (8, 17),
    "deep.norm": (17,),
}


def gradient(name, *, huge=False, seed=0):
    """Of the whole model. Signs, magnitudes and 1e30 in places."""
    generator = torch.Generator().manual_seed(seed + list(SHAPES).index(name))
    values = torch.randn(SHAPES[name], generator=generator)
    if huge:
        values[0] = 1e30
    return values


def parameter(part):
    """A parameter with a gradient."""
    made = nn.Parameter(torch.zeros_like(part))
    made.grad = part.clone()
    return made


def recorded(part, sharding):
    made = parameter(part.contiguous())
    set_sharding(made, sharding)
    return made


def rows_of(whole_gradient, index, parts, copies):
    """A column-parallel weight's part: rows."""
    rows, columns = whole_gradient.shape
    size = rows // parts
    box = Box((index * size, 0), (size, columns), 0, (columns, 1), copies)
    return recorded(whole_gradient[index * size : (index + 1) * size], Sharding((rows, columns), (box,)))


def columns_of(whole_gradient, index, parts, copies):
    """A row-parallel weight's part: columns."""
    rows, columns = whole_gradient.shape
    size = columns // parts
    box = Box((0, index * size), (rows, size), 0, (size, 1), copies)
    return recorded(whole_gradient[:, index * size : (index + 1) * size], Sharding((rows, columns), (box,)))


def copy_of(whole_gradient, ranks):
    """What all of some ranks hold."""
    return recorded(whole_gradient, whole(whole_gradient.shape, ranks))


def grid():
    """8 ranks: pipeline 2 x data 2 x tensor 2; this rank's three coordinates."""
    rank = dist.get_rank()
    return rank // 4, rank // 2 % 2, rank % 2


def stage_parameters(*, huge=False):
    """This rank's parameters by tensor parallelism and pipeline stage; the embedding is on both stages (tied)."""
    pipeline, _, tensor = grid()
    tensor_ranks = {t: tuple(4 * pipeline + 2 * d + t for d in range(2)) for t in range(2)}
    stage_ranks = tuple(range(4 * pipeline, 4 * pipeline + 4))
    here = {"embedding": copy_of(gradient("embedding", huge=huge), tuple(range(8)))}
    if pipeline == 0:
        here["column"] = rows_of(gradient("column", huge=huge), tensor, 2, tensor_ranks[tensor])
        here["row"] = columns_of(gradient("row", huge=huge), tensor, 2, tensor_ranks[tensor])
        here["norm"] = copy_of(gradient("norm", huge=huge), stage_ranks)
    else:
        here["deep.column"] = rows_of(gradient("deep.column", huge=huge), tensor, 2, tensor_ranks[tensor])
        here["deep.norm"] = copy_of(gradient("deep.norm", huge=huge), stage_ranks)
    return here


def zero_parameters(parameters):
    """This rank's halves of these parameters in one flat tensor with padding, as ZeRO over the data ranks cuts them."""
    _, data, _ = grid()
    holders = {4 * p + 2 * data + t for p in range(2) for t in range(2)}
    flat, segments, offset = [torch.full((3,), 7.0)], [], 3  # padding that must not count
    for name, each in parameters.items():
        half = -(-each.numel() // 2)
        start, stop = data * half, min((data + 1) * half, each.numel())
        segments.append(Segment(name, cut(each.par_sharding, start, stop, offset=offset, holders=holders)))
        flat.append(each.grad.flatten()[start:stop])
        offset += stop - start
    made = parameter(torch.cat([*flat, torch.full((5,), 9.0)]))
    set_segments(made, Segments(segments))
    return [made]


def expected_norm(order, *, huge=False):
    """Of the whole model in fp64 on one device."""
    everything = torch.cat([gradient(name, huge=huge).flatten() for name in SHAPES]).double()
    return torch.linalg.vector_norm(everything, order)
