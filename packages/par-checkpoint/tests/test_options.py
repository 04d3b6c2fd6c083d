import dataclasses
import re
from inspect import signature
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import Checkpoints, Format, Tiers, Transfer, inspect, load, save, verify

from .helpers import policies


@pytest.mark.parametrize("kind", [Format, Transfer, Tiers])
def test_policy_documents_each_field_once(kind):
    for field in dataclasses.fields(kind):
        assert kind.__doc__.count(f"\n        {field.name}: ") == 1, field.name


@pytest.mark.parametrize("function", [save, load, Checkpoints.__init__, Checkpoints.save, Checkpoints.load])
def test_function_has_at_most_12_documented_parameters(function):
    parameters = signature(function).parameters.values()
    assert len(parameters) <= 12
    text = Checkpoints.__doc__ if function is Checkpoints.__init__ else function.__doc__
    for parameter in parameters:
        assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        assert parameter.name == "self" or f" {parameter.name}: " in text, parameter.name


@pytest.mark.parametrize("name", ["budget", "layout", "style", "copies", "options"])
def test_save_and_load_with_a_removed_keyword_raise_type_error(name, tmp_path):
    for function in (save, load):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            function(tmp_path / "c", **{name: None})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: Tiers("/dev/shm"), TypeError, "tiers is '/dev/shm'; give a list of folders or URLs"),
        (lambda: Tiers([3]), TypeError, "tiers has 3; each item is a folder or a URL"),
        (lambda: Tiers([]), ValueError, r"tiers is \[\]; give one or more"),
        (lambda: Tiers(["a"], copies=True), TypeError, "copies is True; give on how many hosts"),
        (lambda: Tiers(["a"], copies=0), ValueError, "copies is 0; give 1"),
        (lambda: Transfer(copy="late"), ValueError, "copy is 'late'; it can be 'blocking', 'background'"),
        (lambda: Format(style="zip"), ValueError, "style is 'zip'; it can be 'huggingface', 'torch'"),
        (
            lambda: Format(max_shard_size="5 parsecs"),
            ValueError,
            "max_shard_size='5 parsecs': a size is a number and one of",
        ),
        (lambda: Format(max_shard_size=1.5), TypeError, "max_shard_size=1.5: a size is bytes"),
        (lambda: Format(max_shard_size=0), ValueError, "max_shard_size=0: a size is from 1 to"),
        (lambda: Transfer(budget="x"), ValueError, "budget='x': a size is a number"),
        (lambda: Transfer(pending="forget"), ValueError, "pending is 'forget'"),
        (lambda: Transfer(writer="me"), ValueError, "writer is 'me'"),
        (lambda: Transfer(threads=0), ValueError, "threads is 0"),
        (lambda: Transfer(timeout=-1.0), ValueError, "timeout is -1.0"),
        (lambda: Transfer(timeout="long"), ValueError, "timeout is 'long' seconds; give a positive number"),
        (lambda: Format(dtype=torch.int8), ValueError, "dtype is torch.int8; give a floating-point"),
        (lambda: Format(layout={"w": 3}), TypeError, "layout maps names to par_groups.Sharding"),
        (lambda: Format(config=3), TypeError, "config is 3; give a mapping"),
        (lambda: Format(stem="a b"), ValueError, "stem is 'a b'; give letters, digits and underscores"),
    ],
)
def test_policy_with_a_wrong_value_raises(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


def test_one_format_serves_save_and_load(tmp_path):
    files = Format(dtype=torch.bfloat16, max_shard_size=8, names=MappingProxyType({"w": "weight"}))
    save(tmp_path / "c", model={"w": torch.ones(2), "v": torch.ones(2)}, format=files)
    model = {"w": torch.zeros(2), "v": torch.zeros(2)}
    load(tmp_path / "c", model=model, dtype=torch.float32, format=files)
    assert model["w"].tolist() == model["v"].tolist() == [1, 1]
    assert inspect(tmp_path / "c").tensors["weight"].dtype is torch.bfloat16


ALIKE = {  # by option: what the first rank gives, what the other one does, and what of both the error says
    "style": ("huggingface", "torch", "'huggingface' on rank 0, and 'torch' on rank 1"),
    "overwrite": (True, False, "True on rank 0, and False on rank 1"),
    "async_": (True, False, "True on rank 0, and False on rank 1"),
    "pending": ("wait", "raise", "'wait' on rank 0, and 'raise' on rank 1"),
    "writer": ("auto", "owner", "'auto' on rank 0, and 'owner' on rank 1"),
    "stem": ("model", "adapter_model", "'model' on rank 0, and 'adapter_model' on rank 1"),
    "dtype": (None, torch.bfloat16, "None on rank 0, and torch.bfloat16 on rank 1"),
    "step": (1, 2, "1 on rank 0, and 2 on rank 1"),
    "max_shard_size": ("5GB", "1MB", "5000000000 on rank 0, and 1000000 on rank 1"),
    "budget": ("1GB", 100, "1000000000 on rank 0, and 100 on rank 1"),
    "tiers": (["a", "b"], ["a"], "['a local folder', 'a local folder'] on rank 0, and ['a local folder'] on rank 1"),
}


@pytest.mark.ranks(2)
def test_what_all_ranks_must_give_alike_is_refused_with_both_values(tmp_path):
    rank, model = dist.get_rank(), {"w": torch.ones(3)}
    save(tmp_path / "c", model=model)
    for name, (*values, text) in ALIKE.items():
        with pytest.raises(ValueError, match=re.escape(f"{name} is {text}; give the same on all ranks")):
            save("d" if name == "tiers" else tmp_path / "d", model=model, **policies(**{name: values[rank]}))
    loads = {"strict": (True, False), "verify": ("auto", "full"), "variant": (None, "fp16"), "budget": (7, 70)}
    for name, values in {**loads, "tiers": (None, ["a"])}.items():
        with pytest.raises(ValueError, match=rf"^{name} is .* on rank 0, and .* on rank 1; give the same"):
            load("c" if name == "tiers" else tmp_path / "c", model=model, **policies(**{name: values[rank]}))
    for name, values in {"every": (1, 2), "keep_last": (None, 3), "keep_every": (None, 5)}.items():
        with pytest.raises(ValueError, match=rf"^{name} is .* on rank 0, and .* on rank 1; give the same"):
            Checkpoints(tmp_path / "run", **{name: values[rank]}).save(2, model=model)
    with pytest.raises(
        ValueError,
        match=r"^path is \"a local folder named 'd'\" on rank 0, and \"memory://\.\.\. named 'd'\" on rank 1",
    ):
        save((tmp_path / "d", "memory://d")[rank], model=model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


@pytest.mark.ranks(2)
def test_what_may_differ_between_ranks(tmp_path):
    rank, model = dist.get_rank(), {"w": torch.arange(3.0 * (1 << 20))}
    mine = [
        {"threads": 1, "timeout": 100.0, "progress": False, "config": {"a": 1}, "extra": 0, "copy": "blocking"},
        {"threads": 5, "timeout": 200.0, "progress": None, "config": {"a": 2}, "extra": 1, "copy": "background"},
    ][rank]
    save(tmp_path / "c", model=model, async_=True, **policies(**mine)).wait()
    assert verify(tmp_path / "c") == []
    into = {"w": torch.zeros(3 << 20)}
    dtype, device = [(None, "cpu"), (torch.float32, None)][rank]
    how = Transfer(threads=rank + 1, timeout=300.0 + rank)
    report = load(tmp_path / "c", model=into, dtype=dtype, device=device, transfer=how)
    assert report.extra == rank
    assert torch.equal(into["w"], model["w"])
