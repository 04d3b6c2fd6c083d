import collections
import enum
import json
import math
import pathlib
import random
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from par_checkpoint._errors import CorruptError
from par_checkpoint.format.tagged import check_round_trip, decode, encode

numbers = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats() | st.complex_numbers()
)
keys = (
    numbers
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.just("$tuple")
    | st.tuples(st.integers(), st.text(max_size=2))
)
leaves = keys | st.just(torch.float8_e5m2) | st.just(torch.Size((2, 0))) | st.just(range(1, 9, 3))


def containers(inner):
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.just("$x"), inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
    )


def back(value, where="extra"):
    tensors = {}
    text = json.dumps(encode(value, tensors, where), allow_nan=False)
    return decode(json.loads(text), tensors)


def shape_of(value):
    """A value with every type and bit spelled out."""
    if isinstance(value, dict):
        return (type(value), [(shape_of(key), shape_of(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [shape_of(item) for item in value])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(repr(shape_of(item)) for item in value))
    return (type(value), repr(value))


@given(st.recursive(leaves, containers, max_leaves=8))
def test_every_value_comes_back_with_its_types(value):
    assert shape_of(back(value)) == shape_of(value)
    check_round_trip(value, "extra")


@pytest.mark.parametrize(
    "value",
    [
        math.inf,
        -math.inf,
        math.nan,
        -0.0,
        5e-324,
        0.1,
        2**64,
        -(2**300),
        complex(-0.0, math.inf),
        b"\0\xff",
        bytearray(b"x"),
        "\ud800\0",
        (),
        {1: {(2, "x"): [None]}},
        {True: 1, None: 2, 1.5: 3, "1": 4},
        {"$tensor": "x"},
        {"$": 1, "b": 2},
        collections.Counter({3: 1, 1: 2}),
        pytest.param({frozenset({1, frozenset({"a", "b"})})}, id="sets"),  # whose order, and so their repr, is chance
        torch.Size([3, 4]),
        torch.bfloat16,
        torch.device("cuda", 1),
        torch.device("cpu"),
        range(10, 0, -2),
        pathlib.Path("a/b"),
        pathlib.PurePosixPath("/x"),
        pathlib.PureWindowsPath("c:\\x"),
        random.Random(3).getstate(),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_special_values_come_back(value):
    assert shape_of(back(value)) == shape_of(value)
    check_round_trip(value, "extra")


def test_whole_numbers_have_no_limit():
    assert back([10**5000]) == [10**5000]


def test_plain_json_stays_plain():
    value = {"epoch": 3, "losses": [0.5, 1.0], "name": "run", "best": None, "done": False}
    assert encode(value, {}, "extra") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"$int": "0x100000000000000000000"}', 2**80),
        ('{"$float": "inf"}', math.inf),
        ('{"$complex": ["1.0", "-2.0"]}', 1 - 2j),
        ('{"$bytes": "AP8="}', b"\0\xff"),
        ('{"$bytearray": "eA=="}', bytearray(b"x")),
        ('{"$range": [1, 9, 2]}', range(1, 9, 2)),
        ('{"$path": "a/b"}', pathlib.Path("a/b")),
        ('{"$posix_path": "/x"}', pathlib.PurePosixPath("/x")),
        ('{"$windows_path": "c:\\\\x"}', pathlib.PureWindowsPath("c:\\x")),
        ('{"$size": [2, 3]}', torch.Size([2, 3])),
        ('{"$dtype": "bfloat16"}', torch.bfloat16),
        ('{"$device": "cuda:1"}', torch.device("cuda", 1)),
        ('{"$tuple": [1, [2]]}', (1, [2])),
        ('{"$set": [1]}', {1}),
        ('{"$frozenset": ["a"]}', frozenset({"a"})),
        ('{"$dict": [[1, 2]]}', {1: 2}),
        ('{"$ordered_dict": [["a", 1]]}', collections.OrderedDict(a=1)),
        ('{"$counter": [[3, 1]]}', collections.Counter({3: 1})),
        ('{"$dict": [["$x", 1]]}', {"$x": 1}),
    ],
)
def test_the_words_on_disk_stay_what_they_are(text, value):
    """Checkpoints that were written with them are read for ever."""
    assert json.dumps(encode(value, {}, "x")) == text
    assert shape_of(decode(json.loads(text), {})) == shape_of(value)


def test_sets_are_written_in_one_order():
    words = [f"w{number}" for number in range(20)]
    assert encode(set(words), {}, "x") == {"$set": sorted(words)}


def test_the_order_of_a_dict_stays():
    assert list(back({"z": 1, "a": 2, 3: 3})) == ["z", "a", 3]


def test_tensors_are_kept_by_the_path_that_leads_to_them():
    tensors = {}
    value = {"rng": [torch.get_rng_state(), torch.tensor(1.5)], "n": 1}
    encoded = encode(value, tensors, "extra")
    assert list(tensors) == ["extra.rng.0", "extra.rng.1"]
    assert encoded == {"rng": [{"$tensor": "extra.rng.0"}, {"$tensor": "extra.rng.1"}], "n": 1}
    found = decode(encoded, tensors)
    assert torch.equal(found["rng"][0], value["rng"][0])
    check_round_trip(value, "extra")


def test_paths_that_read_alike_have_names_of_their_own():
    tensors = {}
    value = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}, 1: torch.tensor(3), "1": torch.tensor(4)}
    found = decode(json.loads(json.dumps(encode(value, tensors, "x"))), tensors)
    assert [int(found["a.b"]), int(found["a"]["b"]), int(found[1]), int(found["1"])] == [1, 2, 3, 4]
    assert len(tensors) == 4


def test_a_tensor_is_kept_without_its_graph_and_conjugation():
    tensors = {}
    encode([torch.zeros(2, requires_grad=True) * 2, torch.tensor([1 + 2j]).conj()], tensors, "x")
    assert not tensors["x.0"].requires_grad
    assert not tensors["x.1"].is_conj()
    assert tensors["x.1"].tolist() == [1 - 2j]


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    __slots__ = ()


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Colour.RED, "Colour"),
        (Text("x"), "Text"),
        (Point(1, 2), "Point"),
        (collections.defaultdict(int), "collections.defaultdict"),
        (collections.deque([1]), "collections.deque"),
        (lambda: 0, "function"),
        (int, "builtins.type"),
        (object(), "builtins.object"),
        (random.Random(), "random.Random"),
        (torch.Generator(), "Generator"),
    ],
    ids=lambda value: getattr(type(value), "__name__", "x"),
)
def test_anything_else_is_refused_where_it_is(value, name):
    with pytest.raises(TypeError, match=rf"^extra\['loader'\]\[1\]\[7\] is a .*{name}.*state_dict\(\)"):
        encode({"loader": [0, {7: value}]}, {}, "extra")


@pytest.mark.parametrize("key", [Colour.RED, (1, Text("x")), torch.tensor(1)])
def test_a_key_that_cannot_be_said_is_refused(key):
    with pytest.raises(TypeError, match=r"^extra\["):
        encode({key: 1}, {}, "extra")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.nn.Parameter(torch.zeros(1)),
        torch.zeros(1, device="meta"),
        torch.eye(2).to_sparse(),
    ],
)
def test_an_extraordinary_tensor_is_refused_where_it_is(tensor):
    with pytest.raises(TypeError, match=r"^extra\['t'\] is a .*whole, dense and detached"):
        encode({"t": tensor}, {}, "extra")


def test_a_dtype_without_a_name_in_files_is_refused_by_tensor():
    with pytest.raises(ValueError, match=r"'extra\.t' is torch\.complex128"):
        encode({"t": torch.zeros(1, dtype=torch.complex128)}, {}, "extra")


def test_what_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(TypeError, match=r"^extra\[0\]\[0\].* is nested deeper than 100, or holds itself"):
        encode({}, {}, "extra") or encode(value, {}, "extra")


def test_the_deepest_value_that_is_taken_comes_back():
    value = 1
    for _ in range(100):
        value = {1: value}
    check_round_trip(value, "extra")


def stepped(make, steps=3):
    """A scheduler after some steps, a fresh one, and their optimizers."""
    pairs = []
    for count in (steps, 0):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        scheduler = make(optimizer)
        for _ in range(count):
            optimizer.step()
            scheduler.step(*[1.0][: isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)])
        pairs.append((scheduler, optimizer))
    return pairs


SCHEDULERS = {
    "multi": lambda o: lr_scheduler.MultiStepLR(o, [4, 4, 6]),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "warm": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=3, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.MultiStepLR(o, [2, 3])], milestones=[2]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_where_it_was(name):
    (scheduler, optimizer), (fresh, other) = stepped(SCHEDULERS[name])
    state = scheduler.state_dict()
    check_round_trip(state, "scheduler")
    fresh.load_state_dict(back(state, "scheduler"))
    other.load_state_dict(optimizer.state_dict())
    rates = []
    for one, its in ((scheduler, optimizer), (fresh, other)):
        rates.append([])
        for _ in range(6):
            its.step()
            one.step(*[1.0][: isinstance(one, lr_scheduler.ReduceLROnPlateau)])
            rates[-1].append(its.param_groups[0]["lr"])
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1 or name == "plateau"


def test_plain_json_would_have_lost_the_milestones():
    (scheduler, _), _ = stepped(SCHEDULERS["multi"])
    assert list(json.loads(json.dumps(scheduler.state_dict()))["milestones"]) == ["4", "6"]
    assert back(scheduler.state_dict())["milestones"] == collections.Counter({4: 2, 6: 1})


def test_a_scaler_comes_back():
    state = torch.amp.GradScaler("cpu").state_dict()
    check_round_trip(state, "extra")
    assert back(state) == state


def test_random_states_go_on_where_they_were():
    state = random.getstate()
    torch_state = torch.get_rng_state()
    expected = (random.random(), torch.rand(3))
    random.setstate(back(state))
    torch.set_rng_state(back(torch_state))
    assert random.random() == expected[0]
    assert torch.equal(torch.rand(3), expected[1])


def test_the_state_of_numpys_generators_goes_on_where_it_was():
    numpy = pytest.importorskip("numpy")
    legacy, new = numpy.random.RandomState(1), numpy.random.Generator(numpy.random.PCG64(1))
    states = (legacy.get_state(), new.bit_generator.state)
    check_round_trip(states, "extra")
    expected = (legacy.rand(), new.random())
    found = back(states)
    legacy.set_state(found[0])
    new.bit_generator.state = found[1]
    assert (legacy.rand(), new.random()) == expected


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "int64", "uint64", "uint8", "bool", "complex64"])
def test_numpys_arrays_and_numbers_come_back_as_such(kind):
    numpy = pytest.importorskip("numpy")
    array = numpy.array([[0, 1, 3]], dtype=kind)
    for value in (array, array.T, array[:, ::-1], array[0, 2], numpy.array(1, dtype=kind), array[:0]):
        check_round_trip(value, "extra")
        found = back(value)
        assert type(found) is type(value)
        assert found.dtype == value.dtype
        assert numpy.array_equal(found, value)


def test_numpys_nan_of_any_sign_is_taken():
    numpy = pytest.importorskip("numpy")
    for value in (numpy.float64("nan"), -numpy.float32("nan"), -numpy.float64("inf"), -numpy.float16(0.0)):
        check_round_trip([value], "extra")
        assert repr(back(value)) == repr(value)


def test_what_torch_cannot_hold_of_numpy_is_refused_where_it_is():
    numpy = pytest.importorskip("numpy")
    for value in (
        numpy.array(["x"]),
        numpy.array([object()]),
        numpy.str_("x"),
        numpy.datetime64("2020-01-01"),
        numpy.longdouble(1),
        numpy.zeros(2, dtype=">f4"),
        numpy.ma.masked_array([1]),
    ):
        with pytest.raises(TypeError, match=r"^extra\['n'\] is a numpy"):
            encode({"n": value}, {}, "extra")


def test_without_numpy_its_values_come_back_as_torchs(monkeypatch):
    def numpy(self):
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(torch.Tensor, "numpy", numpy)
    tensors = {"x": torch.arange(3)}
    assert decode({"$number": ["float32", 0.5]}, {}) == 0.5
    assert decode({"$array": "x"}, tensors) is tensors["x"]


def test_numpy_is_not_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(TypeError, match=r"is a builtins\.object"):
        encode(object(), {}, "extra")


@pytest.mark.parametrize(
    "value",
    [
        {"$pickle": "x"},
        {"$tuple": [1], "$list": []},
        {"$tuple": 1},
        {"$tensor": "missing"},
        {"$tensor": ["x"]},
        {"$dtype": "load"},
        {"$dtype": "no_such"},
        {"$device": "nowhere"},
        {"$float": "x"},
        {"$bytes": 1},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$set": [{"$dict": []}]},
        {"$number": ["float32"]},
        {"$number": ["float32", "x"]},
        {"$complex": ["1"]},
    ],
    ids=str,
)
def test_a_value_that_was_never_written_is_corrupt(value):
    with pytest.raises(CorruptError, match=r"par_checkpoint\.json: holds a value that cannot be read"):
        decode([value], {})


def test_the_check_names_where_a_value_changes(monkeypatch):
    monkeypatch.setattr("par_checkpoint.format.tagged.decode", lambda value, tensors: {"a": [1, {"b": 2.0}], "c": 1})
    check_round_trip({"a": [1, {"b": 2.0}], "c": 1}, "extra")
    for value, where in (
        ({"a": [1, {"b": 2}], "c": 1}, r"extra\['a'\]\[1\]\['b'\] does"),
        ({"a": [1, {"b": 2.0}], "c": True}, r"extra\['c'\] does"),
        ({"c": 1, "a": [1, {"b": 2.0}]}, "extra does"),
        ({"a": [1], "c": 1}, r"extra\['a'\] does"),
        ([], "extra does"),
    ):
        with pytest.raises(TypeError, match=f"^{where} not come back"):
            check_round_trip(value, "extra")


def test_the_check_tells_zeros_and_dtypes_apart(monkeypatch):
    monkeypatch.setattr("par_checkpoint.format.tagged.decode", lambda value, tensors: [0.0, torch.zeros(1)])
    check_round_trip([0.0, torch.ones(1)], "extra")
    for value, where in (([-0.0, torch.zeros(1)], r"extra\[0\]"), ([0.0, torch.zeros(1).double()], r"extra\.1")):
        with pytest.raises(TypeError, match=f"^{where} does not come back"):
            check_round_trip(value, "extra")
