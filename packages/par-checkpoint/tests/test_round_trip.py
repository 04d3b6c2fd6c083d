"""What `save` takes, `load` gives back or names; everything else `save` refuses before it writes."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from par_checkpoint import CheckpointError, Checkpoints, Format, latest, load, read_tensor, save, verify

STYLES = ["huggingface", "torch"]
STEPS = (3, np.int64(3), np.uint8(3), torch.tensor(3), torch.tensor([3], dtype=torch.int32))
NO_STEPS = (3.0, True, "3", np.float32(3), np.bool_(True), torch.tensor(True), torch.tensor(3.0), torch.ones(2), (3,))


@pytest.mark.parametrize("step", STEPS, ids=repr)
def test_a_whole_step_comes_back_as_an_int(step, tmp_path):
    save(tmp_path / "c", model={"w": torch.ones(2)}, step=step)
    found = load(tmp_path / "c", model={"w": torch.zeros(2)}).step
    assert (found, type(found)) == (3, int)
    Checkpoints(tmp_path / "run", every=np.int64(3)).save(step, model={"w": torch.ones(2)})
    assert latest(tmp_path / "run") == str(tmp_path / "run" / "step-00000003")


@pytest.mark.parametrize("step", NO_STEPS, ids=repr)
def test_a_step_that_is_no_whole_number_is_refused(step, tmp_path):
    save(tmp_path / "c", model={"w": torch.ones(2)}, step=2)
    text = r"^step=.*: a \w+ is no whole number; pass an int"
    for call in (
        lambda: save(tmp_path / "c", model={"w": torch.zeros(2)}, step=step, overwrite=True),
        lambda: Checkpoints(tmp_path / "run").save(step, model={"w": torch.zeros(2)}),
    ):
        with pytest.raises(TypeError, match=text):
            call()
    assert read_tensor(tmp_path / "c", "w").tolist() == [1, 1]
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("name", ["every", "keep_last", "keep_every"])
def test_counts_of_checkpoints_are_whole_numbers(name):
    with pytest.raises(TypeError, match=rf"{name}=2.5: a float is no whole number; pass an int"):
        Checkpoints("run", **{name: 2.5})


NAMES = st.text(min_size=0, max_size=8) | st.sampled_from(
    [
        "__metadata__",
        "_extra_state",
        "a._extra_state",
        "w.",
        ".",
        "a.b",
        "module.w",
        "_orig_mod.w",
        "\0",
        "\ud800",
        "x" * 300,
    ]
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
HASHABLE = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=6,
)
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]),
)
MODELS = st.dictionaries(NAMES, TENSORS | VALUES | st.dictionaries(NAMES, TENSORS, max_size=2), max_size=5)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).tolist() if tensor.dtype != torch.bool else tensor.tolist()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and (not one.numel() or bits(one) == bits(other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)  # noqa: PLR0124 - NaN


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=15, deadline=None)
@given(model=MODELS, extra=VALUES)
def test_what_save_takes_load_gives_back(style, model, extra):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        try:
            save(path, model=model, extra=extra, format=Format(style=style))
        except (TypeError, ValueError):
            assert not os.listdir(folder)  # noqa: PTH208 - names
            return
        assert verify(path) == []
        into = {name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else "?" for name, each in model.items()}
        report = load(path, model=into)
        assert same(report.extra, extra)
        assert into.keys() == model.keys()
        for name, value in model.items():
            assert same(into[name], value), name
        assert (report.missing, report.unexpected) == ((), ())


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=15, deadline=None)
@given(slots=st.dictionaries(NAMES, TENSORS | VALUES, max_size=3), options=st.dictionaries(NAMES, VALUES, max_size=3))
def test_what_save_takes_of_an_optimizer_load_gives_back(style, slots, options):
    model = nn.Linear(2, 2)
    reserved = {"params", "param_names", "lr", "momentum"}
    options = {name: value for name, value in options.items() if name not in reserved}

    def made():
        return torch.optim.SGD(model.parameters(), lr=0.1)

    optimizer = made()
    optimizer.param_groups[0].update(options)
    optimizer.state[model.weight].update(slots)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c"
        try:
            save(path, model=model, optimizer=optimizer, format=Format(style=style))
        except (TypeError, ValueError):
            assert not os.listdir(folder)  # noqa: PTH208 - names
            return
        again = made()
        report = load(path, model=model, optimizer=again)
        assert (report.missing, report.unexpected) == ((), ())
        for name, value in options.items():
            assert same(again.param_groups[0][name], value), name
        state = again.state.get(model.weight, {})
        assert state.keys() == slots.keys()
        for name, value in slots.items():
            assert same(state[name], value), name


def test_values_that_torch_would_not_load_are_refused_in_torch_style(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["tag"] = b""
    text = (
        r"style='torch': the state of the {} holds a value of \S+, which torch.load\(weights_only=True\) refuses; pass"
    )
    with pytest.raises(TypeError, match=text.format("optimizer")):
        save(tmp_path / "c", model=model, optimizer=optimizer, format=Format(style="torch"))
    with pytest.raises(TypeError, match=text.format("model")):
        save(tmp_path / "c", model={"w": torch.ones(2), "range": range(3)}, format=Format(style="torch"))
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "c", model=model, optimizer=optimizer)
    save(tmp_path / "d", model=model, extra={"root": Path("a")}, format=Format(style="torch"))
    assert load(tmp_path / "d", model=model).extra == {"root": Path("a")}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("model", [nn.ReLU(), {}, {"epoch": 7}], ids=["module", "empty", "values"])
def test_a_model_without_tensors_is_loaded(style, model, tmp_path):
    save(tmp_path / "c", model=model, format=Format(style=style))
    into = dict.fromkeys(model) if isinstance(model, dict) else model
    assert load(tmp_path / "c", model=into).missing == ()
    assert into == model


def test_a_save_to_the_working_directory_is_refused(tmp_path, monkeypatch):
    run = tmp_path / "run"
    save(run, model={"w": torch.zeros(2)})
    (run / "optimizer").mkdir()
    (tmp_path / "link").symlink_to(run)
    for here in (run, run / "optimizer"):
        monkeypatch.chdir(here)
        for path in (run, os.path.relpath(run), tmp_path / "link"):
            with pytest.raises(CheckpointError, match=r"^path='.*': this process works in '.*run.*', and a save puts"):
                save(path, model={"w": torch.ones(2)}, overwrite=True)
        assert Path.cwd() == here
    monkeypatch.chdir(run)
    for path in (".", ""):
        with pytest.raises(CheckpointError, match=r"pass a folder below it, such as '\./checkpoint'"):
            save(path, model={"w": torch.ones(2)}, overwrite=True)
    save("below", model={"w": torch.ones(2)})
    monkeypatch.chdir(tmp_path)
    assert read_tensor("run", "w").tolist() == [0, 0]


@pytest.mark.ranks(2)
def test_a_rank_in_the_folder_is_refused_on_all(tmp_path):
    save(tmp_path / "c", model={"w": torch.zeros(2)})
    if dist.get_rank() == 1:
        os.chdir(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"rank 1: path=.*: this process works in"):
        save(tmp_path / "c", model={"w": torch.ones(2)}, overwrite=True)


def test_prune_keeps_a_step_that_somebody_works_in(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save(1, model={"w": torch.zeros(2)})
    monkeypatch.chdir(tmp_path / "step-00000001")
    with pytest.warns(UserWarning, match="is not removed, although it is old: .*this process works in"):
        checkpoints.save(2, model={"w": torch.zeros(2)})
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_a_name_that_leaves_no_room_for_a_save_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"its last name has 240 bytes, .*; pass a shorter name"):
        save(tmp_path / ("n" * 240), model={"w": torch.ones(1)})
    longest = tmp_path / ("n" * 200)
    save(longest, model={"w": torch.ones(1)})
    save(longest, model={"w": torch.ones(1)}, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == [longest.name]
