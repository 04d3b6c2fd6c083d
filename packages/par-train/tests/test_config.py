import pytest

from par_train._config import build_options, load_options, settings, to_tree
from par_train._errors import UserError
from par_train._options import Options, TrainOptions, learning_rate


def write(folder, text):
    path = folder / "config.toml"
    path.write_text(text)
    return path


def test_defaults_come_without_file_and_flags():
    assert load_options(None, {}) == Options()


def test_flags_win_over_the_file(tmp_path):
    path = write(tmp_path, 'seed = 3\n[train]\nsteps = 10\nbatch_size = 8\n[data]\npatterns = ["*.py"]')
    options = load_options(path, {"train.steps": "20", "data.patterns": "*.md,*.txt", "ranks": "4"})
    assert (options.seed, options.train.steps, options.train.batch_size, options.ranks) == (3, 20, 8, 4)
    assert options.data.patterns == ("*.md", "*.txt")


def test_options_survive_the_way_to_a_rank():
    options = load_options(None, {"data.patterns": "*.py", "parallel.data": "2", "train.steps": "7"})
    assert build_options(to_tree(options)) == options


def test_a_whole_number_is_a_number():
    assert isinstance(load_options(None, {"train.learning_rate": "1"}).train.learning_rate, float)


@pytest.mark.parametrize(
    ("flags", "parallel"),
    [
        ({"parallel.data": "2"}, {"data": 2}),
        ({"parallel.tensor.size": "4", "parallel.tensor.mode": "2.5d"}, {"tensor": {"size": 4, "mode": "2.5d"}}),
        ({"parallel.tensor": "2", "parallel.tensor.mode": "1d"}, {"tensor": {"size": 2, "mode": "1d"}}),
        ({"parallel.tensor.sequence_parallel": "true"}, {"tensor": {"sequence_parallel": True}}),
    ],
)
def test_parallel_is_a_free_dict(flags, parallel):
    assert load_options(None, flags).parallel == parallel


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"train.step": "1"}, ["train.step", "did you mean 'train.steps'"]),
        ({"steps": "1"}, ["did you mean 'train.steps'"]),
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
    ],
)
def test_wrong_flags_name_key_value_and_rule(flags, words):
    with pytest.raises(UserError) as caught:
        load_options(None, flags)
    assert all(word in str(caught.value) for word in words), str(caught.value)


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
    ],
)
def test_wrong_files_name_key_value_and_rule(tmp_path, text, words):
    with pytest.raises(UserError) as caught:
        load_options(write(tmp_path, text), {})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the config file .*none\.toml: No such file"):
        load_options(tmp_path / "none.toml", {})


def test_every_key_has_help():
    assert all(setting.help for setting in settings())


def test_learning_rate_warms_up_and_decays():
    options = TrainOptions(steps=100, warmup_steps=10, learning_rate=2.0, final_learning_rate=0.1)
    rates = [learning_rate(options, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == 2.0
    assert rates[54] == pytest.approx(1.1)  # half of the cosine: the middle between 2.0 and 0.2
    assert rates[99] == pytest.approx(0.2)
    assert rates[9:] == sorted(rates[9:], reverse=True)
