"""Recurrent layers over a split sequence: the numbers of one process, and layers that cannot be split."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from par_groups import ProcessGroups, Topology
from par_layers import Context
from par_layers.context.existing.states import DocumentPart, StateCache, document_parts
from par_layers.context.existing.transformers import NAME, check
from par_layers.context.tokens import Tokens
from par_testing import count_collectives, keep_fp64

transformers = pytest.importorskip("transformers", minversion="5.23")
from .hybrids import DOCUMENTS, MODELS, SIZES, batch_of, loss_of_documents, made  # noqa: E402 - after the skip


def differences(name, mode, documents=DOCUMENTS, told=DOCUMENTS, *, recompute=False):
    """The largest differences of the loss and of each gradient from one process.

    Args:
        name: The family.
        mode: The mode of attention.
        documents: Documents of the reference.
        told: Documents that the context is told of.
        recompute: Whether to checkpoint the layers.
    """
    model, ids, world = made(name), batch_of(), dist.get_world_size()
    expected = loss_of_documents(model, ids, documents)
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with ProcessGroups(Topology.from_config({"sequence": {"size": world, "mode": mode}}, world)) as groups:
        context = Context(groups, block=4)
        context.transformers_(model)
        if recompute:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        mine, tokens = context.cut({"input_ids": ids, "labels": ids.clone()}, documents=told)
        loss = context.sum(model(**mine, par_tokens=tokens).loss)
        loss.backward()
    worst = {"loss": abs((loss - expected).item())}
    for key, parameter in model.named_parameters():
        if key in gradients:
            dist.all_reduce(parameter.grad)
            scale = max(1.0, gradients[key].abs().max().item())
            worst[key] = (parameter.grad / world - gradients[key]).abs().max().item() / scale
    return worst


def check_equal(name, mode, **options):
    with keep_fp64():
        worst = differences(name, mode, **options)
    assert max(worst.values()) < 1e-10, (name, mode, {key: value for key, value in worst.items() if value >= 1e-10})
    assert any("conv" in key or "A_log" in key or "qkv" in key for key in worst)


@pytest.mark.ranks(2, timeout=240)
def test_hybrids_over_two_ranks_equal_one_process():
    check_equal("Qwen3Next", "gather")
    check_equal("Qwen3Next", "ring", recompute=True)
    check_equal("Bamba", "ulysses")


@pytest.mark.ranks(1, timeout=120)
def test_context_of_one_rank_separates_packed_documents():
    check_equal("Qwen3Next", "gather")
    check_equal("Bamba", "gather")


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=240)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"Qwen3Next", "Bamba"}])
def test_more_hybrids_over_two_ranks_equal_one_process(name):
    check_equal(name, "gather")


@pytest.mark.ranks(4, timeout=240)
def test_hybrids_over_four_ranks_equal_one_process():
    check_equal("Qwen3Next", "gather")
    check_equal("Bamba", "gather", documents=[[24], [24]], told=[[24], [24]])


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=240)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in {"Qwen3Next", "Bamba"}])
def test_more_hybrids_over_four_ranks_equal_one_process(name):
    check_equal(name, "ring")


@pytest.mark.ranks(2, timeout=120)
def test_state_that_leaks_between_documents_is_not_equal():
    """The test above fails if a context is not told of the documents, so it would see a leak."""
    with keep_fp64():
        worst = differences("Qwen3Next", "gather", [[5, 19], [5, 19]], [[24], [24]])
    assert worst["loss"] > 1e-4
    assert worst["model.layers.0.linear_attn.conv1d.weight"] > 1e-4


@pytest.mark.ranks(2, timeout=120)
def test_messages_have_the_size_of_the_states_at_any_length():
    keys, values, width = 2 * 4, 4 * 6, 4
    numbers = {"Qwen3Next": 4 * 4 * 6 + (width - 1) * (2 * keys + values), "Bamba": 8 * 8 * 4 + 3 * (64 + 2 * 2 * 4)}
    with ProcessGroups(Topology.from_config({"sequence": {"size": 2, "mode": "gather"}}, 2)) as groups, keep_fp64():
        for name, number in numbers.items():
            model, context = made(name), Context(groups)
            assert sum(layer.numbers for layer in check(model)[0]) == number
            context.transformers_(model)
            header = 64 * 8  # once, with the first message
            for length in (24, 48):
                ids = batch_of(length)
                mine, tokens = context.cut({"input_ids": ids, "labels": ids.clone()})
                with count_collectives() as counted:
                    context.sum(model(**mine, par_tokens=tokens).loss).backward()
                first, second = (2 * number * 8 + header, 2 * number * 8) if groups.rank("sequence") == 0 else (0, 0)
                # Rank 0 sends the states of two rows, and rank 1 sends their gradients back.
                assert counted.bytes("send") == (first or 2 * number * 8), (name, length)
                assert counted.bytes("recv") == (second or 2 * number * 8 + header), (name, length)
                header = 0


def test_tokens_of_other_ranks_are_stretches():
    tokens = Tokens(12, 12, ((12,), (2, 1, 6, 3)), (((0, 4),), ((4, 8),), ((8, 12),)))
    assert document_parts(tokens, 0, 2) == [
        DocumentPart((0, 1), 0, 4, continues=False, goes_on=True),
        DocumentPart((1, 2), 3, 4, continues=False, goes_on=True),
        DocumentPart((1, 2), 0, 2, continues=False, goes_on=False),
        DocumentPart((1, 2), 2, 3, continues=False, goes_on=False),
    ]
    assert document_parts(tokens, 2, 2) == [
        DocumentPart((1, 2), 1, 4, continues=False, goes_on=False),
        DocumentPart((0, 1), 0, 4, continues=True, goes_on=False),
        DocumentPart((1, 2), 0, 1, continues=True, goes_on=False),
    ]
    padded = Tokens(7, 8, ((7,),), (((0, 4),), ((4, 8),)))
    assert document_parts(padded, 1, 3) == [
        DocumentPart((0, 3), 3, 4, continues=False, goes_on=False),
        DocumentPart((0, 3), 0, 3, continues=True, goes_on=False),
    ]
    with pytest.raises(ValueError, match="each rank must hold consecutive tokens; use split='contiguous'"):
        document_parts(Tokens(8, 8, ((8,),), (((0, 2), (6, 8)), ((2, 6),))), 0, 1)


def test_messages_have_one_order_at_both_ends():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        rows = []
        for _ in range(4):
            cuts = torch.randperm(23, generator=generator)[: int(torch.randint(0, 6, (), generator=generator))] + 1
            edges = [0, *sorted(cuts.tolist()), 24]
            rows.append(tuple(b - a for a, b in pairwise(edges)))
        tokens = Tokens(24, 24, tuple(rows), tuple(((r * 6, r * 6 + 6),) for r in range(4)))
        for rank in range(3):
            sent = [each.rows for each in document_parts(tokens, rank, 4) if each.goes_on]
            assert sent == [each.rows for each in document_parts(tokens, rank + 1, 4) if each.continues]


class Shift(nn.Module):
    """A mix of each token with the one before, under a name that tells nothing."""

    def forward(self, x):
        return x + functional.pad(x, (0, 0, 1, 0))[:, :-1]


class Dilated(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Conv1d(32, 32, 3, groups=32, dilation=20)

    def forward(self, x):
        return self.filter(functional.pad(x.transpose(1, 2), (40, 0))).transpose(1, 2)


class Memory(nn.Module):
    """A recurrence that takes no cache."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.full((32,), -1.0))

    def forward(self, x):
        states, state = [], torch.zeros_like(x[:, 0])
        for token in x.unbind(1):
            state = state * self.decay.sigmoid() + token
            states.append(state)
        return torch.stack(states, 1)


class Ahead(nn.Module):
    """Reads the next token, as no recurrence does."""

    def forward(self, x):
        return x + functional.pad(x, (0, 0, 0, 1))[:, 1:]


class Chosen(nn.Module):
    """Scales the tokens with the largest feature, as routers do that choose tokens: no number flows, a choice does."""

    def forward(self, x):
        return x * (1 + (x[..., 0] >= x[..., 0].nan_to_num(1e9).quantile(0.9, 1, keepdim=True))[..., None])


class Forgetful(nn.Module):
    """Takes a cache, and continues from another state than its own."""

    def forward(self, x, memory: "transformers.Cache | None" = None):
        before = None if memory is None else memory.get_recurrent_state(0)
        if memory is not None:
            memory.update_recurrent_state(x.sum(1))
        return x.cumsum(1) if before is None else 2 * before[:, None] + x.cumsum(1)


class Gate(nn.Module):
    """An ordinary layer of one's own: each token by itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x):
        return x * self.gate(self.norm(x)).sigmoid() + x.flip(-1).roll(3, -1)


def llama(mixer):
    """A Llama whose second MLP comes after another layer."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.model.layers[1].mlp = nn.Sequential(mixer, model.model.layers[1].mlp)
    return model


@pytest.mark.parametrize("kind", [Shift, Dilated, Memory, Ahead, Chosen])
def test_layers_that_read_neighbours_are_refused_under_any_name(kind):
    model = llama(kind())
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=rf"model\.layers\.1\.mlp\.0 is {kind.__name__}, which reads other tokens"):
        Context(None).transformers_(model)
    assert model.config._attn_implementation == before
    assert not hasattr(model, NAME)


def test_a_layer_that_continues_wrongly_is_refused():
    with pytest.raises(ValueError, match=r"Forgetful, .* computes other numbers when it continues from the state"):
        check(llama(Forgetful()))


def test_a_shift_behind_a_recurrent_layer_is_seen():
    """A recurrent layer alone would be accepted. What it hides is looked for again without it."""
    model = made("Lfm2")
    model.model.layers[0].feed_forward = nn.Sequential(Shift(), model.model.layers[0].feed_forward)
    with pytest.raises(ValueError, match=r"layers\.0\.feed_forward\.0 is Shift"):
        check(model)


@pytest.mark.parametrize("kind", [Gate, nn.Identity])
def test_layers_that_compute_each_token_are_accepted(kind):
    assert check(llama(kind())) == ([], [])


def test_the_trial_changes_nothing_and_takes_models_without_numbers():
    model = llama(Gate())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    drawn, hooks = torch.random.get_rng_state(), [len(module._forward_hooks) for module in model.modules()]
    check(model)
    assert all(value.equal(before[key]) for key, value in model.state_dict().items())
    assert torch.random.get_rng_state().equal(drawn)
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    with torch.device("meta"):
        of_meta = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**MODELS["Lfm2"]()))
    assert check(of_meta) == check(made("Lfm2"))


def test_parts_that_text_does_not_reach_raise_when_they_run():
    model = llama(nn.Identity())
    model.model.tower = nn.Linear(2, 2)
    context = Context(None)
    context.transformers_(model)
    mine, tokens = context.cut({"input_ids": batch_of(), "labels": batch_of()})
    model(**mine, par_tokens=tokens).loss.backward()
    with pytest.raises(ValueError, match=r"model\.tower \(Linear\) does not run for text alone"):
        model.model.tower(torch.ones(1, 2))


def test_a_model_that_fails_is_refused():
    class Broken(nn.Module):
        def forward(self, x):
            raise KeyError(x.shape)

    with pytest.raises(ValueError, match=r"LlamaForCausalLM fails on 73 tokens of text \(KeyError"):
        check(llama(Broken()))

    class Infinite(nn.Module):
        def forward(self, x):
            return x / 0

    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.0 computes numbers that are not finite"):
        check(llama(Infinite()))


def test_a_split_that_a_recurrent_layer_cannot_take_is_refused():
    for split in ("zigzag", "balanced"):
        with pytest.raises(ValueError, match=rf"split='{split}': model\.layers\.0\.conv passes its state"):
            Context(None, split=split).transformers_(made("Lfm2"))
    context, model = Context(None), made("Lfm2")
    found = check(model)
    context.transformers_(model)
    assert check(model) == found
    assert context.how == "contiguous"
    ids = batch_of()
    mine, _ = context.cut({"input_ids": ids, "labels": ids})
    with pytest.raises(ValueError, match=r"needs the split of its tokens; call model\(\*\*batch, par_tokens=tokens\)"):
        model.model.layers[0].conv(torch.ones(2, 24, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"got 2 rows of 24 tokens, but par_tokens split 1 rows into 12 tokens a rank"):
        model(**mine, par_tokens=context.tokens(12))
    single = Tokens(2, 2, ((2,),), (((0, 1),), ((1, 2),)))
    with pytest.raises(ValueError, match="needs 2 tokens a rank; it got 1"):
        model(input_ids=ids[:, :1], par_tokens=single)


def test_a_state_of_integers_is_refused():
    from par_layers.context.existing.handover import StateLink

    x = torch.ones(1, 2, 3)
    with pytest.raises(ValueError, match=r"a recurrent layer has a state of torch\.int64; a state that ranks pass"):
        StateLink("", 0).send(x, x, {("recurrent", 0): torch.ones(1, 2, dtype=torch.int64)}, with_gradient=False)


def test_a_cache_keeps_what_a_convolution_reads():
    first = StateCache({})
    assert not first.has_previous_state()
    assert first.get_conv_state(0) is None
    x = torch.arange(10.0).view(1, 1, 10)
    assert first.update_conv_state(x[..., :2], 0, conv_kernel_size=4).equal(x[..., :2])
    states = first.states()
    assert states["conv", 0].tolist() == [[[0.0, 0.0, 1.0]]]
    second = StateCache(states)
    assert second.update_conv_state(x[..., 2:3], 0, conv_kernel_size=4).tolist() == [[[0.0, 0.0, 1.0, 2.0]]]
    assert second.states()["conv", 0].tolist() == [[[0.0, 1.0, 2.0]]]
