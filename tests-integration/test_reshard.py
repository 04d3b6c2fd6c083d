"""State that moves in memory between pipelines, and between packed experts and the tensors of files."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import State, reshard
from par_pipeline import build_stage, schedule

transformers = pytest.importorskip("transformers")
LlamaConfig, LlamaForCausalLM = transformers.LlamaConfig, transformers.LlamaForCausalLM  # loaded once for all ranks
MixtralConfig, MixtralForCausalLM = transformers.MixtralConfig, transformers.MixtralForCausalLM

SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}


def llama(seed):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS))


def tokens(step, rows=4):
    return torch.randint(29, (rows, 9), generator=torch.Generator().manual_seed(step))


def steps(model, optimizer, first, count=2):
    """Train on every rank alike; return the losses."""
    losses = []
    for step in range(first, first + count):
        rows = tokens(step)
        optimizer.zero_grad()
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def staged(ranks):
    """The stage of this rank in a pipeline of the first ranks, with its optimizer; an empty state on other ranks."""
    if dist.get_rank() >= ranks:
        return State()
    if ranks == 1:
        model = llama(7)
    else:
        [model] = build_stage(llama(7), schedule("1f1b", ranks, 4), dist.get_rank())
    return State(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
def test_reshard_from_one_to_two_to_four_stages_and_back_keeps_every_bit():
    model = llama(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 0)
    state = State(model=model, optimizer=optimizer) if dist.get_rank() == 0 else State()
    for ranks in (2, 4, 2, 1):
        target = staged(ranks)
        moved = reshard(state, target, verify=True)
        assert bool(moved.sent) == (state.model is not None and moved.local < sum_of_bytes(state))
        state = target
    if dist.get_rank() == 0:
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, state.model.get_parameter(name)), name
        assert steps(state.model, state.optimizer, 2) == steps(model, optimizer, 2)


def sum_of_bytes(state):
    """The bytes of parameters, moments and counts of steps."""
    return sum(3 * each.nbytes + 4 for each in state.model.parameters())


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120)
def test_reshard_of_stacked_experts_to_checkpoint_names_and_back():
    rank = dist.get_rank()
    torch.manual_seed(0)
    config = MixtralConfig(**{**SIZES, "num_hidden_layers": 2}, **HEADS, num_local_experts=4)
    packed, again = MixtralForCausalLM(config), MixtralForCausalLM(config)
    flat = {}  # names and shapes of the files: each expert has tensors of its own
    parts = {"gate_up_proj": {"w1": (24, 16), "w3": (24, 16)}, "down_proj": {"w2": (16, 24)}}
    for name, tensor in packed.state_dict().items():
        layer, is_expert, part = name.partition("mlp.experts.")
        for expert in range(4 if is_expert else 0):
            for key, shape in parts[part].items():
                flat[f"{layer}block_sparse_moe.experts.{expert}.{key}.weight"] = torch.zeros(shape)
        if not is_expert:
            flat[name.replace("mlp.gate", "block_sparse_moe.gate")] = torch.zeros_like(tensor)
    # A trainer has the packed model on rank 0; an engine on rank 3 has the tensors of the files.
    reshard(State(model=packed) if rank == 0 else State(), State(model=flat) if rank == 3 else State(), verify=True)
    if rank == 3:
        first = packed.model.layers[1].mlp.experts
        name = "model.layers.1.block_sparse_moe.experts.2"
        assert torch.equal(flat[f"{name}.w3.weight"], first.gate_up_proj[2, 24:])
        assert torch.equal(flat[f"{name}.w2.weight"], first.down_proj[2])
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    reshard(State(model=flat) if rank == 3 else State(), State(model=again) if rank == 1 else State(), verify=True)
    if rank == 1:
        for name, parameter in packed.named_parameters():
            assert torch.equal(parameter, again.get_parameter(name)), name


def test_table_of_cases_names_tests_that_exist():
    root = Path(__file__).parents[1]
    named = re.findall(r"`([\w/-]+\.py): (test_\w+)`", (Path(__file__).parent / "README.md").read_text())
    assert len(named) > 40
    texts = {path: (root / path).read_text() for path, _ in named}
    missing = [name for path, name in named if not re.search(rf"^def {name}\(", texts[path], re.MULTILINE)]
    assert not missing
