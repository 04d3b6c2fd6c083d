import dataclasses
import inspect
import re

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import Checkpoints, LoadOptions, SaveOptions, load, save, verify


@pytest.mark.parametrize(
    ("function", "kind"),
    [(save, SaveOptions), (load, LoadOptions), (Checkpoints.save, SaveOptions), (Checkpoints.load, LoadOptions)],
)
def test_every_option_is_a_keyword_with_the_same_type_and_default(function, kind):
    parameters = inspect.signature(function).parameters
    for field in dataclasses.fields(kind):
        if field.name == "step" and function is Checkpoints.save:  # which is given by place there
            continue
        parameter = parameters[field.name]
        assert (parameter.annotation, parameter.default) == (field.type, field.default), field.name
        assert f"{field.name}: " in function.__doc__, field.name
    assert not any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters.values())


def test_a_keyword_goes_before_the_options(tmp_path):
    options = SaveOptions(step=3, max_shard_size=8, config={"a": 1})
    save(tmp_path / "c", model={"w": torch.zeros(2), "v": torch.zeros(2)}, options=options, step=None)
    report = load(tmp_path / "c", model={"w": torch.zeros(2), "v": torch.zeros(2)}, options=LoadOptions())
    assert report.step is None
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"model-00001-of-00002.safetensors", "config.json"} <= names


def test_checkpoints_take_options_too(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(7, model={"w": torch.ones(2)}, options=SaveOptions(step=3, config={"a": 1}))
    assert (tmp_path / "run/step-00000007/config.json").exists()
    report = checkpoints.load(model={"w": torch.zeros(2)}, options=LoadOptions(verify="full"))
    assert report.step == 7, "the step that was saved, whatever the options say"


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
            save("d" if name == "tiers" else tmp_path / "d", model=model, **{name: values[rank]})
    loads = {"strict": (True, False), "verify": ("auto", "full"), "variant": (None, "fp16"), "budget": (7, 70)}
    for name, values in {**loads, "tiers": (None, ["a"])}.items():
        with pytest.raises(ValueError, match=rf"^{name} is .* on rank 0, and .* on rank 1; give the same"):
            load("c" if name == "tiers" else tmp_path / "c", model=model, **{name: values[rank]})
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
    save(tmp_path / "c", model=model, async_=True, **mine).wait()
    assert verify(tmp_path / "c") == []
    into = {"w": torch.zeros(3 << 20)}
    dtype, device = [(None, "cpu"), (torch.float32, None)][rank]
    report = load(tmp_path / "c", model=into, dtype=dtype, device=device, threads=rank + 1, timeout=300.0 + rank)
    assert report.extra == rank
    assert torch.equal(into["w"], model["w"])
