"""The split of a backward, without processes."""

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from par_pipeline.runtime.weight_gradients import SplitBackward, unsplittable


class Handed(NamedTuple):
    """What a layer of another library hands to its hook."""

    weight: torch.Tensor
    compute: object
    operands: object = None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, hook):
        ctx.save_for_backward(x, weight)
        ctx.hook, ctx.original = hook, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        if ctx.hook is None:
            return g @ weight, g.t() @ x, None
        ctx.hook(Handed(ctx.original, lambda: g.t() @ x))
        return g @ weight, None, None


class Hooked(nn.Module):
    """A linear layer of another library, that offers a `weight_grad_hook`."""

    weight_grad_hook = None

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

    def forward(self, x):
        return Product.apply(x, self.weight, self.weight_grad_hook)


class Fused(nn.Module):
    """Parameters of its own, one of which is never used."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.randn(5, dtype=torch.float64))

    def forward(self, x):
        return x * self.gain


class Wide(Hooked):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return ProductOfOperands.apply(x, self.weight, self.weight_grad_hook)


class ProductOfOperands(Product):
    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        ctx.hook(Handed(ctx.original, lambda: g.t() @ x, (g, x)))
        return g @ weight, None, None


class Packed(nn.Module):
    """A layer that offers a `weight_grad_hook`, and calls its weight otherwise, as experts do."""

    weight_grad_hook = None

    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(5, 5, dtype=torch.float64))

    def forward(self, x):
        return Product.apply(x, self.up_proj, self.weight_grad_hook)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5).double(), nn.Tanh(), Hooked(), Fused(), nn.Linear(5, 5, bias=False).double())


def halves(module, batches, order):
    """Both halves of each microbatch's backward; `order` says which: 0 and ~0 are those of the first."""
    split = SplitBackward({0: module})
    with split.active():
        losses = [module(x).square().sum() for x in batches]
        for each in order:
            if each >= 0:
                split.begin()
                losses[each].backward()
                split.keep(0, each)
            else:
                split.finish(0, ~each, last=each == order[-1])


@pytest.mark.parametrize("listened", [False, True])
def test_the_two_halves_give_the_gradients_of_a_whole_backward(listened):
    split, whole = model(), model()
    calls = []
    if listened:
        for name, parameter in split.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    batches = [torch.randn(rows, 5, dtype=torch.float64) for rows in (3, 17, 1)]
    halves(split, batches, [0, 1, ~0, 2, ~1, ~2])
    for x in batches:
        whole(x).square().sum().backward()
    for (name, one), other in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(one, nn.Parameter)
        assert (one.grad is None) == (other.grad is None) == name.endswith("unused")
        if one.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
            assert calls.count(name) == (1 if listened else 0)  # with the sum
    assert not calls or "3.unused" not in calls


def test_weights_of_other_names_are_put_off_where_there_is_a_hook():
    torch.manual_seed(0)
    split, x = nn.Sequential(nn.Linear(5, 5, bias=False).double(), Packed()), torch.randn(4, 5, dtype=torch.float64)
    whole = copy.deepcopy(split)
    both = SplitBackward({0: split})
    with both.active():
        loss = split(x).square().sum()
        both.begin()
        loss.backward()
        both.keep(0, 0)
        assert len(both._later[0, 0]) == 2
        both.finish(0, 0, last=True)
    whole(x).square().sum().backward()
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)
    assert split[1].weight_grad_hook is None


def test_a_hook_of_the_layer_itself_and_not_of_its_class_is_there_in_the_next_step():
    """As that of experts of transformers, to which it was given when they were dealt out."""
    layer = nn.ReLU()
    layer.gain, layer.__dict__["weight_grad_hook"] = nn.Parameter(torch.ones(1)), None
    with SplitBackward({0: layer}).active():
        assert layer.weight_grad_hook is not None
    assert layer.weight_grad_hook is None


def test_the_first_half_computes_no_weight_gradient_and_the_module_is_as_before_afterwards():
    module = model()
    before = copy.deepcopy(list(module.state_dict()))
    split = SplitBackward({0: module})
    with split.active():
        split.begin()
        module(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
        split.keep(0, 0)
        held = split._later[0, 0]
        assert len(held) == 3
        there = [tuple(stand_in.shape) for stand_in, _ in split._pairs[0] if stand_in.grad is not None]
        assert there == [(5,), (5,)]  # of the bias and the gain
    assert list(module.state_dict()) == before
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
    assert all("forward" not in each.__dict__ and "weight_grad_hook" not in each.__dict__ for each in module.modules())


class Made(TorchDispatchMode):
    """Counts the tensors of some size that operators make."""

    def __init__(self, size):
        super().__init__()
        self.size, self.storages = size, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage().nbytes() >= self.size:
                self.storages |= {each.untyped_storage().data_ptr()} - given
        return result


@pytest.mark.parametrize("kind", [nn.Linear, Wide])
def test_products_of_listened_weights_make_one_buffer_in_a_step_and_no_other_tensor(kind):
    layer = kind(32, 32, bias=False) if kind is nn.Linear else kind()
    calls = []
    layer.weight.register_post_accumulate_grad_hook(calls.append)
    split = SplitBackward({0: layer})
    with split.active():
        for microbatch in range(4):
            split.begin()
            layer(torch.randn(3, 32)).sum().backward()
            split.keep(0, microbatch)
        for microbatch in range(4):
            with Made(layer.weight.nbytes) as made:
                split.finish(0, microbatch, last=microbatch == 3)
            assert len(made.storages) == (microbatch == 0)
            assert len(calls) == (microbatch == 3)


def test_an_exception_leaves_the_module_as_it_was():
    module = model()
    split = SplitBackward({0: module})
    with pytest.raises(KeyError), split.active():
        raise KeyError
    assert all(isinstance(parameter, nn.Parameter) for parameter in module.parameters())
    assert not split._later


def test_a_gradient_changed_by_a_hook_on_the_output_is_the_one_that_counts():
    def doubled(module, args, output):
        output.register_hook(lambda g: 2 * g)

    split, whole = model(), model()
    for each in (split, whole):
        each[4].register_forward_hook(doubled)
    x = torch.randn(4, 5, dtype=torch.float64)
    halves(split, [x], [0, ~0])
    whole(x).square().sum().backward()
    torch.testing.assert_close(split[4].weight.grad, whole[4].weight.grad, rtol=1e-12, atol=1e-12)


OF_ANOTHER_DTYPE = [torch.float32] if hasattr(torch.Tensor, "grad_dtype") else []  # torch of before has none


@pytest.mark.parametrize("before", [None, torch.float64, *OF_ANOTHER_DTYPE])
def test_gradients_are_added_to_what_is_there_already_and_to_what_comes_in_between(before):
    split, whole = model(), model()
    for parameter in (*split.parameters(), *whole.parameters()) if before is not None else ():
        if before is not parameter.dtype:
            parameter.grad_dtype = before
        parameter.grad = torch.ones_like(parameter, dtype=before)
    x, gain = torch.randn(4, 5, dtype=torch.float64), split[3].gain  # the gain of a stage that is not split, too
    splitting = SplitBackward({0: split})
    with splitting.active():
        splitting.begin()
        split(x).square().sum().backward()
        splitting.keep(0, 0)
        gain.square().sum().backward()
        splitting.finish(0, 0, last=True)
        gain.square().sum().backward()
    whole(x).square().sum().backward()
    for _ in range(2):
        whole[3].gain.square().sum().backward()
    for one, other in zip(split.parameters(), whole.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            tolerance = 1e-5 if one.grad.dtype == torch.float32 else 1e-12  # sums are in another order
            torch.testing.assert_close(one.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_sparse_gradients_of_embeddings_are_added():
    torch.manual_seed(0)
    split = nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Linear(5, 3))
    whole = copy.deepcopy(split)
    batches = [torch.tensor([1, 2, 2]), torch.tensor([6, 1])]
    halves(split, batches, [0, ~0, 1, ~1])
    for x in batches:
        whole(x).square().sum().backward()
    assert split[0].weight.grad.is_sparse
    torch.testing.assert_close(split[0].weight.grad.to_dense(), whole[0].weight.grad.to_dense())  # fp32, order of sums


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's compiler warns of torch
@pytest.mark.ranks(1)  # whose process has the compiler imported
def test_what_prevents_a_split_is_named():
    assert unsplittable(model()) is None
    words = unsplittable(nn.Sequential(nn.Linear(3, 3), nn.GRU(3, 3)))
    assert words == "its layer '1' is an nn.GRU, which keeps lists of its parameters"
    assert unsplittable(torch.compile(nn.Linear(3, 3), backend="eager")).startswith("it is under torch.compile")
    compiled = nn.Linear(3, 3)
    compiled.compile(backend="eager")
    assert unsplittable(nn.Sequential(compiled)).startswith("its layer '0' is under torch.compile")
