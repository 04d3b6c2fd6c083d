import pytest

from par_train._errors import UserError
from par_train.command.flags import PlanFlags, parse_size, read_flags

GIVEN = {"world": "8", "device_memory": "80GB"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80e9),
        ("80 GB", 80e9),
        ("80gb", 80e9),
        ("80G", 80e9),
        ("80GiB", 80 * 2**30),
        ("1.5TiB", 1.5 * 2**40),
        ("512MB", 512e6),
        ("1000", 1000),
        ("400e9", 400e9),
        ("400GB/s", 400e9),
    ],
)
def test_sizes(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "80QB", "eighty", "-1GB", "8iB", "1.2.3GB"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"\S"):
        parse_size(text)


def test_defaults():
    expected = PlanFlags(
        world=8,
        device_memory=80e9,
        top=10,
        json="",
        flops=None,
        efficiency=0.5,
        bandwidth=400e9,
        network=50e9,
        latency=10e-6,
        devices_per_node=8,
    )
    assert read_flags(GIVEN) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world": "many"}, "--world is 'many'; it must be a whole number"),
        ({"world": "0"}, "--world is 0; it must be above 0"),
        ({"device_memory": ""}, "--device-memory is ''; it must be a size"),
        ({"flops": "fast"}, "--flops is 'fast'"),
        ({"efficiency": "nan"}, "--efficiency is nan"),
        ({"efficiency": "5"}, "--efficiency is 5; it must be a part above 0, of 1 at most"),
        ({"latency": "-1"}, "--latency is -1"),
    ],
)
def test_what_is_no_number_is_named(changes, words):
    with pytest.raises(UserError, match=words):
        read_flags({**GIVEN, **changes})


@pytest.mark.parametrize("missing", ["world", "device_memory"])
def test_what_is_missing_is_named(missing):
    with pytest.raises(UserError, match=f"--{missing.replace('_', '-')} is missing"):
        read_flags({name: text for name, text in GIVEN.items() if name != missing})
