"""A Llama as transformers has it, on two gloo ranks: cut by par-layers, cut by transformers itself, and whole.

Forward, loss and backward at three sizes: many tiny layers, where Python and calls are what costs; a mid-size model;
and one that is mostly vocabulary; and greedy generation with a cache. Then how long a folder takes to load, and how
much memory; then the CPU time of a step beside that of a Llama written against a layer set. Contenders take turns, in
another order each time; ratios are medians over the turns. Run as `python tools/bench/models.py`; takes ten minutes,
and writes docs/benchmarks/models.md and .json.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _folders import loading
from _llama import Case
from _overhead import overhead
from _ranks import spawned
from _table import Section, write_sections
from _turns import quartile, ratio, shuffled
from torch import Tensor
from tqdm import tqdm

from par_groups import ProcessGroups, Topology
from par_layers import parallelize

RANKS, WARM_UPS = 2, 3
WHOLE, THEIRS, OURS, SEQUENCE = "whole on one rank", "transformers", "par-layers", "par-layers, sequence parallel"


CASES = {
    "overhead": Case(layers=16, width=64, words=256, rows=2, length=16, turns=60),
    "mid-size": Case(layers=8, width=512, words=8192, rows=4, length=128, turns=20),
    "vocabulary": Case(layers=2, width=256, words=65536, rows=4, length=128, turns=20),
}
NEW_TOKENS = 16


def main() -> None:
    """Measures, and writes medians, quartiles and ratios."""
    on_one_rank = {name: replace(CASES[name], turns=turns) for name, turns in (("overhead", 40), ("mid-size", 20))}
    write_sections("models", "A Hugging Face model over two ranks", [steps(), loading(), overhead(on_one_rank)])


def steps() -> Section:
    """Measures steps and generation, and gives the table."""
    rows = []
    for name, case in CASES.items():
        for what in ("forward and backward", "generate, a token"):
            measured: dict[str, list[tuple[float, float]]] = spawned(RANKS, timed, name, case, what)
            wall = {each: [seconds for seconds, _ in turns] for each, turns in measured.items()}
            spent = {each: [seconds for _, seconds in turns] for each, turns in measured.items()}
            for each, times in wall.items():
                rows.append(
                    {
                        "model": name,
                        "what": what,
                        "contender": each,
                        "median ms": f"{1000 * statistics.median(times):.1f}",
                        "quartiles ms": f"{1000 * quartile(times, 1):.1f} to {1000 * quartile(times, 3):.1f}",
                        "to transformers": f"{ratio(times, wall[THEIRS]):.2f}",
                        "CPU to transformers": f"{ratio(spent[each], spent[THEIRS]):.2f}",
                        "to whole": f"{ratio(times, wall[WHOLE]):.2f}",
                    }
                )
    sizes = "; ".join(f"{name}: {case.described()}" for name, case in CASES.items())
    note = (
        f"{sizes}. Forward, loss and backward in training mode, fp32. Generation is greedy, with a dynamic cache: "
        f"{NEW_TOKENS} tokens after a prompt of 16. {RANKS} gloo ranks with one thread each. Times are those of the "
        f"slower rank; for the whole model, each rank computes all of it. transformers {transformers.__version__} "
        "shards the model by its own plan. Ratios are medians over the turns (lower is better)."
    )
    return Section(title="A step, and generation", note=note, rows=rows)


def timed(name: str, case: Case, what: str) -> Mapping[str, list[tuple[float, float]]]:
    """Seconds and CPU seconds of every turn, by contender, those of the slower rank."""
    ids = torch.randint(case.words, (case.rows, case.length), generator=torch.Generator().manual_seed(1))
    runs = {
        each: step(model, ids) if what.startswith("forward") else generation(model, ids[:1, :16])
        for each, model in contenders(case).items()
        if what.startswith("forward") or each != SEQUENCE  # which generates as par-layers does
    }
    found: dict[str, list[tuple[float, float]]] = {each: [] for each in runs}
    turns = case.turns if what.startswith("forward") else 10
    progress = tqdm(total=turns, desc=f"{name}, {what}", unit="turn", disable=dist.get_rank() > 0)
    for turn in range(-WARM_UPS, turns):
        for each in shuffled(list(runs), turn):
            dist.barrier()
            begin, spent = time.perf_counter(), time.process_time()
            runs[each]()
            pair = torch.tensor([time.perf_counter() - begin, time.process_time() - spent], dtype=torch.float64)
            dist.all_reduce(pair, op=dist.ReduceOp.MAX)
            if turn >= 0:
                found[each].append((float(pair[0]), float(pair[1])))
        progress.update(turn >= 0)
    progress.close()
    if what.startswith("generate"):
        return {each: [(w / NEW_TOKENS, c / NEW_TOKENS) for w, c in pairs] for each, pairs in found.items()}
    return found


def contenders(case: Case) -> dict[str, Any]:
    """A Llama by the name of each contender: whole, cut by transformers, and cut by par-layers."""
    config = case.config()
    made = {WHOLE: fresh(config), THEIRS: cut_by_transformers(config)}
    for name, sequence in ((OURS, False), (SEQUENCE, True)):
        tensor = {"size": RANKS, "mode": "1d", "sequence_parallel": sequence}
        groups = ProcessGroups(Topology.from_config({"tensor": tensor}, RANKS))
        made[name] = parallelize(fresh(config), groups)
    return made


def fresh(config: Any) -> Any:
    """A model with random weights, the same on all ranks."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).train()


def cut_by_transformers(config: Any) -> Any:
    """The model as transformers cuts it, which it does while it loads one."""
    named = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(named)
    (folder,) = named
    if dist.get_rank() == 0:
        fresh(config).save_pretrained(folder)
    dist.barrier()
    over: Any = import_module("transformers.distributed")
    model: Any = transformers.LlamaForCausalLM.from_pretrained(
        folder, distributed_config=over.DistributedConfig(tp_size=RANKS), dtype=torch.float32
    )
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return model.train()


def step(model: Any, ids: Tensor) -> Callable[[], object]:
    """Forward, loss and backward."""

    def run() -> None:
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    return run


def generation(model: Any, ids: Tensor) -> Callable[[], object]:
    """Greedy tokens after a prompt."""

    def run() -> None:
        model.eval()
        model.generate(ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False)

    return run


if __name__ == "__main__":
    main()
