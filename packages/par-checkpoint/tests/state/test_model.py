"""Tensors of a model as they lie in memory."""

import copy

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import CheckpointError, Format, load, save
from par_checkpoint.state.model import rename


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, as quantised ones are."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(args[0].inner) if function is torch.ops.aten.detach.default else NotImplemented


def strange():
    """What is refused, by what is said of it."""
    numbers = torch.tensor([1 + 1j, 2 - 1j])
    return {
        "layout torch.sparse_coo": torch.eye(3).to_sparse(),
        "conjugated or negated lazily": numbers.conj(),
        "negated lazily": numbers.conj().imag,
        "a Wrapper, which keeps its data in other tensors": Wrapper(torch.ones(3)),
    }


@pytest.mark.cpu(reason="storage of a sparse tensor")
@pytest.mark.ranks(2)
def test_what_does_not_lie_in_memory_is_refused_by_name_on_every_rank(tmp_path):
    rank = dist.get_rank()
    for words, tensor in strange().items():
        with pytest.raises(ValueError, match=f"'odd' .*{words}"):
            save(tmp_path / "c", model={"odd": tensor} if rank else {"even": torch.ones(2)})
    assert not list(tmp_path.iterdir())
    save(tmp_path / "c", model={"odd": torch.ones(3)})
    with pytest.raises(ValueError, match=r"'odd' .*other tensors"):
        load(tmp_path / "c", model={"odd": Wrapper(torch.ones(3)) if rank else torch.zeros(3)})


def test_slots_of_an_optimizer_are_looked_at_too(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([("p", parameter)], lr=0.1)
    optimizer.state[parameter]["moment"] = Wrapper(torch.ones(3))
    with pytest.raises(ValueError, match=r"'p\.moment' is a Wrapper"):
        save(tmp_path / "c", optimizer=optimizer)


def test_an_expanded_tensor_is_saved_and_not_filled(tmp_path):
    rows = torch.arange(4.0).expand(3, 4)
    save(tmp_path / "c", model={"rows": rows, "row": rows[:1]})
    other = {"rows": torch.zeros(4).expand(3, 4), "row": torch.zeros(4).expand(1, 4)}
    with pytest.raises(ValueError, match="'rows' in the target has elements that share memory"):
        load(tmp_path / "c", model=other)
    assert not other["row"].any()
    other["rows"] = other["rows"].contiguous()
    load(tmp_path / "c", model=other)
    assert torch.equal(other["rows"], rows)


class Copying(torch.nn.Linear):
    """A hook of its state dict makes copies."""

    def __init__(self):
        super().__init__(3, 3)
        self._register_state_dict_hook(lambda _, state, prefix, local: {k: v.clone() for k, v in state.items()})


def test_a_module_whose_state_dict_has_copies_is_saved_and_not_filled(tmp_path):
    module = Copying()
    save(tmp_path / "c", model=module)
    before = module.weight.clone()
    with pytest.raises(ValueError, match="'weight' and 1 more in the module's state dict are copies, made by a hook"):
        load(tmp_path / "c", model=module)
    assert torch.equal(module.weight, before)
    plain = {"weight": torch.zeros(3, 3), "bias": torch.zeros(3)}
    load(tmp_path / "c", model=plain)
    assert torch.equal(plain["weight"], before)


class Noting(torch.nn.Linear):
    """Has extra state."""

    note = "none"

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state


def test_extra_state_is_missing_or_unexpected_like_any_other(tmp_path):
    save(tmp_path / "noting", model=torch.nn.Sequential(Noting(2, 2)))
    save(tmp_path / "plain", model=torch.nn.Sequential(torch.nn.Linear(2, 2)))
    for path, model, words in (
        ("noting", torch.nn.Sequential(torch.nn.Linear(2, 2)), r"not wanted by anybody: 0\._extra_state"),
        ("plain", torch.nn.Sequential(Noting(2, 2)), r"missing in the checkpoint: 0\._extra_state"),
    ):
        before = model[0].weight.clone()
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path / path, model=model)
        assert torch.equal(model[0].weight, before)
        report = load(tmp_path / path, model=model, strict=False)
        assert (*report.missing, *report.unexpected) == ("0._extra_state",)
        assert not torch.equal(model[0].weight, before)


def test_extra_state_goes_into_a_state_dict_that_has_it_and_is_left_away_where_tensors_alone_are_loaded(tmp_path):
    model = Noting(2, 2)
    model.note = "saved"
    save(tmp_path / "c", model=model)
    state = Noting(2, 2).state_dict()
    assert load(tmp_path / "c", model=state).unexpected == ()
    assert state["_extra_state"] == "saved"
    tensors = {name: torch.zeros_like(each) for name, each in state.items() if name != "_extra_state"}
    assert load(tmp_path / "c", model=tensors).unexpected == ()
    assert torch.equal(tensors["weight"], model.weight)


def test_extra_state_is_not_asked_for_where_the_optimizer_alone_is_loaded(tmp_path):
    model = torch.nn.Sequential(Noting(2, 2))
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    assert load(tmp_path / "c", optimizer=optimizer).unexpected == ()
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_buffer_without_memory_that_is_not_saved_does_not_matter(tmp_path):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(3).to_sparse(), persistent=False)
    save(tmp_path / "c", model=model)
    other = copy.deepcopy(model)
    torch.nn.init.zeros_(other.weight)
    load(tmp_path / "c", model=other)
    assert torch.equal(other.weight, model.weight)


def test_a_tensor_whose_name_only_ends_like_extra_state_is_a_tensor(tmp_path):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("router_extra_state", torch.full((3,), 7.0))
    module.my_extra_state = torch.nn.Parameter(torch.ones(2))
    for style in ("huggingface", "torch"):
        save(tmp_path / style, model=module, format=Format(style=style))
        other = copy.deepcopy(module)
        other.router_extra_state.zero_()
        load(tmp_path / style, model=other)
        assert torch.equal(other.router_extra_state, module.router_extra_state)


@pytest.mark.ranks(2)
def test_one_name_for_different_tensors_of_a_mapping_is_refused_on_every_rank(tmp_path):
    with pytest.raises(ValueError, match=r"'weight' and 0 more differ between ranks 0 and 1.* pass the module"):
        save(tmp_path / "c", model={"weight": torch.full((5,), float(dist.get_rank()))})
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks(2)
def test_of_the_statistics_of_batch_norm_in_a_state_dict_the_first_rank_s_are_saved(tmp_path):
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(1100) for _ in range(3)))  # in blocks of both ranks
    for each in model.buffers():
        each.fill_(dist.get_rank())
    save(tmp_path / "c", model=model.state_dict())
    load(tmp_path / "c", model=model)
    assert not any(each.any() for each in model.buffers())


KEYS = ["embed.weight", "layers.0.w", "layers.1.w"]


def test_without_names_nothing_changes():
    assert rename(None, KEYS) == dict(zip(KEYS, KEYS, strict=True))


def test_a_mapping_leaves_other_names_as_they_are():
    renamed = rename({"embed.weight": "wte"}, KEYS)
    assert renamed == {"embed.weight": "wte", "layers.0.w": "layers.0.w", "layers.1.w": "layers.1.w"}


def test_a_mapping_may_swap_two_names():
    assert rename({"a": "b", "b": "a"}, ["a", "b"]) == {"a": "b", "b": "a"}


def test_expressions_apply_one_after_the_other():
    renamed = rename([(r"^layers\.(\d+)", r"h.\1"), (r"\.w$", ".weight"), (r"^h", "model.h")], KEYS)
    assert list(renamed.values()) == ["embed.weight", "model.h.0.weight", "model.h.1.weight"]


def test_a_function_names_every_tensor():
    assert list(rename(str.upper, KEYS).values()) == ["EMBED.WEIGHT", "LAYERS.0.W", "LAYERS.1.W"]


@pytest.mark.parametrize("names", [{"a": "c", "b": "c"}, {"a": "b"}, [("a|b", "c")], lambda key: "c"])
def test_two_tensors_cannot_share_a_name(names):
    with pytest.raises(ValueError, match=r"maps both 'a' and 'b' to '[bc]'; each tensor needs"):
        rename(names, ["a", "b"])


def test_a_mapping_may_name_tensors_of_other_ranks():
    renamed = rename({"embed.weight": "wte", "head.weight": "lm_head"}, KEYS)
    assert renamed == {"embed.weight": "wte", "layers.0.w": "layers.0.w", "layers.1.w": "layers.1.w"}


@pytest.mark.parametrize("pair", [("(", "x"), ("e", r"\1")])
def test_a_broken_expression_is_shown(pair):
    with pytest.raises(ValueError, match="in names is not a regular expression and its replacement"):
        rename([pair], KEYS)


@pytest.mark.parametrize("names", [7, "ab", [("a",)], [("a", 1)], ["ab"], {"embed.weight": 1}, lambda key: None])
def test_what_is_no_renaming_is_refused(names):
    with pytest.raises(TypeError, match="names"):
        rename(names, KEYS)
