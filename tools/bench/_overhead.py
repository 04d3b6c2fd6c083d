"""CPU seconds of a Llama's step on the fake backend, where nothing is sent: what calls and dispatch cost.

The same Llama twice: as transformers has it, cut in place; and written against a layer set. Each also uncut, at the
size of a rank's part, which is what its own code costs.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _llama import Case, Llama
from _table import Section
from _turns import quartile, ratio, shuffled
from torch import Tensor, nn
from tqdm import tqdm

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set, parallelize

RANKS, WARM_UPS = 2, 3
ADOPTED, WRITTEN = "transformers'", "a layer set's"
CUTS = {"the part's size, not cut": None, "cut": False, "cut, sequence parallel": True}


def overhead(cases: Mapping[str, Case]) -> Section:
    """Measures both Llamas in every case, and gives the table."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    rows = []
    for name, case in cases.items():
        check_alike(case)
        taken = measured(name, case)
        for (kind, cut), seconds in taken.items():
            rows.append(
                {
                    "model": name,
                    "Llama": f"{kind}, {cut}",
                    "median CPU ms": f"{1000 * statistics.median(seconds):.1f}",
                    "quartiles ms": f"{1000 * quartile(seconds, 1):.1f} to {1000 * quartile(seconds, 3):.1f}",
                    "to a layer set's": f"{ratio(seconds, taken[WRITTEN, cut]):.2f}",
                    "to the part's size": f"{ratio(seconds, taken[kind, next(iter(CUTS))]):.2f}",
                }
            )
    dist.destroy_process_group()
    described = "; ".join(f"{name}: {case.described()}, {case.turns} turns" for name, case in cases.items())
    note = (
        f"{described}. Forward, loss and backward, fp32, as one of {RANKS} ranks on the fake backend, which sends "
        f"nothing, one thread. A layer set's Llama has q, k and v in one product, gate and up in another, and torch's "
        f"fused norm; before it is measured its loss is found equal to that of transformers'. The part's size: the "
        f"uncut model with the heads, the MLP and the vocabulary of one rank, which is what the code around the cut "
        f"costs by itself."
    )
    return Section(title="CPU time of a step", note=note, rows=rows)


def measured(name: str, case: Case) -> dict[tuple[str, str], list[float]]:
    """CPU seconds of every turn, by the model and how it is cut."""
    ids = torch.randint(case.words // RANKS, (case.rows, case.length), generator=torch.Generator().manual_seed(1))
    steps: dict[tuple[str, str], tuple[nn.Module, Callable[[], Tensor]]] = {}
    for kind in (ADOPTED, WRITTEN):
        for cut, sequence in CUTS.items():
            model, loss = made(kind, case, sequence)
            steps[kind, cut] = model, partial(loss, ids)
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in steps}
    for turn in tqdm(range(-WARM_UPS, case.turns), desc=f"{name}, CPU", unit="turn"):
        for key in shuffled(list(steps), turn):
            model, compute = steps[key]
            begin = time.process_time()
            compute().backward()
            seconds = time.process_time() - begin
            model.zero_grad()
            if turn >= 0:
                taken[key].append(seconds)
    return taken


def made(kind: str, case: Case, sequence: bool | None) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """A model in training mode, and its loss as a function of ids.

    Args:
        kind: Whose it is.
        case: Its sizes.
        sequence: Whether it is cut along the sequence, too; None: it is not cut, and has the size of a rank's part.
    """
    groups = None
    if sequence is not None:
        tensor = {"size": RANKS, "mode": "1d", "sequence_parallel": sequence}
        groups = ProcessGroups(Topology.from_config({"tensor": tensor}, RANKS))
    share = RANKS if groups is None else 1
    if kind == WRITTEN:
        written = Llama(layer_set("auto" if groups else None, groups), case, share)
        initialize(written, seed=0)
        return written, written.loss
    model: Any = transformers.LlamaForCausalLM(case.config(share)).train()
    if groups is not None:
        parallelize(model, groups)
    return model, lambda ids: model(input_ids=ids, labels=ids).loss


def check_alike(case: Case) -> None:
    """Raises RuntimeError unless both Llamas, whole and with the same weights, have the same loss."""
    theirs: Any = transformers.LlamaForCausalLM(case.config())
    ours: Any = Llama(layer_set(None), case)
    initialize(ours, seed=0)
    with torch.no_grad():
        ours.tokens.weight.copy_(theirs.model.embed_tokens.weight)
        ours.classifier.weight.copy_(theirs.lm_head.weight)
        for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
            block.query_key_value.weight.copy_(torch.cat(parts))
            block.output.weight.copy_(attention.o_proj.weight)
            block.gate_up.weight.copy_(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
            block.down.weight.copy_(mlp.down_proj.weight)
        ids = torch.randint(case.words, (2, 16), generator=torch.Generator().manual_seed(2))
        far = abs(ours.loss(ids) - theirs(input_ids=ids, labels=ids).loss).item()
    if far > 1e-5:  # fp32, of a loss near 5
        raise RuntimeError(f"the two Llamas are not the same: their losses are {far:.1e} apart; mend _llama.py")
