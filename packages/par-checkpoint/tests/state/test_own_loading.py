"""Hooks and methods that torch calls in `load_state_dict` run in `load`, too; `save` refuses what would be lost."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import CheckpointError, Format, load, save


class Inverse(nn.Linear):
    """Keeps something that it computes of its weight."""

    def __init__(self):
        super().__init__(3, 3)
        self.refresh()

    def refresh(self, *_):
        self.inverse = torch.linalg.inv(self.weight.detach())


class PostHook(Inverse):
    def __init__(self):
        super().__init__()
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())


class PreHook(Inverse):
    """Its state dict holds the inverse, of which it makes the weight."""

    def __init__(self):
        super().__init__()
        self._register_state_dict_hook(lambda module, state, prefix, _: state.update({prefix + "scale": 2.0}))
        self._register_load_state_dict_pre_hook(self.before)

    def before(self, state, prefix, *_):
        assert state.pop(prefix + "scale") == 2.0
        self.inverse = torch.linalg.inv(state[prefix + "weight"].detach())


class ReadsItself(Inverse):
    """Clears its weight before it reads the state's."""

    def _load_from_state_dict(self, state, prefix, *rest):
        with torch.no_grad():
            self.weight.zero_()
        super()._load_from_state_dict(state, prefix, *rest)
        self.refresh()


class OwnLoadStateDict(Inverse):
    def load_state_dict(self, *args, **kwargs):
        found = super().load_state_dict(*args, **kwargs)
        self.refresh()
        return found


class Counting(nn.Linear):
    """Its state dict holds a count."""

    seen = 0

    def __init__(self):
        super().__init__(2, 2)

    def _save_to_state_dict(self, out, prefix, keep_vars):
        super()._save_to_state_dict(out, prefix, keep_vars)
        out[prefix + "seen"] = self.seen

    def _load_from_state_dict(self, state, prefix, *rest):
        self.seen = state.pop(prefix + "seen")
        super()._load_from_state_dict(state, prefix, *rest)


class Telling(nn.Linear):
    """Its state dict holds a count that it does not take back."""

    def __init__(self):
        super().__init__(2, 2)

    def _save_to_state_dict(self, out, prefix, keep_vars):
        super()._save_to_state_dict(out, prefix, keep_vars)
        out[prefix + "seen"] = 7


STYLES = pytest.mark.parametrize("style", ["huggingface", "torch"])


@STYLES
@pytest.mark.parametrize("kind", [PostHook, PreHook, ReadsItself, OwnLoadStateDict])
def test_loading_of_a_modules_own_is_called(kind, style, tmp_path):
    model, other = kind(), kind()
    save(tmp_path / "c", model=model, format=Format(style=style))
    load(tmp_path / "c", model=other)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.inverse, model.inverse)


@pytest.mark.parametrize("kind", [PostHook, PreHook, ReadsItself])
def test_loading_of_a_part_is_called_in_the_order_of_torch(kind, tmp_path):
    called = []

    def make():
        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(kind()))
        for name, module in model.named_modules():
            module.register_load_state_dict_post_hook(lambda *_, name=name: called.append(name))
        return model

    model, other = make(), make()
    save(tmp_path / "c", model=model)
    load(tmp_path / "c", model=other)
    assert torch.equal(other[1][0].inverse, model[1][0].inverse)
    ours, called[:] = list(called), []
    other.load_state_dict(model.state_dict())
    assert ours == called


def test_a_pre_hook_that_changes_tensors_of_parts_is_honoured(tmp_path):
    def make():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model._register_load_state_dict_pre_hook(lambda state, *_: state.update({"1.bias": state["1.bias"] * 2}))
        return model

    model, other, of_torch = make(), make(), make()
    save(tmp_path / "c", model=model)
    load(tmp_path / "c", model=other)
    of_torch.load_state_dict(model.state_dict())
    assert torch.equal(other[1].bias, of_torch[1].bias)
    assert torch.equal(other[1].bias, 2 * model[1].bias)


@STYLES
def test_a_count_in_the_state_dict_comes_back(style, tmp_path):
    model, other = nn.Sequential(Counting(), nn.Linear(2, 2)), nn.Sequential(Counting(), nn.Linear(2, 2))
    model[0].seen = 7
    save(tmp_path / "c", model=model, format=Format(style=style))
    report = load(tmp_path / "c", model=other)
    assert other[0].seen == 7
    assert (report.missing, report.unexpected) == ((), ())


def test_a_count_that_nobody_takes_is_named(tmp_path):
    save(tmp_path / "telling", model=nn.Sequential(Telling()))
    with pytest.raises(CheckpointError, match=r"not wanted by anybody: 0\.seen"):
        load(tmp_path / "telling", model=nn.Sequential(Telling()))
    assert load(tmp_path / "telling", model=nn.Sequential(Telling()), strict=False).unexpected == ("0.seen",)
    save(tmp_path / "plain", model=nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: 0\.seen"):
        load(tmp_path / "plain", model=nn.Sequential(Counting()))


def test_what_own_loading_refuses_is_raised(tmp_path):
    save(tmp_path / "c", model=Telling())
    model = Telling()
    model.register_load_state_dict_pre_hook(lambda *_: None)
    with pytest.raises(
        CheckpointError, match=r"model=Telling: its own loading reports: nobody takes 'seen'; correct it"
    ):
        load(tmp_path / "c", model=model)
    load(tmp_path / "c", model=model, strict=False)


@STYLES
def test_values_of_a_mapping_come_back_or_are_named(style, tmp_path):
    save(tmp_path / "c", model={"w": torch.ones(2), "epoch": 7}, format=Format(style=style))
    into = {"w": torch.zeros(2), "epoch": 0}
    load(tmp_path / "c", model=into)
    assert into["epoch"] == 7
    with pytest.raises(CheckpointError, match="not wanted by anybody: epoch"):
        load(tmp_path / "c", model={"w": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="missing in the checkpoint: best"):
        load(tmp_path / "c", model={**into, "best": 1})


@pytest.mark.parametrize("inner", [{"w": torch.ones(2)}, [torch.ones(2)], {"a": ({"b": torch.ones(2)},)}])
def test_tensors_inside_of_a_value_are_refused(inner, tmp_path):
    with pytest.raises(TypeError, match=r"model\['ema'\] is a (dict|list) that holds tensors; pass one flat mapping"):
        save(tmp_path / "c", model={"w": torch.ones(2), "ema": inner})
    assert not (tmp_path / "c").exists()


def test_names_that_are_one_without_wrappers_are_refused(tmp_path):
    model = {"a.w": torch.ones(2), "a._orig_mod.w": torch.zeros(2)}
    with pytest.raises(
        ValueError, match=r"model has 'a\._orig_mod\.w' and another name that is 'a\.w' without wrappers"
    ):
        save(tmp_path / "c", model=model)


def test_an_error_of_a_modules_own_loading_says_what_is_undefined(tmp_path):
    class Failing(PostHook):
        def refresh(self, *_):
            if hasattr(self, "inverse"):
                raise LookupError("no cache")
            self.inverse = None

    save(tmp_path / "c", model=nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"raised LookupError: no cache\. What was being loaded is now undefined"):
        load(tmp_path / "c", model=Failing())


@pytest.mark.ranks(2)
def test_an_error_of_loading_on_one_rank_is_raised_on_all(tmp_path):
    class Failing(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_load_state_dict_post_hook(self.after)

        def after(self, *_):
            if dist.get_rank() == 1:
                raise LookupError("no cache")

    torch.manual_seed(0)
    save(tmp_path / "c", model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"rank 1: .*raised LookupError: no cache"):
        load(tmp_path / "c", model=Failing())


def trained(kind, model, **options):
    """An optimizer that has stepped."""
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return optimizer


class Doubling(torch.optim.Adam):
    """Keeps something of its state in a cache, and a count of its own."""

    count = 0

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict):
        state_dict = dict(state_dict)
        self.count = state_dict.pop("count")
        super().load_state_dict(state_dict)
        self.cache = [2 * state["exp_avg"] for state in self.state.values()]


@STYLES
def test_what_a_subclass_adds_to_its_state_dict_comes_back(style, tmp_path):
    model = nn.Linear(3, 3, dtype=torch.bfloat16)
    model.forward = lambda x: nn.functional.linear(x.bfloat16(), model.weight, model.bias)
    optimizer = trained(Doubling, model)
    optimizer.count = 5
    for state in optimizer.state.values():  # more exact than what torch's own loading leaves
        state["exp_avg"] = state["exp_avg"].float() + 1e-4
    save(tmp_path / "c", model=model, optimizer=optimizer, format=Format(style=style))
    again = Doubling(model.parameters(), lr=0.3)
    load(tmp_path / "c", model=model, optimizer=again)
    assert again.count == 5
    assert again.param_groups[0]["lr"] == 0.1
    for one, other, doubled in zip(optimizer.state.values(), again.state.values(), again.cache, strict=True):
        assert other["exp_avg"].dtype == torch.float32
        assert torch.equal(one["exp_avg"], other["exp_avg"])
        assert torch.equal(doubled, (2 * one["exp_avg"]).to(doubled.dtype))
    with pytest.raises(CheckpointError, match=r"not wanted by anybody: count \(in the state dict of optimizer 0\)"):
        load(tmp_path / "c", model=model, optimizer=torch.optim.Adam(model.parameters()))


def test_load_hooks_of_an_optimizer_are_called(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = trained(torch.optim.Adam, model)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    again, called = torch.optim.Adam(model.parameters(), lr=0.3), []
    again.register_load_state_dict_post_hook(lambda one: called.append(one.param_groups[0]["lr"]))
    load(tmp_path / "c", model=model, optimizer=again)
    assert called == [0.1]

    def halve(_, state):
        groups = [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    again.register_load_state_dict_pre_hook(halve)
    load(tmp_path / "c", model=model, optimizer=again)
    assert called == [0.1, 0.05]
    for one, other in zip(optimizer.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(one[slot], other[slot]) for slot in one)


def test_a_state_dict_that_shows_other_state_is_refused(tmp_path):
    class Slow(torch.optim.SGD):
        """Wraps an optimizer, whose state only its state dict shows."""

        def __init__(self, parameters, lr):
            super().__init__(parameters, lr=lr)
            self.fast = torch.optim.Adam(self.param_groups, lr=lr)

        def state_dict(self):
            return {**self.fast.state_dict(), "slow": 1}

        def step(self, closure=None):
            return self.fast.step(closure)

    model = nn.Linear(3, 3)
    optimizer = trained(Slow, model)
    with pytest.raises(ValueError, match=r"optimizer=Slow: its state_dict\(\) shows other state or options than it"):
        save(tmp_path / "c", model=model, optimizer=optimizer)
    assert not (tmp_path / "c").exists()


def test_state_of_an_optimizer_inside_is_not_lost(tmp_path):
    class Sharpness(torch.optim.Optimizer):
        """Steps by an optimizer that it makes of its param groups, as SAM does."""

        def __init__(self, parameters, lr):
            super().__init__(parameters, {"rho": 0.05})
            self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
            self.param_groups = self.base.param_groups

        def step(self, closure=None):
            return self.base.step(closure)

    model = nn.Linear(3, 3)
    optimizer = trained(Sharpness, model)
    with pytest.raises(ValueError, match="optimizer=Sharpness: the SGD in its base has state of the same parameters"):
        save(tmp_path / "c", model=model, optimizer=optimizer)
    save(tmp_path / "c", model=model, optimizer=optimizer.base)
    again = Sharpness(model.parameters(), lr=0.1)
    load(tmp_path / "c", model=model, optimizer=again.base)
    for one, other in zip(optimizer.base.state.values(), again.base.state.values(), strict=True):
        assert torch.equal(one["momentum_buffer"], other["momentum_buffer"])


def test_adamw_stays_adamw_when_it_goes_on_from_adam(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = trained(torch.optim.Adam, model, weight_decay=0.1)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    again, of_torch = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    load(tmp_path / "c", model=model, optimizer=again)
    of_torch.load_state_dict(optimizer.state_dict())
    options = [{k: v for k, v in one.param_groups[0].items() if k != "params"} for one in (again, of_torch)]
    assert options[0] == options[1]
    assert options[0]["decoupled_weight_decay"] is True


def test_groups_get_options_of_their_own(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = trained(torch.optim.Adam, model, betas=(torch.tensor(0.8), torch.tensor(0.9)))
    optimizer.param_groups[0].update(lr=torch.tensor(0.5), tags=["a"])
    save(tmp_path / "c", model=model, optimizer=optimizer)
    again = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    load(tmp_path / "c", model=model, optimizer=again)
    one, other = again.param_groups
    one["lr"].fill_(0.0)
    one["tags"].append("b")
    assert (float(other["lr"]), other["tags"]) == (0.5, ["a"])


def test_groups_made_with_one_tensor_get_their_own_values(tmp_path):
    model = nn.Linear(3, 3)
    groups = [{"params": [model.weight], "lr": torch.tensor(0.1)}, {"params": [model.bias], "lr": torch.tensor(0.2)}]
    save(tmp_path / "c", model=model, optimizer=torch.optim.Adam(groups))
    again = torch.optim.Adam([{"params": [model.weight]}, {"params": [model.bias]}], lr=torch.tensor(0.7))
    assert again.param_groups[0]["lr"] is again.param_groups[1]["lr"]  # torch gives both the default's tensor
    load(tmp_path / "c", model=model, optimizer=again)
    assert [round(float(group["lr"]), 6) for group in again.param_groups] == [0.1, 0.2]


class Transposed(nn.Linear):
    """Its state dict shows the transposed weight, which its loading turns back."""

    def __init__(self):
        super().__init__(2, 3)
        self._register_state_dict_hook(lambda _, state, prefix, local: turn(state, prefix))
        self._register_load_state_dict_pre_hook(lambda state, prefix, *_: turn(state, prefix))


def turn(state, prefix):
    state[prefix + "weight"] = state[prefix + "weight"].t()


def test_a_view_in_the_state_dict_is_filled_and_turned_back(tmp_path):
    model, other = Transposed(), Transposed()
    save(tmp_path / "c", model=model)
    load(tmp_path / "c", model=other)
    assert torch.equal(other.weight, model.weight)


def test_a_module_that_loads_itself_of_other_tensors_is_refused(tmp_path):
    """As where a stage of ZeRO keeps parameters away, and the state dict shows this rank's parts of them."""

    class Away(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.kept = [torch.zeros(2, 2)]
            self._register_state_dict_hook(lambda _, state, prefix, local: state.update({"weight": self.kept[0]}))

    save(tmp_path / "c", model=nn.Linear(2, 2))
    model = Away()
    load(tmp_path / "c", model=model)  # of which no code of its own runs
    model.register_load_state_dict_pre_hook(lambda *_: None)
    model.kept[0].zero_()
    with pytest.raises(ValueError, match="'weight' in the state dict is another tensor than in the module, whose own"):
        load(tmp_path / "c", model=model)
    assert not model.kept[0].any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_elements_in_memory_are_refused_by_name(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for model, text in (
        (nn.LazyLinear(3), "'weight' is of a lazy module that has no shape yet; run a forward pass first"),
        ({"w": nested}, "'w' is a nested tensor; pass its values and its offsets, or pad it"),
        ({"w": torch.nested.nested_tensor([torch.ones(2)], layout=torch.strided)}, "'w' is a nested tensor"),
    ):
        with pytest.raises(ValueError, match=text):
            save(tmp_path / "c", model=model)
    save(tmp_path / "c", model=nn.Linear(2, 3))
    with pytest.raises(ValueError, match="'weight' is of a lazy module"):
        load(tmp_path / "c", model=nn.LazyLinear(3))


def test_a_key_that_is_no_text_is_refused(tmp_path):
    with pytest.raises(TypeError, match="model has the key 0, a int; use texts as names, such as '0'"):
        save(tmp_path / "c", model={0: torch.ones(1)})
