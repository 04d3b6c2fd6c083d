"""Tensors that are kept between calls are never those of a mode of torch, which are useless after it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from par_groups import ProcessGroups, Topology
from par_layers import Context, Mask
from par_layers._tensor_cache import kept_in, tensor_cache


def counted():
    calls = []

    @tensor_cache(maxsize=4)
    def numbers(count):
        calls.append(count)
        return torch.arange(count)

    return numbers, calls


def test_tensor_cache_fake_mode_keeps_no_fake():
    numbers, calls = counted()
    with FakeTensorMode():
        assert type(numbers(3)) is not torch.Tensor
    assert numbers(3).tolist() == [0, 1, 2]
    with FakeTensorMode():  # a real tensor among fakes would be an error
        assert type(numbers(3)) is not torch.Tensor
    assert numbers(3) is numbers(3)
    assert len(calls) == 3


def test_tensor_cache_inference_mode_keeps_normal_tensors():
    numbers, calls = counted()
    with torch.inference_mode():
        first = numbers(3)
    assert not first.is_inference()
    assert numbers(3) is first
    assert len(calls) == 1


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize, torch.func.vmap])
def test_tensor_cache_functorch_keeps_no_wrapper(transform):
    numbers, _ = counted()

    def product(x):
        return (x * numbers(2)).sum()

    transform(product)(torch.ones(3, 2) if transform is torch.func.vmap else torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    product(x).backward()
    assert x.grad.tolist() == [0, 1]


def test_tensor_cache_mode_that_watches_reads_the_cache():
    numbers, calls = counted()
    first = numbers(3)
    with FlopCounterMode(display=False):
        assert numbers(3) is first
    assert len(calls) == 1


def test_tensor_cache_compiled_function_has_own_tensors():
    numbers, _ = counted()
    compiled = torch.compile(lambda x: x * numbers(2), backend="eager")
    assert compiled(torch.ones(2)).tolist() == [0, 1]
    assert numbers(2).tolist() == [0, 1]


def test_kept_in_fake_mode_leaves_dict_alone():
    cache = {}
    with FakeTensorMode():
        kept_in(cache, "a", lambda: torch.ones(2))
    assert not cache
    with torch.inference_mode():
        first = kept_in(cache, "a", lambda: torch.ones(2))
    assert not first.is_inference()
    assert kept_in(cache, "a", lambda: torch.zeros(2)) is first


def fakely(context, inputs, mask):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        context.attention(*(mode.from_tensor(x.detach().requires_grad_()) for x in inputs), mask=mask)


def evaluate(context, inputs, mask):
    with torch.inference_mode():
        context.attention(*(x.detach() for x in inputs), mask=mask)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", [fakely, evaluate])
@pytest.mark.parametrize(
    "config", [{"mode": "ulysses"}, {"mode": "gather", "split": "zigzag"}, {"mode": "ring", "split": "zigzag"}]
)
def test_attention_first_use_under_mode_changes_nothing(config, before):
    mask = Mask(causal=True, window=5)
    with ProcessGroups(Topology.from_config({"sequence": {"size": 2, **config}}, 2)) as groups:
        generator = torch.Generator().manual_seed(dist.get_rank())
        inputs = [torch.randn(1, 8, heads, 4, generator=generator).requires_grad_() for heads in (6, 3, 3)]
        results = []
        for first in (None, before):
            context = Context(groups)
            if first is not None:
                first(context, inputs, mask)
            out = context.attention(*inputs, mask=mask)
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
        for expected, got in zip(*results, strict=True):
            assert type(got) is torch.Tensor
            assert torch.equal(expected, got)


def test_room_threads_do_not_share_memory():
    from par_layers.context.room import MessageBuffer

    room, like = MessageBuffer(), torch.empty(0)

    def fill(number):
        for _ in range(200):
            with room.of(1000, like) as memory:
                memory.fill_(number)
                assert bool((memory == number).all())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, range(4)))
