"""Layers that drop activations, below ZeRO, pipelines, an offload of activations and dropout over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set
from par_pipeline import ActivationOffload, Pipeline, one_f_one_b, zb_h1
from par_recompute import Drop, Keep, ToHost, checkpoint_layers, saved
from par_testing import storm
from par_zero import shard

POLICIES = {
    "cheap": "cheap",
    "layers": "layers",
    "Drop": Drop(lambda name, module: not isinstance(module, nn.Sequential)),
    "Keep": Keep(0.6),
}


class Block(nn.Module):
    def __init__(self, width, drop=None):
        super().__init__()
        self.norm, self.fc, self.act = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU()
        self.out, self.drop = nn.Linear(3 * width, width), drop or nn.Identity()

    def forward(self, x):
        return x + self.drop(self.out(self.act(self.fc(self.norm(x)))))


def blocks(count=3, width=15):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(count)))


def trained(model, batches, stage, **options):
    """Losses of three steps with one batch, or of a step with each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, **options)
    losses = []
    for inputs in batches if isinstance(batches, list) else [batches] * 3:
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, storm(1), storm(2), 3])
def test_every_stage_of_zero_has_the_same_bits(stage):
    inputs = torch.randn(5, 15, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = trained(blocks(), inputs, stage)
    for name, policy in POLICIES.items():
        model = checkpoint_layers(blocks(), policy, example=inputs if name == "Keep" else None)
        assert all(map(torch.equal, trained(model, inputs, stage), expected))
        assert all(line.predicted in {None, line.counted} for line in saved(model).lines)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_with_other_sizes_and_budgets_make_plans_of_their_own(stage):
    """What grows on one rank is looked at there alone; layers that call no collective may run again there alone."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    rows = [[5, 5, 7, 3, 9, 9, 2], [5, 8, 5, 5, 12, 4, 4]][rank]
    batches = [torch.randn(count, 15, generator=generator) for count in rows]
    expected = trained(blocks(), batches, stage)
    for policy in (Keep(0.5), Keep(["6KB", "12KB"][rank])):
        model = checkpoint_layers(blocks(), policy)
        assert all(map(torch.equal, trained(model, batches, stage), expected))


@pytest.mark.ranks(2)
def test_modules_whose_parameters_are_cut_apart_from_their_users_are_refused():
    inputs, single = torch.randn(5, 15), [nn.Linear, nn.LayerNorm]
    expected = trained(blocks(), inputs, 3)

    def run(policy):
        model = checkpoint_layers(blocks(), policy)
        return trained(model, inputs, 3, units=[each for each in model.modules() if type(each) in single])

    assert all(map(torch.equal, run("layers"), expected))
    with pytest.raises(RuntimeError, match=r"'2.norm.(weight|bias)' is used by .* outside of a call of its module"):
        run("cheap")


@pytest.mark.ranks(4, backend="gloo")  # strict ranks are no part of torch's dispatcher, where collectives are seen
def test_a_norm_that_calls_a_collective_stays_and_the_activation_does_not():
    with ProcessGroups(Topology.from_config({"tensor": {"size": 4, "mode": "2d"}}, 4)) as groups:
        layers = layer_set("auto", groups)

        class Over(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.fc = layers.LayerNorm(8), layers.Linear(8, 16)
                self.act, self.out = nn.GELU(), layers.Linear(16, 8)

            def forward(self, x):
                return self.out(self.act(self.fc(self.norm(x))))

        model = nn.Sequential(Over(), Over())
        initialize(model, 0)
        inputs = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()  # of 4 rows, 8 wide

        def gradients():
            model.zero_grad()
            model(inputs).square().sum().backward()
            return [parameter.grad for parameter in model.parameters()]

        expected = gradients()
        checkpoint_layers(model, "cheap")
        for _ in range(2):
            assert all(map(torch.equal, gradients(), expected))
        assert [line.dropped for line in saved(model).lines] == [("act",)] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [storm(1), 3])
def test_what_layers_keep_waits_elsewhere_and_parameters_do_not(stage):
    inputs = torch.randn(5, 15, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected, weight = trained(blocks(), inputs, stage), 15 * 45
    for policy in (None, *POLICIES.values()):
        stored = []

        def store(tensor, stored=stored):
            stored.append(tensor.numel())
            return tensor.clone()

        model = checkpoint_layers(blocks(), policy, to_host=ToHost(store=store, load=torch.clone))
        assert all(map(torch.equal, trained(model, inputs, stage), expected)), policy
        assert 0 < max(stored) < weight


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", [storm(one_f_one_b), zb_h1])
def test_pipelines_have_the_same_gradients_from_elsewhere(schedule):
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 15), torch.randn(8, 15)

    def gradients(policy, to_host):
        stage = blocks(4)[2 * dist.get_rank() :][:2]
        checkpoint_layers(stage, policy, to_host=to_host)
        run = Pipeline(stage, schedule(2, 4), dist.group.WORLD, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            stage.zero_grad()
            run.step(inputs, target=targets)
        return [parameter.grad for parameter in stage.parameters()]

    expected = gradients(None, None)
    for policy in (None, *POLICIES.values()):
        away = ToHost(resident=500, ahead=1, store=torch.clone, load=torch.clone, fetch=id)
        assert all(map(torch.equal, gradients(policy, away), expected)), policy


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", [storm(one_f_one_b), zb_h1])
def test_pipelines_have_the_same_gradients_and_offload_what_is_kept(schedule):
    torch.manual_seed(0)
    inputs, targets = torch.randn(8, 15), torch.randn(8, 15)

    def gradients(policy, offload):
        stage = blocks(4)[2 * dist.get_rank() :][:2]
        checkpoint_layers(stage, policy)
        run = Pipeline(stage, schedule(2, 4), dist.group.WORLD, loss_fn=nn.functional.mse_loss, offload=offload)
        for _ in range(2):
            stage.zero_grad()
            run.step(inputs, target=targets)
        return [parameter.grad for parameter in stage.parameters()]

    stored = {}
    expected = gradients(None, None)
    for name, policy in {"none": None, **POLICIES}.items():
        sizes = stored[name] = []

        def store(tensor, sizes=sizes):
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor.detach().clone()

        for offload in (None, ActivationOffload(store=store, load=torch.clone)):
            assert all(map(torch.equal, gradients(policy, offload), expected)), (name, offload)
    # The first microbatch is looked at, and keeps inputs; after it layers offer what they keep.
    assert sum(stored["layers"]) < sum(stored["Drop"]) < sum(stored["cheap"]) < sum(stored["none"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["cheap", "layers", "Keep"])
def test_dropout_over_ranks_drops_the_same_elements_again(policy):
    with ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)) as groups:
        layers = layer_set("auto", groups)

        def run(policy):
            torch.manual_seed(0)
            model = nn.Sequential(*(Block(6, layers.Dropout(0.5)) for _ in range(2)))
            checkpoint_layers(model, policy)
            torch.manual_seed(1)
            results = []
            for _ in range(3):
                loss = model(torch.ones(4, 6)).square().sum()
                results += torch.autograd.grad(loss, list(model.parameters()))
            return results

        assert all(map(torch.equal, run(POLICIES[policy]), run(None)))
