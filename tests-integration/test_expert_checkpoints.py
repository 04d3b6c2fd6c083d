"""Experts cut over ranks: saved under one expert parallelism, loaded under another, and opened by transformers.

The models are transformers' own, with this rank's part in the place of each parameter, and the record of it: experts
dealt out over EP ranks, their features over ETP; over the copies that remain ZeRO cuts as par-zero does.
"""

import copy
import functools
import math
import os

import pytest
import torch
import torch.distributed as dist

import par_checkpoint
from par_groups import (
    Box,
    Segment,
    Segments,
    Sharding,
    cut,
    segments_of,
    set_segments,
    set_sharding,
    sharding_of,
    whole,
)
from par_testing import for_each, storm
from par_train import Strategy

load_file = pytest.importorskip("safetensors.torch").load_file
transformers = pytest.importorskip("transformers", minversion="5.4")

WORLD = 4
TEXT = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
}
SMALL_EXPERTS = {"moe_intermediate_size": 6, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
FAMILIES = {  # transformers loads the classes here, once for all ranks
    "mixtral": (transformers.MixtralForCausalLM, {**TEXT, "num_local_experts": 8}),
    "qwen3-moe": (transformers.Qwen3MoeForCausalLM, {**TEXT, **SMALL_EXPERTS, "num_experts": 8}),
    "deepseek-v3": (transformers.DeepseekV3ForCausalLM, {**TEXT, **SMALL_EXPERTS, **LATENT, **GROUPS}),
    "gpt-oss": (transformers.GptOssForCausalLM, {**TEXT, "num_local_experts": 8}),
}
FEATURES = (
    {"gate_up_proj": (1, 2), "down_proj": (2, 1)},
    {"gate_up_proj": (2, 1), "gate_up_proj_bias": (1, 1), "down_proj": (1, 1)},
)
"""The dim of an expert's features, which ETP cuts, and in how many runs: of gpt-oss, gates and ups lie in turn."""

HEADERS = 2**16
"""Bytes that are read of a file beside its tensors, with room."""

CUTS = [(ep, etp, zero) for ep, etp in ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)) for zero in (1, 3)]


def make(family, seed=0):
    return copy.deepcopy(_made(family, seed))


@functools.cache
def _made(family, seed):
    torch.manual_seed(seed)
    kind, settings = FAMILIES[family]
    model = kind(kind.config_class(**settings))
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor)  # no two tensors are alike
    return model


def slot(tensor, number):
    """What an optimizer that has seen the whole parameter has in a slot."""
    return (tensor.detach() + number).square()


def part_of(name, shape, family, ep, etp):
    """This rank's experts and features of one parameter, and the ranks that hold the same."""
    rank = dist.get_rank()
    if ".experts." not in name:
        return whole(shape, range(WORLD))
    expert, feature = rank // etp % ep, rank % etp
    copies = tuple(other for other in range(WORLD) if (other // etp % ep, other % etp) == (expert, feature))
    dim, runs = FEATURES[family == "gpt-oss"].get(name.rpartition(".")[2], (0, 1)) if etp > 1 else (0, 1)
    sizes = [shape[0] // ep, *shape[1:]]
    sizes[dim] //= etp if dim else 1
    stride = tuple(math.prod(sizes[d + 1 :]) for d in range(len(shape)))
    boxes = []
    for run in range(runs):
        start, size = [sizes[0] * expert, *(0 for _ in shape[1:])], list(sizes)
        if dim:
            size[dim] //= runs
            start[dim] = shape[dim] // runs * run + size[dim] * feature
        boxes.append(Box(tuple(start), tuple(size), size[dim] * run * stride[dim], stride, copies))
    return Sharding(tuple(shape), tuple(boxes))


def taken(tensor, sharding, numel):
    """The boxes of a whole tensor, in a flat one."""
    local = torch.full((numel,), torch.nan)
    for box in sharding.boxes:
        box.of(local).copy_(tensor[box.slices])
    return local


class Rank:
    """A model and an optimizer of which this rank has a part, filled from whole ones of a seed.

    Args:
        family: The family of the model.
        ep: Ranks over which experts are dealt out.
        etp: Ranks over which the features of each expert are cut.
        zero: 1: each of the copies has a part of the slots; 3: of the parameters too.
        seed: Of the whole model.
    """

    def __init__(self, family, ep, etp, zero, seed=0):
        whole_model = self.model = make(family, seed)
        self.slots = {"exp_avg": {}, "exp_avg_sq": {}}
        flats, segments = [], []
        for name, parameter in whole_model.named_parameters():
            values = parameter.detach().clone()
            sharding = part_of(name, values.shape, family, ep, etp)
            numel = sharding.local_numel
            local = taken(values, sharding, numel)
            copies = sharding.boxes[0].copies
            place, length = copies.index(dist.get_rank()), -(-numel // len(copies))
            begin, end = min(place * length, numel), min((place + 1) * length, numel)
            mine = cut(sharding, begin, end, holders=(dist.get_rank(),))
            if zero == 3:
                parameter.data = local[begin:end].clone()
                set_sharding(parameter, mine)
            else:
                parameter.data = local
                set_sharding(parameter, sharding)
            offset = sum(flat.numel() for flat in flats)
            segments.append(Segment(name, cut(sharding, begin, end, offset=offset, holders=(dist.get_rank(),))))
            flats.append(local[begin:end])
            for number, of_slot in enumerate(self.slots.values()):
                of_slot[name] = slot(values, number)
        self.flat = torch.cat(flats)
        set_segments(self.flat, Segments(segments))
        self.optimizer = torch.optim.AdamW([self.flat])
        state = {"step": torch.tensor(3.0 + seed)}
        for key, of_slot in self.slots.items():
            value = torch.zeros_like(self.flat)
            for name, box, view in segments_of(self.flat).views(value):
                view.copy_(of_slot[name][box.slices])
            state[key] = value
        self.optimizer.state[self.flat] = state

    def save(self, path):
        par_checkpoint.save(
            path, model=self.model, optimizer=self.optimizer, format=par_checkpoint.Format(config=self.model.config)
        )

    def load(self, path):
        par_checkpoint.load(path, model=self.model, optimizer=self.optimizer)

    def check(self, family):
        """That this rank has its part of the first whole model, and of the slots beside it, to the last bit."""
        expected, mine = _made(family, 0), self.model.state_dict(keep_vars=True)
        for name, tensor in expected.state_dict().items():
            own = mine[name]
            for box in sharding_of(own).boxes:
                assert torch.equal(box.of(own.detach()), tensor[box.slices]), name
        state = self.optimizer.state[self.flat]
        assert state["step"].item() == 3.0
        for number, key in enumerate(self.slots):
            for name, box, view in segments_of(self.flat).views(state[key]):
                assert torch.equal(view, slot(expected.get_parameter(name), number)[box.slices]), (name, key)


def assert_opens(path, family):
    """That transformers reads what there is, neither more nor less, and the model's bits come out."""
    model, info = FAMILIES[family][0].from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info
    for name, tensor in _made(family, 0).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def assert_same_files(path, other):
    """That two folders have the same weights under the same names."""
    mine, others = load_file(path / "model.safetensors"), load_file(other / "model.safetensors")
    assert mine.keys() == others.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, others[name]), name


@for_each(family=FAMILIES)
@pytest.mark.parametrize("pairs", ["a ring", pytest.param("all", marks=pytest.mark.storm)])
@pytest.mark.ranks(WORLD, timeout=240)
def test_any_cut_of_experts_goes_on_from_any_other(family, pairs, tmp_path):
    """Optimizer slots too. By default a family has two or three sources, and one target of each."""
    turn = list(FAMILIES).index(family)
    numbers, distances = range(turn, len(CUTS), 4), [1 + 2 * turn]
    if pairs == "all":
        numbers, distances = range(len(CUTS)), range(len(CUTS))
    for number in numbers:
        path = tmp_path / family / str(number)
        Rank(family, *CUTS[number]).save(path)
        if dist.get_rank() == number % WORLD:
            if number == numbers[0]:
                assert_opens(path, family)
            assert_same_files(path, tmp_path / family / str(numbers[0]))
        for distance in distances:
            other = Rank(family, *CUTS[(number + distance) % len(CUTS)], seed=1)
            other.load(path)
            other.check(family)


@pytest.mark.ranks(WORLD)
@for_each(family=[storm("mixtral"), "gpt-oss"])
def test_a_rank_reads_its_own_experts_alone(family, tmp_path):
    """Of what transformers saved, expert by expert or packed; ranks share a machine, so each reads what is whole."""
    kind, settings = FAMILIES[family]
    settings = {**settings, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}

    def large(seed):
        torch.manual_seed(seed)
        return kind(kind.config_class(**settings))

    expected = large(0)
    if dist.get_rank() == 0:
        expected.save_pretrained(tmp_path / family)
    dist.barrier()
    model, own, counted = large(1), 0, []
    for name, parameter in model.named_parameters():
        sharding = part_of(name, parameter.shape, family, 4, 1)
        own += sharding.local_numel * parameter.element_size()
        parameter.data = parameter.data[sharding.boxes[0].slices].clone()
        set_sharding(parameter, sharding)
    original = os.preadv

    def preadv(file, views, offset, *flags):
        counted.append(original(file, views, offset, *flags))
        return counted[-1]

    os.preadv = preadv
    try:
        par_checkpoint.load(tmp_path / family, model=model)
    finally:
        os.preadv = original
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)[sharding_of(parameter).boxes[0].slices]), name
    everything = sum(tensor.nbytes for tensor in expected.state_dict().values())
    assert own < 0.35 * everything
    assert own <= sum(counted) <= own + HEADERS


def own(strategy, experts):
    layers = strategy.layers
    return torch.nn.Sequential(layers.LayerNorm(16), layers.MoE(16, 12, experts, 2))


def theirs(strategy, experts):
    del strategy
    torch.manual_seed(0)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**TEXT, num_local_experts=experts))


@pytest.mark.ranks(2)
@for_each(case=((own, 8), (theirs, 2)))
def test_another_number_of_experts_is_one_error_on_every_rank(tmp_path, case):
    """The router's shape comes first, and says why weights of experts are missing, or are too many."""
    make, other = case
    path = tmp_path / make.__name__
    for experts in (4, other):
        with Strategy(parallel={"expert": 2}, zero=1) as strategy:
            model = make(strategy, experts)
            model, _ = strategy.initialize(model, torch.optim.AdamW(model.parameters()))
            if experts == 4:
                strategy.save(model, path)
                continue
            before = [parameter.detach().clone() for parameter in model.parameters()]
            words = rf"does not fit; nothing was changed.*\n  '\S*gate.weight' is .*\(4, 16\) in .*\({experts}, 16\) in"
            with pytest.raises(par_checkpoint.CheckpointError, match=words):
                strategy.load(model, path)
            with pytest.raises(par_checkpoint.CheckpointError, match=words):
                par_checkpoint.load(path, model=model)
            for parameter, old in zip(model.parameters(), before, strict=True):
                assert torch.equal(parameter, old)
