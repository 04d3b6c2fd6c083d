"""What transformers' own tensor parallelism computes, beside par-layers and one device; no times.

Gradients of small models in fp32, after one backward and after two before a step; what an optimizer and a norm say to
the parameters; families and sizes that are refused. Run as `python tools/bench/existing_models.py`; takes a minute, and
writes docs/benchmarks/existing_models.md and .json.
"""

import shutil
import tempfile
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _ranks import spawned
from _table import write
from torch import Tensor

from par_groups import ProcessGroups, Topology
from par_layers import parallelize, verify_plan

WORDS, ROWS, LENGTH = 96, 2, 8
TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "Gemma3": ("Gemma3ForCausalLM", {"head_dim": 8, "sliding_window": 4}),
    "Qwen3 with experts": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "GPT-2": ("GPT2LMHeadModel", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}


def main() -> None:
    """Computes everything, and writes a row for each thing."""
    rows: list[dict[str, str]] = [*spawned(2, rows_of_two), *spawned(4, rows_of_four)]
    note = (
        "Each number is an error of a gradient compared with one device: the largest absolute difference, divided by "
        "the largest absolute value of that gradient. The table shows the parameter with the largest error. fp32, "
        f"{ROWS} x {LENGTH} tokens, gloo. Each library shards the model by its own plan. For par-layers, the number is "
        f"the larger error of two runs, with and without sequence parallelism. transformers {transformers.__version__}."
    )
    write("existing_models", "Compared with Transformers' own tensor parallelism", rows, note)


def rows_of_two() -> list[dict[str, str]]:
    """What two ranks compute and refuse."""
    rows = [
        row(f"{family}: gradients after {backwards} backward{'s' * (backwards > 1)}", gradients, family, backwards)
        for family in ("Llama", "Qwen3", "Gemma3", "Qwen3 with experts")
        for backwards in (1, 2)
    ]
    rows.append(row("GPT-2: gradients", gradients, "GPT-2", 1))
    rows.append(row("Qwen3: parameters that are DTensors", dtensors))
    rows.append(row("Qwen3: a step of AdamW(fused=True)", stepped))
    rows.append(row("Qwen3: clip_grad_norm_ of torch", clipped))
    return rows


def rows_of_four() -> list[dict[str, str]]:
    """What four ranks do with fewer heads of keys and values."""
    return [row("Llama, 2 key and value heads on 4 ranks: gradients", gradients, "Llama", 1)]


def row(what: str, measure: Callable[..., str], *arguments: object) -> dict[str, str]:
    """What both do, or with which words they refuse it."""
    if dist.get_rank() == 0:
        print(what, flush=True)
    theirs, ours = said(measure, True, *arguments), said(measure, False, *arguments)
    return {"what": what, "transformers": theirs, "par-layers": ours}


def said(measure: Callable[..., str], *arguments: object) -> str:
    """What a measurement gives, or the beginning of its error."""
    try:
        return measure(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {textwrap.shorten(str(error).splitlines()[0], 90, placeholder=' ...')}"


def make(family: str) -> Any:
    """A model with drawn weights, the same on all ranks."""
    name, own = FAMILIES[family]
    kind = getattr(transformers, name)
    config = kind.config_class(**{**TEXT, **own})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = kind(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def batch() -> dict[str, Tensor]:
    """Tokens with their labels, the same on all ranks."""
    ids = torch.randint(2, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def backward(model: Any, number: int) -> None:
    """One of several backwards, each with other labels."""
    given = batch()
    model(input_ids=given["input_ids"], labels=given["labels"].roll(number, -1)).loss.backward()


def gradients(theirs: bool, family: str, backwards: int) -> str:
    """How far the farthest gradient is from one device's."""
    if not theirs:
        worst = max(
            max(verify_plan(lambda: make(family), groups(sequence), batch(), backwards=backwards).gradients.values())
            for sequence in (False, True)
        )
        return f"{worst:.0e}"
    whole, cut = make(family), cut_by_transformers(family)
    for number in range(backwards):
        backward(whole, number)
        backward(cut, number)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    least = max(each.abs().max().item() for each in expected.values()) / 1000  # as in `verify_plan`
    far = {}
    for name, parameter in cut.named_parameters():
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        scale = max(expected[name].abs().max().item(), least)
        far[name] = (gradient - expected[name]).abs().max().item() / scale
    name = max(far, key=far.__getitem__)
    return f"{far[name]:.0e}" if far[name] < 1e-4 else f"{far[name]:.2f}, of {name}"


def dtensors(theirs: bool) -> str:
    """How many parameters are DTensors."""
    parameters = list(cut(theirs).parameters())
    return f"{sum(hasattr(each, 'placements') for each in parameters)} of {len(parameters)}"


def stepped(theirs: bool) -> str:
    """A step of the optimizer of most."""
    model = cut(theirs)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    backward(model, 0)
    optimizer.step()
    return "works"


def clipped(theirs: bool) -> str:
    """Clipping by torch, which for parameters that are cut by par-layers is that of each rank's part."""
    model = cut(theirs)
    backward(model, 0)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return "works, over this rank's part; par-precision's is over all"


def cut(theirs: bool) -> Any:
    """A Qwen3 over all ranks."""
    return cut_by_transformers("Qwen3") if theirs else parallelize(make("Qwen3"), groups(False))


def groups(sequence: bool) -> ProcessGroups:
    """Groups with all ranks on the tensor axis, heads of keys and values copied where there are too few."""
    ranks = dist.get_world_size()
    copied = {"kv_heads": 2} if ranks > 2 else {}
    tensor = {"size": ranks, "mode": "1d", "sequence_parallel": sequence, **copied}
    return ProcessGroups(Topology.from_config({"tensor": tensor}, ranks))


def cut_by_transformers(family: str) -> Any:
    """A model as transformers cuts it, which it does while it loads one."""
    named = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(named)
    (folder,) = named
    if dist.get_rank() == 0:
        make(family).save_pretrained(folder)
    dist.barrier()
    over: Any = import_module("transformers.distributed")
    kind: Any = getattr(transformers, FAMILIES[family][0])
    try:
        distributed = over.DistributedConfig(tp_size=dist.get_world_size())
        model = kind.from_pretrained(folder, distributed_config=distributed, dtype=torch.float32)
        model.config._experts_implementation = "eager"
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
    return model.eval()


if __name__ == "__main__":
    main()
