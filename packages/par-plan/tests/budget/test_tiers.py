"""What leaves the device: as little as is missing, to the quickest tier that has room."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_plan.budget.tiers import Offloadable, TooSmallError, offload_missing

OPTIMIZER = Offloadable(name="optimizer", frees=100.0, takes={"host": 120.0, "disk": 120.0}, beside=20.0)
PARAMETERS = Offloadable(name="parameters", frees=50.0, takes={"host": 50.0, "disk": 50.0})


def test_nothing_leaves_where_nothing_is_missing():
    shares = offload_missing(-5.0, [OPTIMIZER], {})
    assert shares.part("optimizer") == 0
    assert shares.describe() == "-"


@given(st.floats(1, 150), st.floats(0, 400), st.floats(0, 400))
def test_what_leaves_frees_what_is_missing_and_no_tier_holds_more_than_it_has(missing, host, disk):
    rooms = {"host": host, "disk": disk}
    shares, problem = None, None
    try:
        shares = offload_missing(missing, [OPTIMIZER, PARAMETERS], rooms)
    except TooSmallError as error:
        problem = error
    if shares is None:
        assert problem.missing > 0
        assert problem.tier in ("host", "disk")
        return
    freed = 100 * shares.part("optimizer") + 50 * shares.part("parameters")
    assert freed == pytest.approx(missing)
    assert all(shares.bytes[tier] <= room + 1e-3 for tier, room in rooms.items())
    if shares.part("parameters"):
        assert shares.part("optimizer") == pytest.approx(1), "the first source leaves first"
    if shares.bytes["disk"] > 1:
        assert shares.bytes["host"] == pytest.approx(host, abs=50), "the host is full before the disk is used"


def test_the_tier_that_is_short_is_named():
    with pytest.raises(TooSmallError, match="the device is short of 10 B") as caught:
        offload_missing(160.0, [OPTIMIZER, PARAMETERS], {"host": 1e6})
    assert caught.value.tier == "device"
    with pytest.raises(TooSmallError, match="the host is short") as caught:
        offload_missing(90.0, [OPTIMIZER], {"host": 60.0})
    assert caught.value.tier == "host"
    with pytest.raises(TooSmallError, match="the disk is short"):
        offload_missing(90.0, [OPTIMIZER], {"host": 60.0, "disk": 10.0})


def test_parts_in_words():
    shares = offload_missing(120.0, [OPTIMIZER, PARAMETERS], {"host": 80.0, "disk": 1e3})
    assert shares.describe() == "opt 50% host, 50% disk, param 40% disk"
