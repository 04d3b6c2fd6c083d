"""A small mixture of experts in fp64 whose ranks exchange rows: a model with parameters that not all ranks have."""

import functools

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Box, Sharding, gradients, set_sharding
from par_zero import no_sync

EXPERTS, WIDTH, HIDDEN = 4, 6, 10
TOKENS = (5, 0, 3, 7)
"""Rows of each rank; one has none."""


@functools.cache
def subgroup(*parts, use="shares"):
    """The group of this rank among some that are made by all ranks together, each given by its ranks.

    What is exchanged in backward needs a communicator that nothing is reduced over, and so another `use`.
    """
    made = [dist.new_group(list(ranks), group_desc=use) for ranks in parts]
    return made[next(number for number, ranks in enumerate(parts) if dist.get_rank() in ranks)]


def exchanging(parallel):
    """The ranks that have all experts between them, neighbours of each other."""
    world = dist.get_world_size()
    return subgroup(*(tuple(range(first, first + parallel)) for first in range(0, world, parallel)), use="exchange")


def copies(parallel, rank=None):
    """The ranks with the same experts."""
    return tuple(range((dist.get_rank() if rank is None else rank) % parallel, dist.get_world_size(), parallel))


def holding(parallel):
    """The group of the ranks with the same experts as this one."""
    return subgroup(*(copies(parallel, rank) for rank in range(parallel)))


class Travel(torch.autograd.Function):
    """Sends rows to the ranks of a group, and their gradients back."""

    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.given = sent, received, group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx, gradient):
        sent, received, group = ctx.given
        return exchanged(gradient, received, sent, group), None, None, None


def exchanged(rows, sent, received, group):
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def dealt(parallel, uneven=False):
    """How many experts each rank has of those that have all between them; uneven: the first has what others lack."""
    least = 1 if uneven else EXPERTS // parallel
    return [EXPERTS - least * (parallel - 1), *[least] * (parallel - 1)]


class Experts(nn.Module):
    """Experts that are packed: this rank's ones, or all of them without a group.

    `without` names a weight, and the place of a rank among those that have all experts: that of its experts gets no
    gradient.
    """

    def __init__(self, seed, parallel, uneven):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.group = exchanging(parallel) if parallel else None
        self.dealt = dealt(parallel or 1, uneven)
        self.without = None
        self.place = place = dist.get_rank(self.group) if parallel else 0
        for name, shape in (("up", (EXPERTS, HIDDEN, WIDTH)), ("down", (EXPERTS, WIDTH, HIDDEN))):
            own = torch.randn(shape, generator=generator, dtype=torch.float64).split(self.dealt)[place].clone()
            setattr(self, name, nn.Parameter(own / 3))
            if parallel:
                first = sum(self.dealt[:place])
                box = Box((first, 0, 0), tuple(own.shape), 0, own.stride(), copies(parallel))
                set_sharding(getattr(self, name), Sharding(shape, (box,)))

    def forward(self, x, ids):
        order = ids.argsort(stable=True)
        counts = torch.bincount(ids, minlength=EXPERTS)
        arriving = counts.new_empty(len(self.dealt), len(self.up))
        if self.group is None:
            arriving.copy_(counts)
        else:
            dist.all_to_all_single(
                arriving.view(-1), counts, [len(self.up)] * len(self.dealt), self.dealt, group=self.group
            )
        sent, received = [int(part.sum()) for part in counts.split(self.dealt)], arriving.sum(1).tolist()
        rows = x[order] if self.group is None else Travel.apply(x[order], sent, received, self.group)
        owner = torch.arange(arriving.shape[1]).repeat(len(self.dealt)).repeat_interleave(arriving.flatten())
        place = owner.argsort(stable=True)
        parts = rows[place].split(arriving.sum(0).tolist())
        weights = zip(parts, self.trained("up"), self.trained("down"), strict=True)
        done = [torch.tanh(part @ up.T) @ down.T for part, up, down in weights]
        result = torch.cat(done)[place.argsort()]
        result = result if self.group is None else Travel.apply(result, received, sent, self.group)
        return result[order.argsort()]

    def trained(self, name):
        """A weight, as far as it gets a gradient."""
        weight, (without, absent) = getattr(self, name), self.without or (None, None)
        if without != name:
            return weight
        if self.group is not None:
            return weight.detach() if self.place == absent else weight
        first = absent * EXPERTS // 2  # of two ranks
        return torch.cat(
            [weight[:first], weight[first : first + EXPERTS // 2].detach(), weight[first + EXPERTS // 2 :]]
        )


class Mixture(nn.Module):
    """A linear, and experts by its side whose results are weighed."""

    def __init__(self, seed, parallel, uneven):
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gate = nn.Linear(WIDTH, 1, dtype=torch.float64)
        self.experts = Experts(seed, parallel, uneven)

    def forward(self, x, ids):
        return x + torch.tanh(self.dense(x)) + torch.sigmoid(self.gate(x)) * self.experts(x, ids)


class Routed(nn.Module):
    """Mixtures with linears above and below, of which a rank may leave one out.

    Args:
        parallel: How many ranks have all experts between them; 0: this rank has them alone.
        uneven: Whether the first of these ranks has more of them than the others.
    """

    def __init__(self, parallel=0, uneven=False):
        super().__init__()
        torch.manual_seed(0)
        linears = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
        mixtures = [Mixture(seed, parallel, uneven) for seed in (1, 2)]
        self.blocks = nn.ModuleList([linears[0], mixtures[0], linears[1], linears[2], mixtures[1], linears[3]])

    def forward(self, x, ids, left_out=None):
        for number, block in enumerate(self.blocks):
            if isinstance(block, Mixture):
                x = block(x, ids)
            elif number != left_out:
                x = torch.tanh(block(x))
        return x


def loss_of(module, step, rank, ranks, left_out=None, micro=0, *, only=None):
    """The loss of one rank's rows, of which the mean over ranks is that of all rows; they may go to one expert only."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    # It asks for a gradient, so that all ranks exchange in backward, one too that leaves out what is below the experts.
    x = torch.randn(TOKENS[rank], WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(EXPERTS, (TOKENS[rank],), generator=generator)
    ids = ids if only is None else torch.full_like(ids, only)
    return module(x, ids, left_out).square().sum() * ranks / sum(TOKENS[:ranks])


def norm_of(optimizer):
    """The norm of all gradients, of which each element counts where it is owned."""
    everybody = range(dist.get_world_size())
    own = [each.square().sum() for _, box, each in gradients(optimizer) if box.owns(dist.get_rank(), everybody)]
    total = sum(own, torch.zeros((), dtype=torch.float64))
    dist.all_reduce(total)
    return total.sqrt()


def part_of(name, value, parallel, uneven=False):
    """What this rank has of a parameter of the model on one device."""
    return value.split(dealt(parallel, uneven))[dist.get_rank() % parallel] if ".experts." in name else value


def accumulate(module, loss_at, microbatches, *, deferred):
    """Backward of each microbatch; with `deferred` they are reduced together, after the last one."""
    for micro in range(microbatches):
        loss = loss_at(micro)
        if deferred and micro < microbatches - 1:
            with no_sync(module):
                loss.backward()
        else:
            loss.backward()
