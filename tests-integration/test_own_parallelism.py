"""A wheel that nobody imports brings a tensor mode, a gradient handler, a pipeline schedule and a plugin."""

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from par_groups import ProcessGroups, Split, Topology, register_mode
from par_layers import initialize, layer_set
from par_pipeline import Costs, register_schedule, schedule, simulate
from par_testing import assert_equal_to_one_device, storm
from par_train import Strategy, register_gradient_handler

ROOT = Path(__file__).parent.parent
PROJECT = ROOT / "tests-integration" / "own-parallelism"
TUTORIAL = ROOT / "docs" / "tutorials" / "add-your-own-parallelism.md"

TOLERANCE = 1e-5  # relative, fp32: sums over ranks and microbatches in another order
BFLOAT16 = 1e-2  # relative: gradients that are rounded to 8 bits in each of 20 steps; 1e-3 was seen

SMALL = ["--model.width=32", "--model.layers=2", "--model.heads=4", "--model.context=16"]
SMALL += ["--train.batch_size=16", "--train.steps=5", "--train.warmup_steps=4", "--data.patterns=d*.py"]
SMALL += ["--device=cpu", "--output=run", "--model.tied"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the wheel in it, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
    subprocess.run(build, cwd=PROJECT, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob("*.whl")
    shutil.unpack_archive(wheel, folder / "site", "zip")
    return str(folder / "site")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, warm_python):
    """The losses of the command on one rank and without the wheel."""
    folder = tmp_path_factory.mktemp("one")
    command = ["-m", "par_train", "run", "--ranks=1", *SMALL]
    done = warm_python.start(command, folder=folder, environment=os.environ, ranks=1)
    _, errors = done.communicate(60)
    assert done.returncode == 0, errors
    losses = losses_in(folder)
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    return losses


def losses_in(folder):
    return [json.loads(line)["loss"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


EXACT = '--gradient_handlers=[{type="YourGradientHandler", dtype="float32"}, {type="pipeline_shared"}]'


@pytest.mark.parametrize("arguments", [["tensor.py"], ["pipeline.py", EXACT]], ids=["tensor", "pipeline"])
@pytest.mark.ranks(4, init=False)
def test_a_config_trains_as_one_rank_does(arguments, site, one_rank, tmp_path):
    """The command on four ranks that somebody else has started, as torchrun does; it ends its process."""
    from par_train.command.cli import main
    from par_train.jobs import hooks

    config, *flags = arguments
    child = os.fork()
    if not child:
        sys.path.insert(0, site)
        os.chdir(tmp_path)
        hooks.draw_loss = lambda *_, **__: None  # the picture takes longer than the steps
        os._exit(main(["run", str(PROJECT / config), *flags, *SMALL]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert losses_in(tmp_path) == pytest.approx(one_rank, rel=TOLERANCE)


@pytest.mark.parametrize(("config", "tolerance"), [storm("tensor.py", TOLERANCE), ("pipeline.py", BFLOAT16)])
@pytest.mark.ranks(4, init=False)
def test_a_script_trains_as_plain_torch_does(config, tolerance, site):
    sys.path.insert(0, site)
    script, said = runpy.run_path(PROJECT / "train.py"), io.StringIO()
    with redirect_stdout(said):
        script["main"](PROJECT / config)
    losses = [float(line) for line in said.getvalue().splitlines()]
    if os.environ["RANK"] != "0":
        assert not losses
        return
    expected = plain_torch(script["Block"], script["samples"]())
    assert losses == pytest.approx(expected, rel=tolerance)
    if tolerance == BFLOAT16:
        assert losses != pytest.approx(expected, rel=TOLERANCE)  # else gradients were not rounded


def plain_torch(block, samples):
    model = nn.Sequential(*[block(layer_set(None)) for _ in range(4)])
    initialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for inputs, target in list(DataLoader(samples, batch_size=16)) * 5:
        loss = functional.mse_loss(model(inputs), target)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


# What each part does. A world is new for each test, so that no other test has found entry points before.


@pytest.mark.ranks(4)
def test_the_mode_cuts_layers_and_sums_in_two_levels(site):
    sys.path.insert(0, site)
    topology = Topology.from_config({"tensor": {"size": 4, "mode": "new_mode", "arg1": 2, "arg2": 2}}, 4)
    with ProcessGroups(topology) as groups:
        assert groups.ranks("local") in ((0, 1), (2, 3))
        assert groups.ranks("node") in ((0, 2), (1, 3))
        assert groups.ranks(("node", "local")) == (0, 1, 2, 3)
        one, own = (pair(layers) for layers in (layer_set(None), layer_set("auto", groups)))
        for rows in (15, 17, 123):
            x = torch.randn(rows, 15, generator=torch.Generator().manual_seed(rows))
            expected, found = (model(x).square().sum() for model in (one, own))
            torch.testing.assert_close(found, expected)
            for loss in (expected, found):
                loss.backward()
        for model in (one, own):
            replace_by_gradients(model)
        reason = "a sum over 4 ranks is in another order"
        assert_equal_to_one_device(own, one, rtol=1e-4, atol=1e-4, reason=reason)


def pair(layers):
    model = nn.Sequential(layers.ColumnLinear(15, 60), nn.GELU(), layers.RowLinear(60, 15), layers.Linear(15, 20))
    initialize(model, seed=0)
    return model


@torch.no_grad()
def replace_by_gradients(model):
    for parameter in model.parameters():
        parameter.copy_(parameter.grad)


@pytest.mark.ranks(4)
def test_an_all_reduce_in_two_levels_is_an_all_reduce(site):
    sys.path.insert(0, site)
    from own_parallelism.two_levels import TwoLevels

    for nodes, ranks in ((2, 2), (4, 1), (1, 4)):
        with ProcessGroups(Topology({"node": nodes, "local": ranks})) as groups:
            levels = TwoLevels(local=groups["local"], node=groups["node"])
            for size in (1, 15, 17, 123):
                x = torch.arange(size, dtype=torch.float32) * (dist.get_rank() + 1)  # whole numbers: exact
                assert torch.equal(levels.all_reduce(x), torch.arange(size) * 10.0)


@pytest.mark.ranks(2)
def test_the_handler_takes_the_mean_in_the_dtype_that_it_is_told(site):
    sys.path.insert(0, site)
    (point,) = entry_points(group="par_train.gradient_handlers", name="YourGradientHandler")
    with ProcessGroups(Topology({"data": 2})) as groups:
        for dtype, expected in (("float32", 1.5 + 2**-8), ("bfloat16", 1.5)):  # which has 8 bits
            model = nn.Linear(3, 5)
            handler = point.load()(model, torch.optim.SGD(model.parameters()), groups, dtype=dtype)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1 + 2**-8 + dist.get_rank())
            handler.handle_gradient()
            assert all((parameter.grad == expected).all() for parameter in model.parameters())


@pytest.mark.ranks(1, init=False)
def test_the_schedule_is_valid_and_waits_less_for_messages(site):
    sys.path.insert(0, site)
    for ranks, microbatches in ((1, 1), (2, 15), (4, 17), (4, 2), (7, 123)):
        own = schedule("eager_1f1b", ranks, microbatches)
        own.validate()
        first = [action.op for action in own.ranks[0]]
        assert first.index("B") == min(microbatches, 2 * ranks - 1)
    for communication, expected in ((0, (57, 57)), (1, (85, 63))):  # as the tutorial says
        costs = Costs(communication=communication)
        names = ("1f1b", "eager_1f1b")
        assert tuple(simulate(schedule(name, 4, 16), costs).makespan for name in names) == expected


@pytest.mark.ranks(1)
def test_the_plugin_computes_each_block_twice(site):
    sys.path.insert(0, site)
    with Strategy(plugins=["recompute"]) as strategy:
        model, optimizer = nn.Sequential(Block(), nn.Linear(3, 1)), None
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters()))
        strategy.backward(model(torch.ones(2, 3)).sum(), optimizer)
        assert model[0].calls == 2


class Block(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


# Names


@pytest.mark.ranks(1)
def test_an_unknown_name_gets_all_that_are_known_the_wheel_s_too(site):
    sys.path.insert(0, site)
    unknown = {
        "new_mode": {"parallel": {"tensor": {"size": 1, "mode": "x"}}},
        "YourGradientHandler": {"gradient_handlers": [{"type": "x"}]},
        "recompute": {"plugins": ["x"]},
    }
    for known, options in unknown.items():
        with pytest.raises(ValueError, match=f"called 'x'.*{known}"):
            Strategy(**options)
    with pytest.raises(ValueError, match=r"called 'x'.*eager_1f1b"):
        schedule("x", 2, 2)
    with pytest.raises(ValueError, match="needs the option 'arg2'"):
        Topology.from_config({"tensor": {"size": 2, "mode": "new_mode", "arg1": 2}}, 2)
    with pytest.raises(ValueError, match="arg1=2 nodes of arg2=2 ranks are 4, but the size is 6; change"):
        Topology.from_config({"tensor": {"size": 6, "mode": "new_mode", "arg1": 2, "arg2": 2}}, 6)


@pytest.mark.ranks(1, init=False)
def test_a_name_that_is_taken_names_both_owners(site):
    sys.path.insert(0, site)
    mine = f"{__name__}.{taken.__qualname__}"
    uses = [
        (register_mode("new_mode"), lambda: Topology.from_config(tensor("new_mode"), 2), "mode.new_mode"),
        (register_schedule("eager_1f1b"), lambda: schedule("eager_1f1b", 2, 2), "schedule.eager_1f1b"),
    ]
    for register, use, wheels in uses:
        register(taken)
        with pytest.raises(ValueError, match=f"registered twice, by {re.escape(mine)} and by own_parallelism.{wheels}"):
            use()
    with pytest.raises(ValueError, match=f"'1d' is registered twice, by par_groups.* and by {re.escape(mine)}"):
        register_mode("1d")(taken)
    with pytest.raises(ValueError, match=f"'partial' is registered twice, by par_train.* and by {re.escape(mine)}"):
        register_gradient_handler("partial")(taken)


def taken(size, **_):
    return Split()


def tensor(mode):
    return {"tensor": {"size": 2, "mode": mode, "arg1": 1, "arg2": 2}}


# The tutorial


def test_the_code_in_the_tutorial_is_the_wheel_s():
    files = [path for path in PROJECT.rglob("*") if path.suffix in (".py", ".toml")]
    sources = {path.name: path.read_text() for path in files}
    blocks = re.findall(r"^```\w+ title=\"(.*?)\"\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)
    assert {title for title, _ in blocks} == {name for name in sources if name != "__init__.py"}
    for title, code in blocks:
        assert code.strip() in sources[title], f"{title} has other code"


@pytest.mark.ranks(1, init=False)
def test_the_examples_in_the_tutorial_run(site):
    sys.path.insert(0, site)
    examples = re.findall(r"^```python\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)
    assert len(examples) == 2
    for code in examples:
        exec(code, {})
