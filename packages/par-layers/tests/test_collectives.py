from collections import Counter

import pytest
import torch
import torch.distributed as dist

from par_layers import (
    all_gather_to,
    all_to_all,
    copy_to,
    exchange,
    gather_from,
    reduce_from,
    reduce_scatter_to,
    scatter_to,
)
from par_layers._collectives import reduce_from_
from par_testing import count_collectives

from .helpers import numbers

SHAPE = (4, 8, 12)


def of(rank, *shape):
    """What a rank holds; every rank can tell."""
    return numbers(*shape, seed=100 + rank)


def check(function, x, expected, upstream, expected_gradient, counts=()):
    """Compares the result and the gradient, and the names of the collectives that forward and backward took."""
    x = x.clone().requires_grad_()
    with count_collectives() as counted:
        y = function(x)
        y.backward(upstream)
    assert torch.equal(y, expected) or torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x.grad, expected_gradient, rtol=1e-12, atol=1e-12)
    assert [event.op for event in counted.events] == list(counts)


@pytest.mark.ranks([1, 4])
def test_copy_to_and_reduce_from():
    group, ranks, rank = dist.group.WORLD, range(dist.get_world_size()), dist.get_rank()
    x, g = of(rank, *SHAPE), of(50 + rank, *SHAPE)
    total_x, total_g = sum(of(each, *SHAPE) for each in ranks), sum(of(50 + each, *SHAPE) for each in ranks)
    check(lambda x: copy_to(x, group), x, x, g, total_g, ["all_reduce"])
    check(lambda x: reduce_from(x, group), x, total_x, g, g, ["all_reduce"])


@pytest.mark.ranks([1, 4])
def test_gathers_and_scatters():
    for dim in (0, 1, -1):
        check_gathers_and_scatters(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), dim)


def check_gathers_and_scatters(group, world, rank, dim):
    small = list(SHAPE)
    small[dim] //= world
    x, whole = of(rank, *small), numbers(*SHAPE)  # `whole` is alike on all ranks
    every = torch.cat([of(each, *small) for each in range(world)], dim)
    gradients = torch.stack([of(50 + each, *SHAPE) for each in range(world)])
    sums = torch.stack([of(each, *SHAPE) for each in range(world)]).sum(0)

    def part(y):
        return y.chunk(world, dim)[rank]

    check(lambda x: gather_from(x, group, dim), x, every, whole, part(whole), ["all_gather"])
    check(lambda x: scatter_to(x, group, dim), whole, part(whole), x, every, ["all_gather"])
    both = ["all_gather", "reduce_scatter"]
    check(lambda x: all_gather_to(x, group, dim), x, every, gradients[rank], part(gradients.sum(0)), both)
    check(lambda x: reduce_scatter_to(x, group, dim), of(rank, *SHAPE), part(sums), x, every, both[::-1])


@pytest.mark.ranks([1, 4])
def test_all_to_all():
    for split_dim, join_dim in ((0, 1), (1, 2), (2, 0), (-1, 1)):
        check_all_to_all(dist.group.WORLD, dist.get_world_size(), dist.get_rank(), split_dim, join_dim)


def check_all_to_all(group, world, rank, split_dim, join_dim):

    def moved(seed, shape, split, join):
        return torch.cat([of(seed + each, *shape).chunk(world, split)[rank] for each in range(world)], join)

    expected = moved(0, SHAPE, split_dim, join_dim)
    upstream = of(50 + rank, *expected.shape)
    gradient = moved(50, expected.shape, join_dim, split_dim)
    counts = ["all_to_all", "all_to_all"]
    check(lambda x: all_to_all(x, group, split_dim, join_dim), of(rank, *SHAPE), expected, upstream, gradient, counts)


@pytest.mark.ranks(4)
def test_exchange():
    group, rank = dist.group.WORLD, dist.get_rank()
    for partners in ([1, 0, 3, 2], [0, 2, 1, 3]):
        other = partners[rank]
        counts = [] if other == rank else ["send", "recv", "send", "recv"]
        x, g = of(rank, *SHAPE), of(50 + rank, *SHAPE)
        swap = lambda x, other=other: exchange(x, group, other)  # noqa: E731
        check(swap, x, of(other, *SHAPE), g, of(50 + other, *SHAPE), counts)


@pytest.mark.ranks(2)
def test_what_is_not_contiguous():
    group, rank = dist.group.WORLD, dist.get_rank()
    x = of(rank, 4, 6).t()
    every = torch.cat([of(each, 4, 6).t() for each in range(2)], 1)
    upstream = numbers(12, 8).t()[:, :6].T
    assert torch.equal(gather_from(x, group, 1), every)
    assert torch.equal(reduce_from(x, group), of(0, 4, 6).t() + of(1, 4, 6).t())
    leaf = x.clone().requires_grad_()
    copy_to(leaf, group).backward(upstream.t()[:6, :4].contiguous().t().contiguous().t())
    assert leaf.grad.shape == x.shape


@pytest.mark.ranks(2)
def test_the_input_is_left_as_it_was():
    group, x = dist.group.WORLD, of(dist.get_rank(), 4, 4)
    before = x.clone()
    for function in (copy_to, reduce_from):
        function(x, group).add(1)
    for function in (gather_from, scatter_to, all_gather_to, reduce_scatter_to):
        function(x, group, 0)
    all_to_all(x, group, 0, 1)
    exchange(x, group, 1 - dist.get_rank())
    assert torch.equal(x, before)


@pytest.mark.ranks([1, 2])
def test_a_scattered_part_is_a_copy():
    for dim in (0, 1):
        x = numbers(*SHAPE).requires_grad_()
        part = scatter_to(x, dist.group.WORLD, dim)
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()  # it keeps no more alive
        part += 1
        assert torch.equal(x, numbers(*SHAPE))


@pytest.mark.ranks([1, 2])
def test_a_sum_overwrites_a_temporary_that_nobody_can_see():
    group, ranks, rank = dist.group.WORLD, range(dist.get_world_size()), dist.get_rank()
    total = sum(of(each, *SHAPE) for each in ranks)
    x = of(rank, *SHAPE).requires_grad_()
    temporary = x * 1
    y = reduce_from_(temporary, group)
    torch.testing.assert_close(y, total, rtol=1e-12, atol=1e-12)
    assert y.data_ptr() == temporary.data_ptr()
    y.backward(total)
    assert torch.equal(x.grad, total)
    seen = of(rank, *SHAPE)
    with count_collectives() as counted:  # a dispatch mode
        y = reduce_from_(seen, group)
    torch.testing.assert_close(y, total, rtol=1e-12, atol=1e-12)
    assert torch.equal(seen, of(rank, *SHAPE))
    assert [event.op for event in counted.events] == ["all_reduce"]


@pytest.mark.ranks([1, 2])
def test_an_all_gather_keeps_away_from_the_operator_that_corrupts_memory_over_gloo():
    x = of(dist.get_rank(), *SHAPE).requires_grad_()
    with torch.profiler.profile(acc_events=True) as profile:  # no dispatch mode
        gather_from(x, dist.group.WORLD, 1)
        reduce_scatter_to(x, dist.group.WORLD, 1).sum().backward()
    calls = Counter(event.name for event in profile.events())
    assert calls["_c10d_functional::all_gather_into_tensor_out"] == 2
    assert calls["_c10d_functional::all_gather_into_tensor"] == 0


@pytest.mark.ranks(2)
def test_a_dim_that_does_not_divide_is_named_before_anything_is_sent():
    group, x = dist.group.WORLD, numbers(3, 5)
    with count_collectives() as counted:
        for function in (scatter_to, reduce_scatter_to):
            with pytest.raises(ValueError, match=r"dim 1 of \(3, 5\) is 5, which does not divide by 2 ranks"):
                function(x, group, 1)
        with pytest.raises(ValueError, match=r"dim 0 of .* is 3"):
            all_to_all(x, group, 0, 1)
    assert counted.calls() == 0


@pytest.mark.ranks(2)
def test_gradients_of_gradients_are_refused():
    x = numbers(4).requires_grad_()
    for function in (copy_to, reduce_from, lambda x, group: reduce_from_(x * 1, group)):
        (gradient,) = torch.autograd.grad((function(x, dist.group.WORLD) ** 3).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
