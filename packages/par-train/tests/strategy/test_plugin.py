"""Plugins: their order, and what they refuse. Pure."""

import pytest

from par_train import Plugin
from par_train.strategy.plugin import check_support, find_plugin, in_order


def plugin(name, **attributes):
    return type(name.title(), (Plugin,), {"name": name, **attributes})()


BUILT_IN = [plugin(name) for name in ("pipeline", "device", "tied", "zero", "precision")]


def names(plugins):
    return [each.name for each in in_order(BUILT_IN, plugins)]


def test_plugins_come_where_modules_may_still_be_replaced():
    assert names([plugin("lora"), plugin("checkpointing")]) == [
        "pipeline",
        "device",
        "lora",
        "checkpointing",
        "tied",
        "zero",
        "precision",
    ]


def test_requirements_say_the_order():
    late, first = plugin("late", requires=["precision"]), plugin("first", requires=["second"])
    order = names([late, first, plugin("second")])
    assert order == ["pipeline", "device", "second", "first", "tied", "zero", "precision", "late"]


def test_a_plugin_takes_the_place_of_the_built_in_one_of_its_name():
    own = plugin("zero", requires=["pipeline"])
    assert own in in_order(BUILT_IN, [own])
    assert names([own]).count("zero") == 1


def test_what_a_plugin_controls_is_left_to_it():
    assert names([plugin("mine", controls_precision=True)]) == ["pipeline", "device", "mine", "tied", "zero"]
    assert names([plugin("mine", controls_device=True)]) == ["pipeline", "mine", "tied", "zero", "precision"]


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        ([plugin("a"), plugin("a")], "2 plugins called 'a'; give one"),
        ([plugin("a", conflicts=["b"]), plugin("b")], "'a' and 'b' conflict"),
        ([plugin("a", conflicts=["zero"])], "'a' and 'zero' conflict"),
        ([plugin("a", requires=["b"])], "'a' requires 'b', which is not there"),
        ([plugin("a", requires=["b"]), plugin("b", requires=["a"])], "require each other"),
    ],
)
def test_what_does_not_go_together_is_named(plugins, words):
    with pytest.raises(ValueError, match=words):
        in_order(BUILT_IN, plugins)


def test_unsupported_devices_and_precisions_are_named():
    only = plugin("only", supported_devices=["cuda"], supported_precisions=["bf16"])
    check_support([only], "cuda", "bf16")
    with pytest.raises(ValueError, match=r"'only' does not support device 'cpu'; it supports \['cuda'\]"):
        check_support([only], "cpu", "bf16")
    with pytest.raises(ValueError, match="'only' does not support precision 'fp16'"):
        check_support([only], "cuda", "fp16")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("no_such_module:Mine", "cannot be imported: .*no_such_module"),
        ("par_train:Nothing", "cannot be imported: .*Nothing"),
        ("unknown", "no plugin is called 'unknown'; known: none; give 'module:Class'"),
        (Plugin(), "has no name"),
    ],
)
def test_what_is_no_plugin_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        find_plugin(given)


def test_an_object_that_is_no_plugin_is_refused():
    with pytest.raises(TypeError, match="a plugin is a int; give"):
        find_plugin(3)
