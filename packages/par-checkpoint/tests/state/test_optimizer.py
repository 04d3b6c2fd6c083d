import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR

from par_checkpoint import CheckpointError, Format, load, save
from par_groups import on_settle, set_slots

from ..helpers import batch, make_model, train

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
}


def assert_same_state(one, other):
    """Equal by parameter: same slots, dtypes, values."""
    assert len(one) == len(other)
    for a, b in zip(one.values(), other.values(), strict=True):
        assert set(a) == set(b)
        for slot, value in a.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == b[slot].dtype, slot
                assert torch.equal(value, b[slot]), slot
            else:
                assert value == b[slot], slot


def in_order(optimizer, model):
    """The state by parameter, in the model's order."""
    return {p: optimizer.state[p] for p in model.parameters() if p in optimizer.state}


def groups(optimizer):
    return [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", MAKERS)
def test_training_goes_on_as_if_nothing_had_happened(kind, steps, tmp_path):
    model = make_model()
    optimizer = MAKERS[kind](model.parameters())
    train(model, optimizer, range(steps))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = make_model(1)
    again = MAKERS[kind](other.parameters())
    train(other, again, range(7, 9))  # what it has in its slots now must be gone
    load(tmp_path / "c", model=other, optimizer=again)
    assert_same_state(in_order(optimizer, model), in_order(again, other))
    assert train(other, again, range(3, 8)) == train(model, optimizer, range(3, 8))
    assert groups(again) == groups(optimizer)


def test_slots_that_are_no_tensors_come_back(tmp_path):
    def steps(model, optimizer, numbers):
        def closure():
            optimizer.zero_grad()
            loss = model(batch(0)).square().mean()
            loss.backward()
            return loss

        return [optimizer.step(closure).item() for _ in numbers]

    model = make_model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=2)
    steps(model, optimizer, range(3))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = make_model(1)
    again = torch.optim.LBFGS(other.parameters(), lr=0.1, max_iter=3, history_size=2)
    load(tmp_path / "c", model=other, optimizer=again)
    state = again.state[next(other.parameters())]
    assert isinstance(state["n_iter"], int)
    assert len(state["old_dirs"]) == 2
    assert steps(other, again, range(4)) == steps(model, optimizer, range(4))


@pytest.mark.parametrize("steps", [(), range(1)])
@pytest.mark.parametrize("async_", [False, True])
def test_saving_between_steps_changes_nothing(async_, steps, tmp_path):
    model, twin = make_model(), make_model()
    optimizer, its = torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(twin.parameters(), lr=0.01)
    undisturbed = train(twin, its, range(5))
    losses = []
    for step in range(5):
        handle = save(tmp_path / f"{step}", model=model, optimizer=optimizer, async_=async_)
        losses += train(model, optimizer, range(step, step + 1))
    handle.wait()
    assert losses == undisturbed
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    for step in range(5):  # each of them is of its moment, not of a later one
        other = make_model(1)
        again = torch.optim.AdamW(other.parameters(), lr=0.01)
        load(tmp_path / f"{step}", model=other, optimizer=again)
        assert train(other, again, range(step, 5)) == undisturbed[step:]


def two_groups(model, *, swapped=False, named=False):
    """Weights at one rate, biases, which do not decay, at another."""
    weights = [pair for pair in model.named_parameters() if pair[0].endswith("weight")]
    biases = [pair for pair in model.named_parameters() if pair[0].endswith("bias")]
    made = [
        {"params": weights if named else [p for _, p in weights], "lr": 0.01},
        {"params": biases if named else [p for _, p in biases], "lr": 0.002, "weight_decay": 0.0},
    ]
    for each in made:
        if swapped:
            each["params"] = each["params"][::-1]
    return torch.optim.AdamW(made[::-1] if swapped else made, lr=1.0)


@pytest.mark.parametrize("named", [False, True])
def test_groups_are_found_by_the_names_in_them(named, tmp_path):
    model = make_model()
    optimizer = two_groups(model)
    optimizer.param_groups[0]["lr"] = 0.005
    train(model, optimizer, range(3))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = make_model(1)
    again = two_groups(other, swapped=True, named=named)
    load(tmp_path / "c", model=other, optimizer=again)
    assert [group["lr"] for group in again.param_groups] == [0.002, 0.005]
    assert [group["weight_decay"] for group in again.param_groups] == [0.0, 0.01]
    assert [len(group["params"]) for group in again.param_groups] == [2, 2]
    assert train(other, again, range(3, 8)) == train(model, optimizer, range(3, 8))


def test_a_group_of_parameters_from_two_groups_is_refused(tmp_path):
    model = make_model()
    optimizer = two_groups(model)
    train(model, optimizer, range(1))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = make_model(1)
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(CheckpointError, match=r"param group 0 were in groups \[0, 1\]"):
        load(tmp_path / "c", model=other, optimizer=torch.optim.AdamW(other.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), before, strict=True))


def test_named_parameters_need_no_model(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    train(model, optimizer, range(2))
    save(tmp_path / "c", optimizer=optimizer)
    assert not (tmp_path / "c" / "model.safetensors").exists()
    other = make_model()
    load_into = torch.optim.AdamW(list(other.named_parameters())[::-1], lr=0.5)
    load(tmp_path / "c", optimizer=load_into)
    assert_same_state(in_order(optimizer, model), in_order(load_into, other))
    assert load_into.param_groups[0]["lr"] == 0.01
    assert load_into.param_groups[0]["param_names"][0] == "2.bias"
    beside = make_model()
    unnamed = torch.optim.AdamW(beside.parameters())
    load(tmp_path / "c", optimizer=torch.optim.AdamW(beside.named_parameters()))
    with pytest.raises(ValueError, match=r"param_groups\[0\]\.params\[0\] .* has no name; pass the model"):
        load(tmp_path / "c", optimizer=unnamed)


def test_without_names_and_without_a_model_nothing_is_saved(tmp_path):
    optimizer = torch.optim.SGD(make_model().parameters())
    with pytest.raises(ValueError, match=r"param_groups\[0\]\.params\[0\] .* has no name; pass the model beside it"):
        save(tmp_path / "c", optimizer=optimizer)
    assert list(tmp_path.iterdir()) == []


def test_an_optimizer_that_never_stepped_clears_one_that_has(tmp_path):
    model = make_model()
    save(tmp_path / "c", model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.03))
    other = make_model()
    again = torch.optim.AdamW(other.parameters(), lr=0.01)
    train(other, again, range(1))
    load(tmp_path / "c", model=other, optimizer=again)
    assert dict(again.state) == {}
    assert again.param_groups[0]["lr"] == 0.03


def test_loading_allocates_slots_without_a_step(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = make_model()

    class NeverSteps(torch.optim.AdamW):
        def step(self, closure=None):
            raise AssertionError("a load must not step")

    again = NeverSteps(other.parameters(), lr=0.01)
    load(tmp_path / "c", model=other, optimizer=again)
    assert_same_state(in_order(optimizer, model), in_order(again, other))


def test_slots_that_are_there_keep_their_memory(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01))
    train(model, optimizer, range(2))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    parameter = next(model.parameters())
    slot, lr = optimizer.state[parameter]["exp_avg"], optimizer.param_groups[0]["lr"]
    expected = slot.clone()
    train(model, optimizer, range(2))
    lr.fill_(0.5)
    load(tmp_path / "c", model=model, optimizer=optimizer)
    assert optimizer.state[parameter]["exp_avg"] is slot
    assert torch.equal(slot, expected)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr == torch.tensor(0.01)


def test_frozen_parameters_are_saved_without_slots(tmp_path):
    def make(seed):
        model = make_model(seed)
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)

    model, optimizer = make(0)
    train(model, optimizer, range(2))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other, again = make(1)
    load(tmp_path / "c", model=other, optimizer=again)
    assert [p.requires_grad for p in other.parameters()] == [False, False, True, True]
    assert train(other, again, range(2, 5)) == train(model, optimizer, range(2, 5))


def test_a_parameter_that_got_no_gradient_has_no_slots_yet(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model[0].weight.requires_grad_(False)
    train(model, optimizer, range(2))
    model[0].weight.requires_grad_(True)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = make_model(1)
    again = torch.optim.AdamW(other.parameters(), lr=0.01)
    load(tmp_path / "c", model=other, optimizer=again)
    assert other[0].weight not in again.state
    assert train(other, again, range(2, 5)) == train(model, optimizer, range(2, 5))


def test_a_parameter_that_the_saved_optimizer_did_not_have_is_missing(tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model[0].parameters(), lr=0.01)
    train(model, optimizer, range(1))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = make_model(1)
    again = torch.optim.AdamW(other.parameters(), lr=0.02)
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: 2\.weight \(in the optimizer\)"):
        load(tmp_path / "c", model=other, optimizer=again)
    report = load(tmp_path / "c", model=other, optimizer=again, strict=False)
    assert report.missing == ("2.weight (in the optimizer)", "2.bias (in the optimizer)")
    assert torch.equal(again.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_a_checkpoint_without_an_optimizer_says_so(tmp_path):
    model = make_model()
    save(tmp_path / "c", model=model)
    with pytest.raises(CheckpointError, match="was saved without an optimizer; pass none"):
        load(tmp_path / "c", model=model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(CheckpointError, match="was saved without a scheduler; pass none"):
        load(tmp_path / "c", model=model, scheduler=MultiStepLR(torch.optim.SGD(model.parameters()), [1]))


def schedulers(kind, optimizer):
    if kind == "steps":
        return MultiStepLR(optimizer, milestones=[2, 4, 4, 7], gamma=0.5)
    if kind == "cycle":
        return OneCycleLR(optimizer, max_lr=0.1, total_steps=12)
    if kind == "lambda":
        return LambdaLR(optimizer, lambda step: 0.9**step)
    if kind == "sequence":
        parts = [LambdaLR(optimizer, lambda step: 0.5**step), MultiStepLR(optimizer, milestones=[2, 4])]
        return SequentialLR(optimizer, parts, milestones=[3])
    return [MultiStepLR(optimizer, milestones=[2, 4], gamma=0.5), OneCycleLR(optimizer, max_lr=0.1, total_steps=12)]


def rates(optimizer, scheduler, steps):
    """The rates of some steps."""
    found = []
    for _ in range(steps):
        optimizer.step()
        for each in scheduler if isinstance(scheduler, list) else [scheduler]:
            each.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("style", ["huggingface", "torch"])
@pytest.mark.parametrize("kind", ["steps", "cycle", "lambda", "sequence", "list"])
def test_a_schedule_goes_on(kind, style, tmp_path):
    model = make_model()
    optimizer = two_groups(model)
    scheduler = schedulers(kind, optimizer)
    rates(optimizer, scheduler, 3)
    save(tmp_path / "c", model=model, optimizer=optimizer, scheduler=scheduler, format=Format(style=style))
    other = make_model()
    again = two_groups(other)
    resumed = schedulers(kind, again)
    load(tmp_path / "c", model=other, optimizer=again, scheduler=resumed)
    assert rates(again, resumed, 6) == rates(optimizer, scheduler, 6)


def test_counters_keep_their_integer_keys(tmp_path):
    optimizer = torch.optim.SGD(make_model().parameters(), lr=1.0)
    scheduler = MultiStepLR(optimizer, milestones=[2, 4, 4])
    save(tmp_path / "c", scheduler=scheduler)
    again = MultiStepLR(torch.optim.SGD(make_model().parameters(), lr=1.0), milestones=[9])
    load(tmp_path / "c", scheduler=again)
    assert again.milestones == scheduler.milestones
    assert type(again.milestones) is type(scheduler.milestones)


def test_infinities_of_a_plateau_come_back(tmp_path):
    scheduler = ReduceLROnPlateau(torch.optim.SGD(make_model().parameters(), lr=1.0))
    save(tmp_path / "c", scheduler=scheduler)
    again = ReduceLROnPlateau(torch.optim.SGD(make_model().parameters(), lr=1.0))
    again.step(3.0)
    load(tmp_path / "c", scheduler=again)
    assert again.best == torch.inf
    assert again.num_bad_epochs == 0


def test_the_number_of_schedulers_must_agree(tmp_path):
    def make():
        return MultiStepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), [1])

    save(tmp_path / "c", scheduler=[make(), make()])
    with pytest.raises(CheckpointError, match="has 2 schedulers, but 1 are given"):
        load(tmp_path / "c", scheduler=[make()])
    with pytest.raises(CheckpointError, match="a list of schedulers, the other has one"):
        load(tmp_path / "c", scheduler=make())
    with pytest.raises(TypeError, match=r"scheduler is a int without state_dict\(\)"):
        save(tmp_path / "d", scheduler=3)


def test_what_does_not_fit_keeps_its_slots_without_strict(tmp_path):
    def trained(rows, steps):
        model = nn.ParameterDict({"grown": torch.ones(rows, 3), "same": torch.ones(4)})
        if rows > 5:
            model["new"] = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for _ in range(steps):
            sum(each.square().sum() for each in model.values()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    model, optimizer = trained(5, 3)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    for steps in (0, 1):
        other, into = trained(6, steps)
        before = {name: dict(into.state[other[name]]) for name in ("grown", "new")}
        report = load(tmp_path / "c", model=other, optimizer=into, strict=False)
        assert report.missing == ("new", "new (in the optimizer)")
        assert [line.split()[0] for line in report.mismatched] == ["'grown'"]
        assert all(into.state[other[name]] == slots for name, slots in before.items())
        assert into.state[other["same"]]["step"] == 3
        other["grown"].grad = torch.ones(6, 3)
        into.step()


KINDS = {
    "momentum into adamw": ("dampening, initial_lr, momentum", "betas, eps"),
    "adamw into momentum": ("betas, eps, initial_lr", "dampening, momentum"),
    "rmsprop into adamw": ("alpha, initial_lr, momentum", "betas"),
}


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("kinds", KINDS)
def test_state_of_another_kind_of_optimizer_is_refused(kinds, steps, tmp_path):
    saved, given = kinds.split(" into ")
    theirs, ours = KINDS[kinds]
    model, other = make_model(), make_model(1)
    optimizer, into = MAKERS[saved](model.parameters()), MAKERS[given](other.parameters())
    MultiStepLR(optimizer, [3])  # leaves a number in the group, which says nothing by itself
    train(model, optimizer, range(2))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    train(other, into, range(steps))
    slots = {parameter: {slot: value.clone() for slot, value in of.items()} for parameter, of in into.state.items()}
    options, weight = groups(into), other[0].weight.detach().clone()
    with pytest.raises(CheckpointError, match=f"param group 0 has {theirs} in the checkpoint and not {ours}") as caught:
        load(tmp_path / "c", model=other, optimizer=into)
    assert torch.equal(other[0].weight, weight)
    unwanted = {f"{name}.{slot}" for name, each in model.named_parameters() for slot in optimizer.state[each]}
    assert all(f"not wanted by anybody: {name}" in str(caught.value) for name in unwanted)
    report = load(tmp_path / "c", model=other, optimizer=into, strict=False)
    assert set(report.unexpected) == unwanted
    assert len(report.mismatched) == 1
    assert torch.equal(other[0].weight, model[0].weight)
    assert_same_state(into.state, slots)
    assert groups(into) == options


def test_slots_of_another_kind_of_optimizer_are_listed(tmp_path):
    model, other = make_model(), make_model(1)
    optimizer, into = torch.optim.Adam(model.parameters()), torch.optim.Adamax(other.parameters())
    train(model, optimizer, range(2))
    save(tmp_path / "c", model=model, optimizer=optimizer)
    train(other, into, range(1))
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", model=other, optimizer=into)
    for name, _ in model.named_parameters():
        slots = "exp_avg, exp_avg_sq, step in the checkpoint, exp_avg, exp_inf, step in the optimizer"
        assert f"{name!r} has slots {slots}" in str(caught.value)


def test_options_bring_slots_that_come_with_them(tmp_path):
    """A flag of another value, or a version of torch that has one more, is no other kind of optimizer."""
    model, other = make_model(), make_model(1)
    optimizer, into = torch.optim.Adam(model.parameters(), amsgrad=True), torch.optim.Adam(other.parameters())
    train(model, optimizer, range(2))
    del optimizer.param_groups[0]["decoupled_weight_decay"]
    save(tmp_path / "c", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["decoupled_weight_decay"] = False
    train(other, into, range(1))
    load(tmp_path / "c", model=other, optimizer=into)
    assert train(other, into, range(2, 4)) == train(model, optimizer, range(2, 4))


@pytest.mark.parametrize("style", ["huggingface", "torch"])
def test_state_of_the_optimizer_as_a_whole_is_saved_too(style, tmp_path):
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    optimizer.state.update({"calls": 7, "history": torch.arange(3.0)})
    save(tmp_path / "c", model=model, optimizer=optimizer, format=Format(style=style))
    other = make_model(1)
    again = torch.optim.AdamW(other.parameters())
    assert load(tmp_path / "c", model=other, optimizer=again).unexpected == ()
    assert again.state["calls"] == 7
    assert torch.equal(again.state["history"], torch.arange(3.0))
    assert_same_state(in_order(optimizer, model), in_order(again, other))
    optimizer.state["a.b"] = 1
    with pytest.raises(ValueError, match=r"the key 'a\.b'; give it a str without a dot"):
        save(tmp_path / "d", model=model, optimizer=optimizer)


def test_a_group_that_was_not_saved_keeps_its_options(tmp_path):
    backbone = nn.Linear(3, 3)
    save(tmp_path / "c", model=backbone, optimizer=torch.optim.AdamW(backbone.named_parameters(), lr=1e-4))
    model = nn.Sequential(backbone, nn.Linear(3, 2))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.1, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    load(
        tmp_path / "c",
        model=model,
        optimizer=optimizer,
        strict=False,
        format=Format(names=lambda name: name.removeprefix("0.")),
    )
    assert [(each["lr"], each["weight_decay"]) for each in optimizer.param_groups] == [(1e-4, 0.01), (0.1, 0.0)]


def test_a_save_and_a_load_let_work_on_the_state_end_and_a_load_uses_memory_that_is_ready(tmp_path):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    heard = []
    on_settle([model.weight], heard.append)
    save(tmp_path / "a", model=model, optimizer=optimizer)
    assert len(heard) == 1
    other = torch.nn.Linear(3, 2)
    fresh = torch.optim.AdamW(other.parameters())
    ready, small = torch.zeros(2, 3), torch.zeros(1)
    set_slots(other.weight, {"exp_avg": ready, "exp_avg_sq": small})
    on_settle([other.weight], heard.append)
    load(tmp_path / "a", model=other, optimizer=fresh)
    assert len(heard) == 2
    state = fresh.state[other.weight]
    assert state["exp_avg"] is ready
    assert state["exp_avg_sq"].shape == (2, 3)  # what is ready does not fit
    for name, value in optimizer.state[model.weight].items():
        assert torch.equal(state[name], value)
