import sys
from collections import Counter
from xml.etree import ElementTree

import pytest

from par_pipeline import Action, Event, Timeline, one_f_one_b, simulate, zb_h1, zb_v

pytest.importorskip("matplotlib")


def texts(path):
    """The texts of a picture, which needs them to be left as such."""
    import matplotlib as mpl

    assert mpl.rcParams["svg.fonttype"] == "none"
    return [element.text for element in ElementTree.parse(path).iter() if element.tag.endswith("}text")]


@pytest.fixture
def plain_text():
    import matplotlib as mpl

    with mpl.rc_context({"svg.fonttype": "none"}):
        yield


@pytest.mark.usefixtures("plain_text")
def test_every_action_has_its_microbatch_in_its_box(tmp_path):
    simulate(zb_h1(3, 14)).draw(tmp_path / "step.svg", "ZB-H1")
    counts = Counter(texts(tmp_path / "step.svg"))
    assert counts["13"] == 3 * 3  # F, I and W of three stages
    assert [counts[f"rank {rank}"] for rank in range(3)] == [1, 1, 1]
    assert counts["peak 3"] == 3
    assert counts["ZB-H1: makespan 44, bubble 4.5%, peak 3 activations"] == 1


@pytest.mark.usefixtures("plain_text")
def test_the_legend_names_what_is_there(tmp_path):
    simulate(one_f_one_b(2, 2)).draw(tmp_path / "straight.svg")
    simulate(zb_v(2, 2)).draw(tmp_path / "v.svg")
    straight, v = (set(texts(tmp_path / name)) for name in ("straight.svg", "v.svg"))
    assert {"forward", "backward", "waiting"} <= straight
    assert not straight & {"input gradient", "weight gradient", "lighter: later stages of the rank"}
    assert {"forward", "input gradient", "weight gradient", "lighter: later stages of the rank"} <= v


@pytest.mark.usefixtures("plain_text")
def test_a_box_too_narrow_for_a_number_has_none(tmp_path):
    events = [Event(0, Action("F", 0, 12), 0.0, 0.001), Event(0, Action("B", 0, 12), 0.001, 1.0)]
    Timeline(events).draw(tmp_path / "step.svg")
    assert Counter(texts(tmp_path / "step.svg"))["12"] == 1


@pytest.mark.parametrize("ending", ["png", "pdf"])
def test_the_ending_decides_the_format(tmp_path, ending):
    simulate(one_f_one_b(2, 2)).draw(tmp_path / f"step.{ending}")
    assert (tmp_path / f"step.{ending}").read_bytes()[1:4] == {"png": b"PNG", "pdf": b"PDF"}[ending]


def test_no_step_is_too_short_or_too_long_to_draw(tmp_path):
    Timeline([Event(0, Action("F", 0, 0), 1.0, 1.0)]).draw(tmp_path / "short.png")
    simulate(one_f_one_b(2, 400)).draw(tmp_path / "long.png")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"drawing needs matplotlib: pip install matplotlib"):
        simulate(one_f_one_b(2, 2)).draw(tmp_path / "step.png")
