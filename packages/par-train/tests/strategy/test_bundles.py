"""Which optimizer trains which models. Pure."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from par_train.strategy.bundles import find_bundles


def sgd(*models):
    return torch.optim.SGD([each for model in models for each in model.parameters()], lr=0.1, momentum=0.9)


def test_models_find_their_optimizers_and_these_their_schedulers():
    actor, critic, teacher = nn.Linear(2, 2), nn.Linear(3, 3), nn.Linear(4, 4)
    of_critic, of_actor = sgd(critic), sgd(actor)
    scheduler = LambdaLR(of_actor, lambda _: 1.0)
    pairs = find_bundles([actor, critic, teacher], [of_critic, of_actor], [scheduler])
    assert [each.models for each in pairs] == [[actor], [critic], [teacher]]
    assert [each.optimizer for each in pairs] == [of_actor, of_critic, None]
    assert [each.schedulers for each in pairs] == [[scheduler], [], []]


def test_models_may_share_an_optimizer():
    actor, critic = nn.Linear(2, 2), nn.Linear(3, 3)
    (found,) = find_bundles([actor, critic], [sgd(actor, critic)], [])
    assert found.models == [actor, critic]


class Free(torch.optim.SGD):
    """Reads its state in `train`, as a schedule-free optimizer does, which leaves empty entries in it."""

    def train(self):
        return [self.state[each] for group in self.param_groups for each in group["params"]]


def test_an_optimizer_in_train_mode_has_not_stepped():
    model = nn.Linear(2, 2)
    optimizer = Free(model.parameters(), lr=0.1)
    optimizer.train()
    assert optimizer.state
    assert find_bundles([model], [optimizer], [])[0].optimizer is optimizer


def stepped():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return [model], [optimizer], []


def abstract():
    model = nn.Linear(2, 2, device="meta")
    return [model], [torch.optim.Adagrad(model.parameters())], []


def foreign():
    return [nn.Linear(2, 2)], [sgd(nn.Linear(5, 3))], []


def twice():
    model = nn.Linear(2, 2)
    return [model], [sgd(model), sgd(model)], []


def orphan():
    model = nn.Linear(2, 2)
    return [model], [sgd(model)], [LambdaLR(sgd(model), lambda _: 1.0)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (stepped, "the SGD has stepped already; initialize first"),
        (abstract, "the Adagrad has made state for parameters that are on the meta device"),
        (foreign, r"param_groups\[0\].params\[0\] of the SGD, of shape \(3, 5\), is a parameter of no model that init"),
        (twice, "a Linear has two optimizers, SGD and SGD; pass them as a list"),
        (orphan, "received a LambdaLR without its optimizer"),
    ],
)
def test_what_does_not_belong_together_is_named(make, words):
    with pytest.raises(ValueError, match=words):
        find_bundles(*make())
