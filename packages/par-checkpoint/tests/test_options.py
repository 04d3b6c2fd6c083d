import dataclasses
import inspect

import pytest
import torch

from par_checkpoint import Checkpoints, LoadOptions, SaveOptions, load, save
from par_checkpoint._options import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5_000_000_000),
        ("5GiB", 5 * 2**30),
        ("20KB", 20_000),
        ("1.5MB", 1_500_000),
        ("1 TB", 10**12),
        ("3KiB", 3072),
        ("2TiB", 2**41),
        ("256MiB", 2**28),
        (17, 17),
    ],
)
def test_sizes_are_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "5", "5 gb", "5gb", "5B", "GB", "-5GB", "1e3MB", "5GBs", "nanGB", "\u0665GB", " 5GB"]
)
def test_another_text_is_refused(text):
    with pytest.raises(ValueError, match="write it as '5GB'"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, -1, "0GB", "0.0001KB"])
def test_a_size_below_a_byte_is_refused(size):
    with pytest.raises(ValueError, match="less than a byte"):
        parse_size(size)


@pytest.mark.parametrize("size", [True, 1.5, None])
def test_another_type_is_refused(size):
    with pytest.raises(TypeError, match="neither a text nor bytes"):
        parse_size(size)


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
