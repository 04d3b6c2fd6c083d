"""Layers that drop activations, below ZeRO, pipelines, an offload of activations and dropout over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import ProcessGroups, Topology
from par_layers import layer_set
from par_pipeline import Offload, Pipeline, one_f_one_b, zb_h1
from par_recompute import Drop, Keep, ToHost, checkpoint_layers, saved
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


def trained(model, inputs, stage, steps=3):
    """Losses, and parameters after the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shard(model, optimizer, stage=stage, group=dist.group.WORLD)
    losses = []
    for _ in range(steps):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_of_zero_has_the_same_bits(stage):
    inputs = torch.randn(5, 15, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = trained(blocks(), inputs, stage)
    for name, policy in POLICIES.items():
        model = checkpoint_layers(blocks(), policy, example=inputs if name == "Keep" else None)
        assert all(map(torch.equal, trained(model, inputs, stage), expected))
        assert all(line.predicted in {None, line.counted} for line in saved(model).lines)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 3])
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
@pytest.mark.parametrize("schedule", [one_f_one_b, zb_h1])
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
@pytest.mark.parametrize("schedule", [one_f_one_b, zb_h1])
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

        for offload in (None, Offload(store=store, load=torch.clone)):
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
