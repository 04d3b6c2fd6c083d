import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_train._errors import UserError
from par_train.config.settings import build, load, settings
from par_train.jobs.checks import check_config
from par_train.jobs.options import AdapterOptions, ModelOptions, Options, PlanOptions, TrainOptions, learning_rate


def write(folder, text, name="config.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_defaults_come_without_file_and_flags():
    assert load(Options, None, {}) == Options()


def test_flags_win_over_the_file(tmp_path):
    path = write(tmp_path, 'seed = 3\n[train]\nsteps = 10\nbatch_size = 8\n[data]\npatterns = ["*.py"]')
    options = load(Options, path, {"train.steps": "20", "data.patterns": "*.md,*.txt", "ranks": "4"})
    assert (options.seed, options.train.steps, options.train.batch_size, options.ranks) == (3, 20, 8, 4)
    assert options.data.patterns == ("*.md", "*.txt")


def test_options_survive_the_way_to_a_rank():
    flags = {"data.patterns": "*.py", "parallel.data": "2", "train.steps": "7", "plugins": "mine:Plugin,other"}
    options = load(Options, None, {**flags, "gradient_handlers": '[{type = "mine", weights = [1, 2]}]'})
    assert build(Options, json.loads(json.dumps(dataclasses.asdict(options)))) == options


PYTHON = """
import math
from pathlib import Path

_width = 64


class Helper:
    pass


def double(number):
    return 2 * number


seed = double(2)
model = dict(width=_width, heads=2)
train = dict(steps=10, learning_rate=math.sqrt(1e-4))
data = dict(patterns=("*.py", "*.md"))
parallel = dict(data=2, tensor=dict(size=2, mode="1d", sequence_parallel=True))
gradient_handlers = [dict(type="Mine", axes=("row", "col"))]
plugins = ["package.module:Plugin"]
"""

TOML = """
seed = 4
plugins = ["package.module:Plugin"]
model = {width = 64, heads = 2}
[train]
steps = 10
learning_rate = 0.01
[data]
patterns = ["*.py", "*.md"]
[parallel]
data = 2
tensor = {size = 2, mode = "1d", sequence_parallel = true}
[[gradient_handlers]]
type = "Mine"
axes = ["row", "col"]
"""


def test_a_python_file_means_what_the_same_toml_means(tmp_path):
    python, toml = write(tmp_path, PYTHON, "config.py"), write(tmp_path, TOML)
    options = load(Options, python, {"train.steps": "20", "parallel.tensor.size": "4"})
    assert options == load(Options, toml, {"train.steps": "20", "parallel.tensor.size": "4"})
    assert options.parallel["tensor"] == {"size": 4, "mode": "1d", "sequence_parallel": True}
    assert options.gradient_handlers == ({"type": "Mine", "axes": ["row", "col"]},)
    assert (options.plugins, options.train.steps) == (("package.module:Plugin",), 20)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("seed = 3\ntrain = dict(", ["config.py, line 2", "SyntaxError", "never closed"]),
        ("seed = 3\n\ntrain = 1 / 0\nseed = 4", ["config.py, line 3", "ZeroDivisionError: division by zero"]),
        ("def _f():\n    return x\nseed = _f()", ["config.py, line 2", "NameError", "'x'"]),
        ("import no_such_module", ["config.py, line 1", "ModuleNotFoundError", "no_such_module"]),
        ("seed = 3\nraise SystemExit(3)", ["config.py, line 2", "SystemExit: 3"]),
        ("trian = dict(steps=3)", ["'trian'", "did you mean 'train'"]),
        ("parallel = dict(data={1, 2})", ["parallel.data holds {1, 2} (set)", "lists and tables alone"]),
        ("gradient_handlers = [dict(type='a', f=print)]", ["gradient_handlers.f holds", "builtin_function"]),
        ("gradient_handlers = [dict(kind='Mine')]", ["gradient_handlers is", "a list of tables with a type"]),
        ("gradient_handlers = ['Mine']", ["gradient_handlers is ['Mine']", "a list of tables with a type"]),
        ("plugins = [1]", ["plugins is [1]", "a list of strings"]),
    ],
)
def test_wrong_python_files_name_the_line_or_the_key(tmp_path, text, words):
    with pytest.raises(UserError) as caught:
        load(Options, write(tmp_path, text, "config.py"), {})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ({"tensr": 2}, ["unknown key 'tensr'", "did you mean 'tensor'"]),
        ({"tensor": {"size": 8, "mode": "1d"}}, ["model.heads 4 does not divide by 8 tensor ranks"]),
        ({"tensor": {"size": 2, "mode": "1d", "kv_heads": 1}}, ["parallel.tensor has kv_heads", "drop it"]),
        ({"data": {"size": 2, "shards": 1}}, ["parallel['data'] has the unknown key 'shards'", "a size alone"]),
        ({"pipeline": {"sizes": 2}}, ["parallel['pipeline']", "without a size"]),
        ({"tensor": {"size": 2, "mod": "1d"}}, ["parallel['tensor'] has ['mod'] but no mode"]),
        ({"tensor": {"mode": "1d", "sizes": 2}}, ["mode '1d' takes no option 'sizes'"]),
        ({"tensor": {"size": 2, "mode": "1dd"}}, ["'1dd'", "did you mean '1d'"]),
        ({"tensor": {"size": 2, "mode": "1d", "sequence_paralel": True}}, ["did you mean 'sequence_parallel'"]),
        ({"tensor": {"size": 8, "mode": "2.5d", "dept": 2}}, ["no option 'dept'", "did you mean 'depth'"]),
    ],
)
def test_a_misspelt_key_of_parallel_is_refused_without_ranks(parallel, words):
    with pytest.raises(UserError) as caught:
        check_config(build(Options, {"parallel": parallel}), 8)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("model", "parallel", "words"),
    [
        ({}, {"expert": 2}, "deals experts out over 2 ranks, but model.experts is 0; give their number"),
        ({"top_k": 1}, {}, "model.top_k is given, but model.experts is 0"),
        ({"experts": 2, "top_k": 3}, {}, "model.top_k is 3, but model.experts is 2"),
        ({"experts": 3}, {"expert": 2}, "model.experts 3 does not divide by 2 ranks of parallel.expert"),
        ({"experts": 4}, {"tensor": {"size": 4, "mode": "2d"}}, "need tensor mode '1d' or none, and .* is '2d'"),
        ({"experts": 4}, {"expert": {"tensor": 2}}, "without a size"),
        (
            {"experts": 4, "expert_hidden": 5},
            {"expert": {"size": 2, "tensor": 2}, "tensor": {"size": 2, "mode": "1d"}},
            "model.expert_hidden 5 does not divide by the 2 tensor ranks",
        ),
        ({"path": "there", "experts": 4}, {}, "model.experts is for the byte-level GPT"),
    ],
)
def test_experts_that_make_no_sense_are_refused_without_ranks(model, parallel, words):
    with pytest.raises(UserError, match=words):
        check_config(build(Options, {"model": model, "parallel": parallel}), 4)


def test_ranks_of_experts_take_parts_of_a_batch():
    with pytest.raises(UserError, match=r"train.batch_size 6 does not divide by 4 data ranks"):
        check_config(
            build(Options, {"model": {"experts": 4}, "train": {"batch_size": 6}, "parallel": {"expert": 4}}), 4
        )


def test_stage_3_under_autocast_is_refused_without_ranks():
    with pytest.raises(UserError, match=r"zero=3 with precision='fp16-amp'.* use precision='fp16'"):
        check_config(build(Options, {"zero": 3, "precision": "fp16-amp"}), 2)


def test_what_is_computed_again_is_refused_with_what_it_can_be():
    with pytest.raises(UserError, match=r"recompute='lairs': .* pass 'cheap', 'layers'"):
        check_config(build(Options, {"recompute": "lairs"}), 2)


def test_a_whole_number_is_a_number():
    assert isinstance(load(Options, None, {"train.learning_rate": "1"}).train.learning_rate, float)


@pytest.mark.parametrize(
    ("flags", "parallel"),
    [
        ({"parallel.data": "2"}, {"data": 2}),
        ({"parallel.tensor.size": "4", "parallel.tensor.mode": "2.5d"}, {"tensor": {"size": 4, "mode": "2.5d"}}),
        ({"parallel.tensor": "2", "parallel.tensor.mode": "1d"}, {"tensor": {"size": 2, "mode": "1d"}}),
        ({"parallel.tensor.sequence_parallel": "true"}, {"tensor": {"sequence_parallel": True}}),
        (
            {"parallel.sequence.size": "4", "parallel.sequence.mode": "2d", "parallel.sequence.ulysses": "2"},
            {"sequence": {"size": 4, "mode": "2d", "ulysses": 2}},
        ),
    ],
)
def test_parallel_is_a_free_dict(flags, parallel):
    assert load(Options, None, flags).parallel == parallel


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"train.step": "1"}, ["train.step", "did you mean 'train.steps'"]),
        ({"steps": "1"}, ["did you mean 'train.steps'"]),
        ({"train": "5"}, ["train is a table", "train.steps"]),
        ({"train.learning_rate": "9" * 400}, ["train.learning_rate"]),
        ({"xyzzy": "1"}, ["unknown key 'xyzzy'", "train.steps"]),
        ({"train.steps": "many"}, ["train.steps", "'many'", "a whole number"]),
        ({"train.steps": "0"}, ["train.steps", "0", "at least 1"]),
        ({"train.steps": "1.5"}, ["train.steps", "1.5", "a whole number"]),
        ({"train.learning_rate": "nan"}, ["train.learning_rate", "nan", "finite"]),
        ({"train.learning_rate": "inf"}, ["train.learning_rate", "inf", "finite"]),
        ({"data.validation_fraction": "1.5"}, ["data.validation_fraction", "1.5", "at most 0.9"]),
        ({"resume": "yes"}, ["resume", "'yes'", "'no' or 'auto'"]),
        ({"ranks": "some"}, ["ranks", "'some'", "a whole number or 'auto'"]),
        ({"ranks": "0"}, ["ranks", "at least 1"]),
        ({"train.clip_norm": "0"}, ["train.clip_norm is 0.0; it must be at least 1e-12 and finite"]),
        ({"gradient_handlers": "Mine"}, ["gradient_handlers is 'Mine'", "a list of tables with a type"]),
        ({"gradient_handlers": "[{type = 'a', day = 2026-01-01}]"}, ["gradient_handlers.day holds", "(date)"]),
        ({"parallel": "2"}, ["parallel is a table", "parallel.data"]),
    ],
)
def test_wrong_flags_name_key_value_and_rule(flags, words):
    with pytest.raises(UserError) as caught:
        load(Options, None, flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_whole_number_is_not_told_to_be_finite():
    with pytest.raises(UserError, match=r"^train\.steps is 0; it must be at least 1$"):
        load(Options, None, {"train.steps": "0"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps = ", ["config.toml", "is not TOML"]),
        ("[train]\nsteps = true", ["train.steps", "True", "bool", "a whole number"]),
        ("[train]\nsteps = '3'", ["train.steps", "'3'", "str", "a whole number"]),
        ("[data]\npatterns = '*.py'", ["data.patterns", "a list of strings"]),
        ("[data]\npatterns = [1]", ["data.patterns", "a list of strings"]),
        ("[trian]\nsteps = 3", ["'trian'", "did you mean 'train'"]),
        ("train = 3", ["train", "3", "[train]"]),
        ("parallel = 3", ["parallel", "3", "a table"]),
        (f"[train]\nlearning_rate = {'9' * 400}", ["train.learning_rate is 999", "a number"]),
    ],
)
def test_wrong_files_name_key_value_and_rule(tmp_path, text, words):
    with pytest.raises(UserError) as caught:
        load(Options, write(tmp_path, text), {})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the config file .*none\.toml: No such file"):
        load(Options, tmp_path / "none.toml", {})


def test_every_key_has_help():
    assert all(setting.help for setting in settings(Options).values())


def test_learning_rate_warms_up_and_decays():
    train = TrainOptions(steps=100, warmup_steps=10, learning_rate=2.0, final_learning_rate=0.1)
    options = Options(train=train)
    rates = [learning_rate(options, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == 2.0
    assert rates[54] == pytest.approx(1.1)  # half of the cosine: the middle between 2.0 and 0.2
    assert rates[99] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_learning_rate_that_is_not_given_is_the_usual_one_of_the_job():
    existing, random = ModelOptions(path="tiny"), ModelOptions(config="tiny")
    cases = [
        (Options(), 4e-3),
        (Options(model=existing), 2e-5),
        (Options(model=random), 3e-4),
        (Options(model=existing, adapter=AdapterOptions(rank=8)), 2e-4),
        (Options(model=existing, train=TrainOptions(learning_rate=0.0)), 0.0),
    ]
    for options, expected in cases:
        assert options.peak_learning_rate == expected


def test_output_folder_that_is_not_given_has_the_name_of_the_model():
    assert Options().output_folder == "runs/gpt"
    assert Options(model=ModelOptions(path="~/models/tiny/")).output_folder == "runs/tiny"
    assert Options(model=ModelOptions(path="tiny"), output="here").output_folder == "here"


GIVEN = {"world": "8", "device_memory": "80GB"}


def test_defaults_of_a_plan():
    expected = PlanOptions(
        world=8,
        device_memory=80e9,
        top=10,
        json="",
        flops="auto",
        efficiency=0.5,
        bandwidth=400e9,
        network=50e9,
        latency=10e-6,
        devices_per_node=8,
    )
    assert load(PlanOptions, None, GIVEN) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world": "many"}, "--world is 'many' .str.; it must be a whole number"),
        ({"world": "0"}, "--world is 0; it must be at least 1"),
        ({"device_memory": ""}, "--device-memory is '' .str.; it must be a size, such as 80GB or 80GiB"),
        ({"flops": "fast"}, "--flops is 'fast'"),
        ({"efficiency": "nan"}, "--efficiency is nan"),
        ({"efficiency": "5"}, "--efficiency is 5.0; it must be above 0 and at most 1$"),
        ({"latency": "-1"}, "--latency is -1"),
    ],
)
def test_what_is_no_number_is_named(changes, words):
    with pytest.raises(UserError, match=words):
        load(PlanOptions, None, {**GIVEN, **changes})


TEXTS = st.one_of(
    st.text(),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(["auto", "no", "80GB", "[1, 2]", '[{type = "a"}]', "fp8", "{}", "true", "1e999", "-0"]),
)


@given(st.sampled_from([*settings(Options), "parallel.data", "parallel.tensor.mode"]), TEXTS)
def test_whatever_a_flag_says_it_is_an_option_or_a_mistake_that_names_the_key(key, text):
    try:
        options = load(Options, None, {key: text})
    except UserError as error:
        message = str(error)
    else:
        again = build(Options, json.loads(json.dumps(dataclasses.asdict(options))))  # the way to a rank
        message = key if repr(again) == repr(options) else repr(again)  # nan is not equal to itself
    assert message.startswith(key)


def test_the_readme_lists_every_key_as_the_help_does():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    for key, setting in settings(Options).items():
        row = next((line for line in readme.splitlines() if line.startswith(f"| `{key}` |")), "")
        assert row.endswith(f"| {setting.help} |"), key
