"""Models that know nothing of ranks: cut by a plan; what they and models of transformers are called with."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from par_pipeline import split_keywords
from par_train import Strategy

TOLERANCE = 1e-5  # relative, fp32: sums over ranks in another order
PLAN = {"up": "colwise", "down": "rowwise"}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(15, 34), nn.Linear(34, 7)

    def forward(self, x):
        return self.down(functional.gelu(self.up(x)))


def steps(model, optimizer, backward):
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        loss = model(torch.randn(6, 15, generator=generator)).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero", [0, 1])
def test_module_with_a_plan_is_cut_and_trains_as_on_one_device(zero, tmp_path):
    whole = Mlp()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    expected = steps(whole, optimizer, torch.Tensor.backward)
    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}, zero=zero) as strategy:
        model = Mlp()
        model, optimizer = strategy.initialize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), plans={model: PLAN}
        )
        assert model.up.weight.shape == (17, 15)
        loss = steps(model, optimizer, lambda loss: strategy.backward(loss, optimizer))
        assert loss == pytest.approx(expected, rel=TOLERANCE)
        strategy.save(model, tmp_path / "model.pt", plan="torch")
        for name, tensor in torch.load(tmp_path / "model.pt").items():
            assert torch.allclose(tensor, whole.state_dict()[name], rtol=1e-4, atol=TOLERANCE), name


@pytest.mark.ranks(2)
def test_wrong_plans_are_refused_on_every_rank():
    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}) as strategy:
        with pytest.raises(ValueError, match="plans has a Mlp that initialize\\(\\) did not receive; pass it too"):
            strategy.initialize(nn.Linear(2, 2), plans={Mlp(): PLAN})
        model = Mlp()
        with pytest.raises(ValueError, match="upp"):
            strategy.initialize(model, plans={model: {"upp": "colwise"}})
        with pytest.raises(ValueError, match="has no sharding metadata for the 2 ranks"):
            strategy.initialize(Mlp())


@pytest.mark.ranks(2)
def test_optimizer_of_whole_tensors_is_refused_for_a_module_that_a_plan_cuts():
    class Normed(torch.optim.SGD):
        """Its step depends on the norm of a whole tensor."""

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.sub_(parameter.grad / (1 + parameter.grad.norm()))

    handlers = [{"type": "partial"}]  # no par-zero, which could put tensors together
    with Strategy(parallel={"tensor": {"size": 2, "mode": "1d"}}, gradient_handlers=handlers) as strategy:
        model = Mlp()
        with pytest.raises(ValueError, match=r"optimizer=Normed: par-zero does not know .* pass zero=dict"):
            strategy.initialize(model, Normed(model.parameters(), lr=0.1), plans={model: PLAN})
    with Strategy(
        parallel={"tensor": {"size": 2, "mode": "1d"}},
        gradient_handlers=handlers,
        zero={"stage": 0, "update": {"atomic": True}},
    ) as strategy:
        model = Mlp()
        with pytest.raises(ValueError, match=r"would treat a shard of 'up\.weight' as the full"):
            strategy.initialize(model, Normed(model.parameters(), lr=0.1), plans={model: PLAN})


@pytest.mark.ranks(1)
def test_without_a_criterion_a_model_of_transformers_is_wanted():
    with Strategy() as strategy:
        model = nn.Linear(3, 3)
        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(TypeError, match=r"this is a Linear with a dict.*pass a criterion\(outputs, target\)"):
            strategy.execute_pipeline(iter([{"input_ids": torch.zeros(2, 3)}]), model, None, optimizer)


def test_keywords_without_rows_are_not_split_by_rows():
    """Also if they are exactly as long as the batch has rows."""
    rows, time = 4, 6
    mask, kept = torch.ones(rows, time), torch.arange(rows)
    positions = torch.arange(3 * rows * time).reshape(3, rows, time)
    keywords = {"attention_mask": mask, "logits_to_keep": kept, "position_ids": positions, "use_cache": False}
    split = split_keywords(keywords, rows, 2)
    assert split["attention_mask"] is mask
    assert all(each is kept for each in split["logits_to_keep"])
    assert [tuple(each.shape) for each in split["position_ids"]] == [(3, 2, time), (3, 2, time)]
    assert torch.equal(torch.cat(split["position_ids"], dim=1), positions)
    whole = split_keywords(keywords, rows, 1)
    (only,) = whole.pop("position_ids")  # dim 0 is not the rows, which a pipeline compares here, too
    assert torch.equal(only, positions)
    assert whole == {name: value for name, value in keywords.items() if name != "position_ids"}
    with pytest.raises(ValueError, match=r"image_grid_thw of shape \(4, 3\): .* pass pipeline=dict\(split="):
        split_keywords({"image_grid_thw": torch.ones(4, 3)}, rows, 2)
