"""How tokens choose experts in these tests, and the loop over experts that every result is compared with."""

from contextlib import contextmanager

import torch
from torch.nn import functional

from par_groups import Channels, ProcessGroups, Topology
from par_layers import Grid


def generator(seed):
    return torch.Generator().manual_seed(seed)


def numbers(*shape, seed, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def chosen(tokens, experts, top_k, seed, among=None):
    """Different experts for each token, of all or `among` some: ids [M, k]."""
    scores = torch.rand(tokens, experts, generator=generator(seed))
    if among is not None:
        scores[:, [expert for expert in range(experts) if expert not in among]] -= 1
    return scores.topk(top_k)[1]


ROUTINGS = {  # number of tokens by rank of p, and the experts that they choose among
    "uneven": (lambda rank, p: 5 + 3 * rank, lambda experts, p: None),
    "one rank has none": (lambda rank, p: 0 if rank == p - 1 else 7, lambda experts, p: None),
    "only one rank has some": (lambda rank, p: 9 if rank == 0 else 0, lambda experts, p: None),
    "nobody has any": (lambda rank, p: 0, lambda experts, p: None),
    "all to the first expert": (lambda rank, p: 6, lambda experts, p: [0]),
    "all to the last rank": (lambda rank, p: 6, lambda experts, p: range(experts - experts // p, experts)),
}


def loop(x, ids, gates, weights, activation=lambda wide: functional.silu(wide.chunk(2, 1)[0]) * wide.chunk(2, 1)[1]):
    """The dense loop: every expert over the tokens that chose it. Weights are [E, n, k], biases [E, n] or None."""
    up, down, up_bias, down_bias = weights
    y = torch.zeros_like(x)
    for expert in range(len(up)):
        for column in range(ids.shape[1]):
            mine = (ids[:, column] == expert).nonzero().flatten()
            wide = x[mine] @ up[expert].t() + (0 if up_bias is None else up_bias[expert])
            out = activation(wide) @ down[expert].t() + (0 if down_bias is None else down_bias[expert])
            y = y.index_add(0, mine, out * gates[mine, column, None])
    return y


@contextmanager
def live(expert_data=1, expert_parallel=1, expert_tensor=1):
    """The groups of a view of experts, the ranks of a world, and this rank's place among them."""
    axes = {"expert_data": expert_data, "expert_parallel": expert_parallel, "expert_tensor": expert_tensor}
    world = expert_data * expert_parallel * expert_tensor
    with ProcessGroups(Topology(axes, world), declare=[Channels("expert_parallel", 1)]) as groups:
        yield groups, Grid(groups)
