"""A model of par-layers, saved in one mode and loaded in the others: weights, optimizer and the steps that follow."""

import pytest
import torch
import torch.distributed as dist

import par_checkpoint
from par_groups import ProcessGroups, Topology, sharding_of
from par_layers import PartialGradientReducer, initialize, layer_set
from par_layers.examples import GPT
from par_testing import storm

ONE_D = {"mode": "1d"}
BY_SEQUENCE = {"mode": "1d", "sequence_parallel": True}
OTHERS = {
    2: [ONE_D, BY_SEQUENCE],
    4: [ONE_D, {"mode": "2d"}, {"mode": "2.5d", "depth": 1}],
    8: [{"mode": "2.5d", "depth": 2}, {"mode": "3d"}, ONE_D],
}
SLOTS = ("exp_avg", "exp_avg_sq")
pytest.importorskip("safetensors")


def gpt(layers, *, tied, seed=0):
    """29 tokens: no mode divides them."""
    model = GPT(layers, 29, 32, 8, 1, 12, tied=tied)
    initialize(model, seed=seed)
    return model


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, groups, seed):
    ids = torch.randint(29, (8, 9), generator=torch.Generator().manual_seed(seed))
    loss = model.loss(ids[:, :-1], ids[:, 1:])
    loss.backward()
    if groups is not None:
        PartialGradientReducer(model, groups).handle_gradient()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def whole_of(parameter, local):
    """A tensor cut like a parameter, put together on every rank."""
    sharding = sharding_of(parameter)
    together = torch.zeros(sharding.shape, dtype=local.dtype)
    for box in sharding.boxes:
        if box.owns(dist.get_rank(), range(dist.get_world_size())):
            together[box.slices] = box.of(local.detach())
    dist.all_reduce(together)  # over the world
    return together


def already_whole(parameter, local):
    return local.detach().clone()


def everything(model, optimizer, together=whole_of):
    """Whole parameters and slots, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = together(parameter, parameter)
        for slot in SLOTS:
            found[f"{name}.{slot}"] = together(parameter, optimizer.state[parameter][slot])
        found[f"{name}.step"] = optimizer.state[parameter]["step"].clone()
    return found


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def live(config):
    """Groups and layers of a mode in this world."""
    world = dist.get_world_size()
    groups = ProcessGroups(Topology.from_config({"tensor": {"size": world, **config}}, world))
    return groups, layer_set("auto", groups)


SMALL = par_checkpoint.Format(max_shard_size="20KB")


def check_that_it_loads(path, configs, expected, *, tied):
    """Into models of other values, in each mode; the step that follows is that of one device, within rounding."""
    alone, others = load_alone(path, tied=tied)
    assert_equal(everything(alone, others, already_whole), expected)
    next_loss = step(alone, others, None, seed=2)
    for config in configs:
        groups, layers = live(config)
        with groups:
            model = gpt(layers, tied=tied, seed=4)
            optimizer = optimizer_of(model)
            assert par_checkpoint.load(path, model=model, optimizer=optimizer).step == 2
            assert_equal(everything(model, optimizer), expected)
            # Sums over ranks are in another order.
            torch.testing.assert_close(step(model, optimizer, groups, seed=2), next_loss, rtol=1e-5, atol=1e-5)


def load_alone(path, *, tied, group=None):
    """On one device, on every rank by itself."""
    group = group or dist.new_group([dist.get_rank()], use_local_synchronization=True)
    model = gpt(layer_set(None), tied=tied, seed=5)
    optimizer = optimizer_of(model)
    par_checkpoint.load(path, model=model, optimizer=optimizer, group=group)
    return model, optimizer


def save_after_two_steps(path, config, *, tied, **options):
    groups, layers = live(config)
    with groups:
        model = gpt(layers, tied=tied)
        optimizer = optimizer_of(model)
        for seed in (0, 1):
            step(model, optimizer, groups, seed)
        expected = everything(model, optimizer)
        par_checkpoint.save(path, model=model, optimizer=optimizer, step=2, **options).wait()
    return expected


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.storm)], ids=["untied", "tied"])
def trained(request, tmp_path):
    """A checkpoint that one device wrote, and what is in it."""
    model = gpt(layer_set(None), tied=request.param)
    optimizer = optimizer_of(model)
    for seed in (0, 1):
        step(model, optimizer, None, seed)
    par_checkpoint.save(tmp_path / "c", model=model, optimizer=optimizer, step=2, format=SMALL)
    return tmp_path / "c", everything(model, optimizer, already_whole), request.param


@pytest.mark.ranks([storm(2), 4])
def test_a_checkpoint_of_one_device_loads_in_every_mode(trained):
    path, expected, tied = trained
    check_that_it_loads(path, OTHERS[dist.get_world_size()], expected, tied=tied)


@pytest.mark.storm  # its files are those of one device, which every mode loads
@pytest.mark.ranks(4)
def test_a_checkpoint_of_2d_loads_in_every_mode_of_its_world(tmp_path):
    expected = save_after_two_steps(tmp_path / "c", {"mode": "2d"}, tied=True, format=SMALL)
    check_that_it_loads(tmp_path / "c", OTHERS[4], expected, tied=True)


def assert_same_files(path, other):
    names = [file.relative_to(other) for file in other.rglob("*.safetensors")]
    assert len(names) > 4
    for name in names:
        assert (path / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.ranks(8)
def test_every_mode_writes_the_same_files_from_the_same_weights(tmp_path):
    """From 2.5d to 3d to 1d: after each load and save the files are those that there were."""
    first = tmp_path / "0"
    expected = save_after_two_steps(first, OTHERS[8][0], tied=True, format=SMALL)
    before = first
    for number, config in enumerate(OTHERS[8][1:], 1):
        groups, layers = live(config)
        path = tmp_path / str(number)
        with groups:
            model = gpt(layers, tied=True, seed=number)
            optimizer = optimizer_of(model)
            par_checkpoint.load(before, model=model, optimizer=optimizer)
            assert_equal(everything(model, optimizer), expected)
            par_checkpoint.save(path, model=model, optimizer=optimizer, step=2, format=SMALL)
        assert_same_files(path, first)
        before = path


@pytest.mark.storm
@pytest.mark.ranks(4)
def test_2d_saves_in_every_way(tmp_path):
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    for number, options in enumerate(
        (
            {"async_": True},
            {"format": par_checkpoint.Format(style="torch")},
            {"format": SMALL, "transfer": par_checkpoint.Transfer(writer="owner")},
        )
    ):
        path = tmp_path / str(number)
        expected = save_after_two_steps(path, {"mode": "2d"}, tied=False, **options)
        model, optimizer = load_alone(path, tied=False, group=alone)
        assert_equal(everything(model, optimizer, already_whole), expected)
    again = tmp_path / f"of rank {dist.get_rank()}"  # the files know nothing of who wrote them
    par_checkpoint.save(
        again,
        model=model,
        optimizer=optimizer,
        step=2,
        group=alone,
        format=SMALL,
    )
    assert_same_files(again, path)
