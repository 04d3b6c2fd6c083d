"""What layers keep waits in host memory: the same bits, each storage once, on its way back before it is asked for."""

import copy
import gc
import math
import pickle
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from par_groups import HostCopies
from par_recompute import Drop, Keep, Layers, ToHost, checkpoint_layers, saved
from par_recompute.run.away import Away

from .models import MODELS, Block
from .training import equal, handed_on, train

POLICIES = {
    "nothing dropped": None,
    "cheap": "cheap",
    "layers": "layers",
    "Layers(2)": Layers(2),
    "Drop": Drop(lambda name, module: True),
    "Keep half": Keep(0.5),
}


class Shelf:
    """A place that knows what it was given, what it was asked to bring, and for what it was asked ahead."""

    def __init__(self):
        self.values, self.log = [], []

    def store(self, tensor):
        self.values.append(tensor.clone())
        return len(self.values) - 1

    def fetch(self, number):
        self.log.append(("fetch", number))

    def load(self, number):
        self.log.append(("load", number))
        return self.values[number].clone()

    def bytes(self):
        return sum(value.nbytes for value in self.values)


def on(shelf, **options):
    return ToHost(store=shelf.store, load=shelf.load, fetch=shelf.fetch, **options)


@pytest.fixture(scope="module")
def reference():
    return {name: train(*make()) for name, make in MODELS.items()}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_the_same_bits(name, policy, reference):
    for resident in (0, 4_000, "1GB"):
        model, inputs = MODELS[name]()
        shelf = Shelf()
        checkpoint_layers(model, POLICIES[policy], to_host=on(shelf, resident=resident))
        assert equal(train(model, inputs), reference[name])
        report = saved(model)
        assert (report.on_host == 0) == (resident == "1GB") == (shelf.values == [])
        if resident == 4_000 and name != "llama":  # whose keyword arguments stay with a layer that runs again
            assert report.counted - report.on_host <= resident


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_each_storage_is_put_away_once_and_brought_back_once(name, policy):
    model, inputs = MODELS[name]()
    shelf = Shelf()
    checkpoint_layers(model, POLICIES[policy], example=inputs, to_host=on(shelf))
    loss = model(inputs).sum()
    report = saved(model)
    # Rotary positions are keyword arguments, which torch's checkpoint of a whole layer holds itself.
    held = 2 * 15 * 8 * 4 if name == "llama" and policy == "layers" else 0
    assert shelf.bytes() == report.on_host == report.counted - held > 0
    loss.backward()
    loads = [number for kind, number in shelf.log if kind == "load"]
    moved = shelf.bytes() + sum(shelf.values[number].nbytes for number in loads)
    assert moved == 2 * report.on_host
    assert sorted(loads) == list(range(len(shelf.values)))
    fetched = [place for place, (kind, _) in enumerate(shelf.log) if kind == "fetch"]
    assert len({shelf.log[place] for place in fetched}) == len(fetched) > 0
    assert all(place < shelf.log.index(("load", shelf.log[place][1])) for place in fetched)


def test_the_report_has_a_column_for_it():
    model = nn.Sequential(Block(), Block())
    checkpoint_layers(model, "layers", to_host=on(Shelf(), resident="4KB"))
    model(torch.randn(2, 15, 32, requires_grad=True)).sum().backward()
    assert str(saved(model)).splitlines() == [
        "layer  predicted  counted  on host  again",
        "0      -          3.8 kB   0 B      the layer",
        "1      -          3.8 kB   3.8 kB   the layer",
        "all    -          7.7 kB   3.8 kB",
    ]


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
def test_what_layers_before_have_put_away_is_on_its_way(ahead):
    model, inputs = MODELS["gpt"]()
    shelf = Shelf()
    checkpoint_layers(model, "layers", to_host=on(shelf, ahead=ahead))
    model(inputs).sum().backward()
    first = [("fetch", 1), ("fetch", 0)][:ahead]
    second = [("fetch", 0)] if ahead == 1 else []
    assert shelf.log == [*first, ("load", 2), *second, ("load", 1), ("load", 0)]


def test_microbatches_in_any_order():
    model, _ = MODELS["gpt"]()
    plain, _ = MODELS["gpt"]()
    inputs = torch.randint(50, (6, 15))
    checkpoint_layers(model, "cheap", to_host=on(Shelf()))
    for order in ([0, 1, 2], [2, 0, 1]):
        for each in (model, plain):
            losses = [each(part).square().mean() for part in inputs.chunk(3)]
            for number in order:
                losses[number].backward()
    assert equal([[p.grad for p in model.parameters()]], [[p.grad for p in plain.parameters()]])


class Chain(nn.Module):
    """Squares, of which autograd saves each input."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.tensor(1.1)), nn.Identity()

    def forward(self, x):
        for _ in range(4):
            x = x * x * self.scale
        return x


def chain(layers=5):
    return nn.Sequential(*(Chain() for _ in range(layers))), torch.linspace(0.5, 1.0, 24)


class LateStreams(TorchDispatchMode):
    """Streams as late as an accelerator's may be: a copy is made when something waits for it, and is NaN until then.

    In the place of torch.cuda, for tensors of the CPU. Memory that is freed while a copy reads it is read as NaN.
    """

    def __init__(self):
        super().__init__()
        self.computing = self.current = LateStream()
        self.made = [self.computing]

    def Stream(self, device):
        self.made.append(LateStream())
        return self.made[-1]

    def current_stream(self, device):
        return self.computing

    @contextmanager
    def stream(self, stream):
        self.current = stream
        try:
            yield
        finally:
            self.current = self.computing

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.copy_.default or self.current is self.computing:
            return func(*args, **(kwargs or {}))
        target, source = (weakref.ref(each) for each in args[:2])

        def late():
            if target() is not None:
                target().data.copy_(source().data if source() is not None else torch.tensor(math.nan))

        self.current.late.append(late)
        return args[0].fill_(math.nan)


class LateEvent:
    def __init__(self, stream, place):
        self.at, self.place = stream, place

    def query(self):
        return self.at.ran >= self.place


class LateStream:
    def __init__(self):
        self.late, self.ran = [], 0

    def record_event(self):
        return LateEvent(self, self.ran + len(self.late))

    def wait_event(self, event):
        if isinstance(self, LateStream) and event.at is not self:
            while event.at.ran < event.place:
                event.at.ran += 1
                event.at.late.pop(0)()

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())


def put_on(model, policy, streams, **options):
    """`checkpoint_layers` with copies on these streams."""
    checkpoint_layers(model, policy, to_host=ToHost(**options))
    layers = [module.par_recompute_layer for module in model.modules() if "par_recompute_layer" in module.__dict__]
    away = Away(ToHost(**options), HostCopies(streams))
    for layer in layers:
        layer._away = away
    return away


@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("policy", [None, "layers", "cheap"])
def test_copies_beside_the_computation_are_waited_for(policy, ahead, reference):
    model, inputs = MODELS["gpt"]()
    streams = LateStreams()
    put_on(model, policy, streams, ahead=ahead)
    with streams:
        assert equal(train(model, inputs), reference["gpt"])
    assert len(streams.made) == 3
    if ahead < 2:
        assert all(stream.ran > 0 for stream in streams.made[1:])


@pytest.mark.parametrize("resident", [0, 3])
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_on_the_device_are_what_may_stay_the_running_layer_and_those_ahead(ahead, resident):
    layers = 8
    model, given = chain(layers)
    streams, there = LateStreams(), {"forward": [], "backward": []}
    away = put_on(model, None, streams, ahead=ahead, resident=resident * 24 * 4)

    def count(when):
        elements = [each for each in away._elements.values() if each.is_stored]
        staying = [each for each in away._elements.values() if not each.is_stored]
        assert sum(each.size for each in staying) <= resident * 24 * 4
        there[when].append(sum(each._loaded is not None or each.copy.is_on_device for each in elements))

    for layer in model:
        layer.register_forward_hook(lambda module, args, output: count("forward"))
        layer.register_full_backward_pre_hook(lambda module, gradients: count("backward"))
    with streams:
        model(given.requires_grad_()).sum().backward()
    each = 8  # of a layer: x and x * x of each square
    away_of = [each - resident, *(each for _ in range(layers - 1))]
    assert there["forward"] == [sum(away_of[max(number - ahead, 0) : number + 1]) for number in range(layers)]
    assert max(there["backward"]) <= each * (ahead + 1)


def copies_made(streams):
    """Return the copies out, and the copies back, that have begun so far."""
    out, into = streams.made[1:]
    return out.ran + len(out.late), into.ran + len(into.late)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_to_host_copies_out_only_what_is_copied_back(ahead):
    layers, each = 6, 8
    model, given = chain(layers)
    streams = LateStreams()
    put_on(model, None, streams, ahead=ahead)

    def copied(act):
        before = copies_made(streams)
        with streams:
            act()
        return tuple(now - then for now, then in zip(copies_made(streams), before, strict=True))

    def step(accumulated=1):
        losses = [model(given.clone().requires_grad_()).sum() for _ in range(accumulated)]
        for loss in reversed(losses):
            loss.backward()

    with streams:
        step()  # the first step cannot predict its length
    away = each * (layers - ahead - 1)
    assert [copied(step) for _ in range(2)] == [(away, away)] * 2
    # A longer step copies out everything that it cannot predict, and what it predicted wrongly.
    longer = each * (2 * layers - ahead - 1)
    assert copied(lambda: step(2))[1] == longer
    assert copied(lambda: step(2)) == (longer, longer)


def test_a_tensor_that_is_changed_while_it_is_copied_out_is_an_error_with_its_place():
    for ahead in (0, 9):  # let go already, or there still
        model, given = chain(3)
        streams = LateStreams()
        put_on(model, None, streams, ahead=ahead)
        changed = []
        model[0].register_forward_hook(lambda module, args, output: changed.append(output))  # noqa: B023 - at once
        with streams:
            first = model[0](given)
            second = model[1](first)
            with torch.no_grad():
                changed[0].add_(1)
            loss = model[2](second).sum()
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[24\], saved in layer '1'"):
                loss.backward()


class Metadata:
    """Something that a node of a graph holds, and that can be watched."""


def test_a_graph_without_backward_is_free_as_soon_as_nobody_has_it():
    def left(**options):
        model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        streams = LateStreams()
        away = put_on(model, None, streams, **options)
        with streams:
            out = model(torch.randn(4, 8))
        assert (away._resident > 0) == ("resident" in options)
        out.grad_fn.metadata["watched"] = watched = Metadata()
        return weakref.ref(watched), away

    gc.disable()
    try:
        for options in ({}, {"resident": 10**6}):
            watched, away = left(**options)
            assert watched() is None
            assert (away._resident, len(away._elements), len(away._calls)) == (0, 0, 0)
    finally:
        gc.enable()


def test_a_retained_graph_comes_back_twice():
    model, inputs = MODELS["gpt"]()
    parameters = list(model.parameters())
    streams = LateStreams()
    put_on(model, "cheap", streams, ahead=1)
    with streams:
        for _ in range(2):
            loss = model(inputs).square().mean()
            first = torch.autograd.grad(loss, parameters, retain_graph=True)
            again = torch.autograd.grad(loss, parameters)
            assert equal([first], [again])


def test_what_stays_is_offered_to_the_hooks_around():
    model, given = chain(2)
    checkpoint_layers(model, None, to_host=ToHost())  # of tensors on the CPU nothing is copied
    with handed_on(model) as sizes:
        loss = model(given).sum()
    report = saved(model)
    assert report.on_host == 0 < report.counted
    assert report.counted == sum(sizes.values())
    loss.backward()


def test_parameters_buffers_and_their_views_stay():
    shelf = Shelf()
    layer = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))
    model = nn.Sequential(layer)
    checkpoint_layers(model, None, to_host=on(shelf), layers=[layer])
    model(torch.randn(4, 8, requires_grad=True)).sum().backward()
    assert {value.numel() for value in shelf.values} == {4 * 8, 8}  # inputs of both, and statistics of the batch


def test_without_gradients_nothing_is_put_away():
    model, inputs = MODELS["gpt"]()
    shelf = Shelf()
    checkpoint_layers(model, None, to_host=on(shelf))
    with torch.no_grad():
        model(inputs)
    assert shelf.values == []


def test_an_exception_in_forward_leaves_nothing_behind():
    model = nn.Sequential(Block())
    checkpoint_layers(model, None, to_host=on(Shelf()))
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 4, 31))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    model(torch.randn(2, 4, 32)).sum().backward()


def test_copies_and_pickles_of_a_model_have_hosts_of_their_own(reference):
    model, inputs = MODELS["gpt"]()
    checkpoint_layers(model, "layers", to_host=ToHost(resident=100))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        theirs = {id(module.par_recompute_layer._away) for module in other.h}
        assert len(theirs) == 1
        assert theirs != {id(model.h[0].par_recompute_layer._away)}
        assert equal(train(other, inputs), reference["gpt"])


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"resident": -1}, ValueError, "resident=-1: a size is from 0 to"),
        ({"resident": "much"}, ValueError, "resident='much': a size is a number and one of"),
        ({"resident": 0.5}, TypeError, "resident is 0.5; give bytes, or a text"),
        ({"ahead": -1}, ValueError, "ahead is -1 layers; give 0 or more"),
        ({"store": torch.clone}, ValueError, "set store and load together"),
        ({"fetch": torch.clone}, ValueError, r"only \['fetch'\] of store, load and fetch is set"),
    ],
)
def test_what_options_refuse(keywords, error, message):
    with pytest.raises(error, match=message):
        ToHost(**keywords)


def test_something_else_than_options_is_refused_and_leaves_the_model_as_it_was():
    model, _ = MODELS["gpt"]()
    with pytest.raises(TypeError, match=r"to_host is 'host'; give a ToHost, such as ToHost\(ahead=2\), or None"):
        checkpoint_layers(model, None, to_host="host")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
