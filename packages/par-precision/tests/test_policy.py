"""Casts and settings around forward."""

import collections
import copy
import dataclasses
import inspect
import io
import threading
import types

import pytest
import torch
from torch import nn

from par_precision import mixed, precision_of
from par_precision._policy import Policy, called, tf32

SETTINGS = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)


def settings():
    return [each.fp32_precision for each in SETTINGS]


class Echo(nn.Module):
    """Returns what it was given, and notes what products are made in."""

    def forward(self, *args, **keywords):
        self.autocast = torch.is_autocast_enabled("cpu")
        self.tf32 = settings()
        return args, keywords


def within(module, precision, output_dtype=None):
    """The module in a precision; for TF32, which a CPU has not, by the policy alone."""
    if precision == "tf32":
        Policy(precision_of(precision), "cpu", output_dtype).attach(module)
    else:
        optimizer = torch.optim.SGD([*module.parameters()] or [nn.Parameter(torch.zeros(1))])
        optimizer.param_groups[0]["params"] = [*module.parameters()]
        mixed(module, optimizer, precision, output_dtype=output_dtype)
    return module


def echo(precision, output_dtype=None):
    return within(Echo(), precision, output_dtype)


def test_floating_point_inputs_take_the_dtype_of_the_weights_wherever_they_are():
    floats, wholes = torch.ones(2), torch.ones(2, dtype=torch.int64)
    args, keywords = echo("bf16")([floats, {"x": wholes}], "text", mask=(floats.double(), None))
    assert args[0][0].dtype == keywords["mask"][0].dtype == torch.bfloat16
    assert args[0][1]["x"] is wholes
    assert (args[1], keywords["mask"][1]) == ("text", None)
    args, _ = echo("bf16-amp")(floats)
    assert args[0] is floats


def test_half_precision_outputs_become_fp32_and_others_stay():
    args, keywords = echo("bf16", torch.float32)(torch.ones(2), x=torch.ones(2, dtype=torch.int32))
    assert args[0].dtype == torch.float32
    assert keywords["x"].dtype == torch.int32
    double = torch.ones(2, dtype=torch.float64)
    assert echo("fp32", torch.float32)(double)[0][0] is double


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-amp", "tf32"])
def test_autocast_and_tf32_are_on_inside_alone(precision):
    before = settings()
    module = echo(precision)
    module()
    assert module.autocast is (precision == "bf16-amp")
    assert module.tf32 == (["tf32"] * 3 if precision == "tf32" else before)
    assert settings() == before
    assert not torch.is_autocast_enabled("cpu")


def test_tf32_is_on_in_the_backward_pass_of_its_optimizer():
    assert_on = Policy(precision_of("tf32"), "cuda", None)
    before = settings()
    with assert_on.backward():
        assert settings() == ["tf32"] * 3
    assert settings() == before
    with Policy(precision_of("bf16"), "cuda", None).backward():
        assert settings() == before


def test_tf32_puts_the_users_own_settings_back_after_an_error():
    before = settings()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        with pytest.raises(ArithmeticError), tf32():
            raise ArithmeticError
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before[0]


def test_the_items_of_containers_are_what_is_called():
    class Callable(nn.ModuleList):
        def forward(self, x):
            return self[0](x)

    first, second, third = nn.Identity(), nn.Sequential(nn.Identity()), Callable([nn.Identity()])
    nested = nn.ModuleDict({"a": nn.ModuleList([first, second]), "b": third, "c": first})
    assert called(nested) == [first, second, third]
    assert called(first) == [first]
    assert called(nn.ModuleList()) == []
    without_forward = nn.Module()
    without_forward.actor = first
    assert called(without_forward) == [first]
    without_forward.forward = lambda x: x
    assert called(without_forward) == [without_forward]


def test_an_item_that_runs_within_another_is_left_to_that_one():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            (self.between,), _ = self.inner(x)
            return self.between

    inner = Echo()
    around = Around(inner)
    within(nn.ModuleList([inner, around]), "bf16", torch.float32)
    assert around(torch.ones(2)).dtype == torch.float32
    assert around.between.dtype == torch.bfloat16
    assert inner(torch.ones(2))[0][0].dtype == torch.float32


def test_two_policies_around_a_module_leave_nothing_on():
    """As two optimizers of one module make them."""
    module, before = echo("bf16-amp"), settings()
    for precision in ("bf16-amp", "tf32", "tf32"):
        within(module, precision)
    module()
    assert (module.autocast, module.tf32) == (True, ["tf32"] * 3)
    assert (torch.is_autocast_enabled("cpu"), settings()) == (False, before)


def test_an_interrupted_forward_leaves_nothing_behind():
    """Ctrl-C in a notebook is no Exception."""

    class Interrupted(Echo):
        def forward(self, *args):
            if args[0] is None:
                raise KeyboardInterrupt
            return super().forward(*args)

    for precision in ("bf16", "bf16-amp"):
        module = within(Interrupted(), precision)
        with pytest.raises(KeyboardInterrupt):
            module(None)
        assert not torch.is_autocast_enabled("cpu")
        (x,), _ = module(torch.ones(2))
        assert (x.dtype == torch.bfloat16, module.autocast) == (precision == "bf16", precision == "bf16-amp")


def test_threads_each_run_within_the_policy():
    inside, answered = threading.Event(), threading.Event()

    class Slow(Echo):
        def forward(self, x):
            if threading.current_thread() is other:
                inside.set()
                assert answered.wait(10)
            return x

    module, found = within(Slow(), "bf16"), []
    other = threading.Thread(target=lambda: found.append(module(torch.ones(2)).dtype))
    other.start()
    assert inside.wait(10)
    found.append(module(torch.ones(2)).dtype)
    answered.set()
    other.join()
    assert found == [torch.bfloat16] * 2


def test_what_forward_writes_into_an_argument_is_seen_by_the_caller():
    class Notes(nn.Module):
        def forward(self, x, *, notes):
            notes["mean"] = x.mean()
            return x

    for precision in ("bf16", "bf16-amp"):
        module, notes = within(Notes(), precision, torch.float32), {}
        module(torch.ones(2), notes=notes)
        assert notes["mean"] == 1


def test_a_copy_and_a_saved_module_run_by_themselves():
    module = within(nn.Linear(2, 2), "bf16-amp", torch.float32)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        nn.init.zeros_(other.weight)
        assert torch.equal(other(torch.ones(2)), other.bias.bfloat16().float())
    assert inspect.signature(module.forward) == inspect.signature(nn.Linear(2, 2).forward)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "bf16-amp", "fp16"])
def test_a_module_compiles_to_one_graph_with_its_policy(precision, in_place):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = within(nn.Sequential(nn.Linear(4, 4), nn.GELU()), precision, torch.float32), torch.randn(2, 4)
    expected = module(x)
    if in_place:
        module.compile(backend="eager", fullgraph=True)
    compiled = module if in_place else torch.compile(module, backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)  # of the same dtype, too
    assert not torch.is_autocast_enabled("cpu")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A record that cannot be written to."""

    value: torch.Tensor
    count: int = 3


class Slotted:
    """A record without a dict, which refers to itself."""

    __slots__ = ("me", "value")

    def __init__(self, value):
        self.value, self.me = value, self


class Cache:
    """An object that a forward writes to, for its owner to find."""

    def __init__(self, value):
        self.value = value

    def update(self, value):
        self.value = value


RECORDS = {
    "dataclass": Frozen,
    "slots": Slotted,
    "namespace": lambda value: types.SimpleNamespace(value=value),
    "mapping": lambda value: collections.UserDict(value=value),
    "record in a record": lambda value: types.SimpleNamespace(value=value, inner=[Frozen(value)]),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_tensors_in_records_are_cast_in_copies(kind):
    def value_of(record):
        return record["value"] if kind == "mapping" else record.value

    given = RECORDS[kind](torch.ones(2))
    (taken,), _ = (module := within(Echo(), "bf16", None))(given)
    assert type(taken) is type(given)
    assert (value_of(given).dtype, value_of(taken).dtype) == (torch.float32, torch.bfloat16)
    (back,), _ = within(Echo(), "bf16", torch.float32)(taken)
    assert value_of(back).dtype == torch.float32
    if kind == "record in a record":
        assert (taken.inner[0].value.dtype, taken.inner[0].count) == (torch.bfloat16, 3)
    if kind != "slots":  # a copy of a record that refers to itself refers to the first one
        assert module(taken)[0][0] is taken  # nothing is cast


class Pair(tuple):
    """A tuple that computes its items."""

    __slots__ = ()

    def __new__(cls, value):
        return super().__new__(cls, (value, 2 * value))


class Row(list):
    """A list of another class."""


@pytest.mark.parametrize("make", [Pair, lambda value: Row([value, 3])], ids=["tuple", "list"])
def test_tensors_in_subclasses_of_sequences_are_cast_in_copies(make):
    given = make(torch.ones(2))
    (taken,), _ = within(Echo(), "bf16", None)(given)
    assert (type(taken), len(taken)) == (type(given), 2)
    assert (given[0].dtype, taken[0].dtype) == (torch.float32, torch.bfloat16)


def test_rnn_takes_and_returns_packed_sequences_in_half_precision():
    packed = nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])
    rnn = nn.RNN(4, 4)
    output, _ = within(rnn, "bf16", torch.float32)(packed)
    assert type(output) is type(packed)
    assert output.data.dtype == torch.float32
    assert torch.equal(output.batch_sizes, packed.batch_sizes)


def test_a_distribution_that_is_returned_has_fp32_parameters():
    (found,), _ = within(Echo(), "bf16", torch.float32)(torch.distributions.Normal(torch.zeros(2), torch.ones(2)))
    assert found.log_prob(torch.zeros(2)).dtype == torch.float32


def test_an_object_with_methods_stays_the_callers_own():
    cache = Cache(torch.ones(2))
    (taken,), _ = within(Echo(), "bf16", torch.float32)(cache)
    assert taken is cache
    assert cache.value.dtype == torch.float32
