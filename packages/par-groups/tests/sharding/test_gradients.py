import copy
import pickle

import pytest
import torch

from par_groups import (
    Segment,
    Segments,
    cut,
    gradients,
    on_settle,
    on_written,
    set_gradient_elsewhere,
    set_segments,
    settle_,
    whole,
    written_,
)


def linear():
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    return model


def test_gradients_of_a_module_and_of_named_parameters_carry_their_names():
    model = linear()
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for source in (model, optimizer, list(model.named_parameters())):
        found = {name: view for name, _, view in gradients(source)}
        assert list(found) == ["weight", "bias"]
        assert found["weight"].data_ptr() == model.weight.grad.data_ptr()
        assert found["weight"].shape == (2, 3)


def test_an_optimizer_without_names_gets_positions():
    model = linear()
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    names = [name for name, _, _ in gradients(torch.optim.SGD(groups, lr=0.1))]
    assert names == ["param_groups.0.params.0", "param_groups.1.params.0"]


def test_a_parameter_without_a_gradient_is_passed_over():
    model = linear()
    model.bias.grad = None
    assert [name for name, _, _ in gradients(model)] == ["weight"]


def test_writing_a_view_of_a_flat_shard_changes_what_the_optimizer_sees():
    flat = torch.nn.Parameter(torch.zeros(5))
    weight, bias = whole((2, 2), (0,)), whole((3,), (0,))
    packs = [Segment("weight", cut(weight, 1, 4)), Segment("bias", cut(bias, 0, 2, offset=3))]
    set_segments(flat, Segments(packs))
    flat.grad = torch.arange(5.0)
    found = {(name, box.start): view for name, box, view in gradients(torch.optim.SGD([flat], lr=0.1))}
    assert found["weight", (0, 1)].tolist() == [[0.0]]
    assert found["weight", (1, 0)].tolist() == [[1.0, 2.0]]
    assert found["bias", (0,)].tolist() == [3.0, 4.0]
    found["bias", (0,)].mul_(2)
    assert flat.grad.tolist() == [0, 1, 2, 6, 8]


def test_asking_where_the_gradient_is_not_raises():
    model = linear()
    set_gradient_elsewhere(model.weight, "the flat shard of unit 'all'")
    with pytest.raises(RuntimeError, match="gradient of 'weight' lives in the flat shard of unit 'all'"):
        list(gradients(model))


def test_each_holder_hears_once_of_what_was_written():
    one, two, three = (torch.zeros(1) for _ in range(3))
    heard = []
    pair = on_written([one, two], lambda tensors: heard.append(("pair", len(tensors))))
    on_written([two], lambda tensors: heard.append(("single", len(tensors))))
    written_([one, two, three])
    assert heard == [("pair", 2), ("single", 1)]
    heard.clear()
    pair.remove()
    pair.remove()
    written_([one, two])
    assert heard == [("single", 1)]


def test_who_has_work_under_way_hears_of_a_reader_and_not_of_a_writer():
    one, two = torch.zeros(1), torch.zeros(1)
    heard = []
    registration = on_settle([one, two], lambda tensors: heard.append(("settle", len(tensors))))
    on_written([one], lambda tensors: heard.append(("written", len(tensors))))
    settle_([one, two])
    assert heard == [("settle", 2)]
    written_([one, two])
    assert heard == [("settle", 2), ("written", 1)]
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        settle_([other])
        written_([other])
    registration.remove()
    settle_([one, two])
    assert len(heard) == 2
