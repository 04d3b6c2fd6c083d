"""The options of offload: what they mean, and what is refused."""

import pytest

from par_zero import Offload


@pytest.mark.parametrize(
    ("optimizer", "parts"),
    [
        ("device", (1, 0, 0)),
        ("host", (0, 1, 0)),
        ("disk", (0, 0, 1)),
        (0.25, (0.75, 0.25, 0)),
        (1, (0, 1, 0)),
        ({"host": 0.5, "disk": 0.25}, (0.25, 0.5, 0.25)),
        ({"device": 0.5, "disk": 0.5}, (0.5, 0, 0.5)),
        ({}, (1, 0, 0)),
    ],
)
def test_parts(optimizer, parts):
    assert tuple(Offload(optimizer=optimizer, path="/scratch").fractions["optimizer"].values()) == parts


@pytest.mark.parametrize(
    ("piece", "size"), [(5000, 5000), ("16MiB", 2**24), ("1.5 kB", 1500), ("1.5 acres", None), ("2KB", 2000)]
)
def test_sizes(piece, size):
    if size is None:
        with pytest.raises(ValueError, match=r"piece='1.5 acres': a size is a number and one of B, KB, .* '16MiB'"):
            Offload(piece=piece)
    else:
        assert Offload(piece=piece).piece_bytes == size


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"optimizer": "nvme"},
            "optimizer is 'nvme'; it can be 'device', 'host', 'disk', a part from 0 to 1, a mapping of tiers, or",
        ),
        ({"optimizer": 1.5}, "optimizer is 1.5; it can be"),
        ({"optimizer": {"tape": 0.5}}, r"optimizer is {'tape': 0.5}; it can be"),
        ({"optimizer": "disk"}, "the disk needs a path; give a folder on a local disk"),
        ({"optimizer": {"host": 0.7, "disk": 0.5}, "path": "/a"}, "parts whose sum is 1.2; give parts whose sum is 1"),
        ({"optimizer": {"device": 0.7, "host": 0.1}}, "parts of all tiers whose sum is 0.8; leave the device out"),
        ({"piece": 0}, "piece is 0; give 1 byte or more"),
        ({"ahead": 0}, "ahead is 0; give 1 or more"),
        ({"threads": -1}, "threads is -1; give 1 or more"),
    ],
)
def test_values_that_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        Offload(**options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"optimizer": True}, "optimizer is True; it can be"),
        ({"optimizer": None}, "optimizer is None; it can be"),
        ({"ahead": 2.5}, "ahead is 2.5; give a whole number, such as 4"),
        ({"piece": 2.5}, "piece=2.5: a size is bytes or a text"),
        ({"path": 3}, "path is 3; give a folder on a local disk"),
        ({"overlap": 1}, "overlap=1: pass True, False, 'auto' or 'backward'"),
    ],
)
def test_types_that_are_refused(options, problem):
    with pytest.raises(TypeError, match=problem):
        Offload(**options)
