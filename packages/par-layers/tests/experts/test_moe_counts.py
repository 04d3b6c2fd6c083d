"""What a layer communicates within the tensor group, counted: one collective too many is a failure.

M tokens, width h, k experts of a token. Beside these, rows travel over the experts' ranks, which is counted where they
are dispatched; here experts are on all ranks.
"""

import pytest

from par_testing import count_collectives

from .worlds import HIDDEN, SEQUENCE, Tokens, world

EVEN = Tokens(rows=(2,))
M_H, M_K = 2 * SEQUENCE * HIDDEN, 2 * SEQUENCE * EVEN.top_k
GATHER, SCATTER, SUM = ("all_gather", M_H), ("reduce_scatter", M_H), ("all_reduce", M_H)
GATES = ("all_reduce", M_K)

WHOLE = {"expert": {"size": 1, "tensor": 1}}

COUNTS = [
    ({"tp": 2}, 0, [SUM], [SUM, GATES]),
    ({"tp": 2}, 1, [SUM], [SUM, GATES]),  # shared experts join the same sums
    ({"sp": 2}, 0, [GATHER, SCATTER], [GATHER, SCATTER, GATES]),
    ({"sp": 2}, 1, [GATHER, SCATTER], [GATHER, SCATTER, GATES]),
    ({"tp": 2, **WHOLE}, 0, [GATHER], [GATHER]),
    ({"tp": 2, **WHOLE}, 1, [GATHER, SUM], [GATHER, SUM]),
    ({"sp": 2, **WHOLE}, 0, [], []),
    ({"sp": 2, **WHOLE}, 1, [GATHER, SCATTER], [GATHER, SCATTER]),
]
"""By tensor ranks and shared experts: each collective's full size in elements, forward and backward."""


@pytest.mark.ranks(2)
def test_collectives_over_the_tensor_group():
    for parallel, shared, forward, backward in COUNTS:
        with world(parallel) as here:
            layer = EVEN.make(here.layers, num_shared_experts=shared)
            x = here.layers.split(EVEN.of(0)).detach().requires_grad_()
            with count_collectives() as there:
                y = layer(x)
            with count_collectives() as back:
                y.sum().backward()
            for counted, expected in ((there, forward), (back, backward)):
                found = [(event.op, event.elements) for event in counted.events]
                assert sorted(found) == sorted(expected), (parallel, shared)
