"""One cell of the atlas: a type of model, trained on two ranks in one way, against the same training in one process.

A cell is `equal`; or `refused`, if every rank raised an error of ours that names the reason; or `wrong`: other numbers,
an error that we did not raise, an error on some ranks only, or a hang. There is no fourth kind.
"""

import copy
import json
import linecache
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from par_layers.pretrained import causal_lm_loss, unlike_causal
from par_testing import keep_fp64
from par_train import Strategy

RANKS = 2
ROWS, TOKENS = 4, 12
STEPS = 2
EXACT = 1e-10
"""Relative, and absolute below 1: fp64 sums of the ranks are added in another order. 1e-15 to 1e-13 was seen."""

TENSOR = {"size": RANKS, "mode": "1d"}
WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"parallel": {"tensor": TENSOR}},
    "sequence parallel": {"parallel": {"tensor": {**TENSOR, "sequence_parallel": True}}},
    "gather": {"parallel": {"sequence": {"size": RANKS, "mode": "gather"}}},
    "ring": {"parallel": {"sequence": {"size": RANKS, "mode": "ring"}}},
    "ulysses": {"parallel": {"sequence": {"size": RANKS, "mode": "ulysses"}}},
    "pipeline": {"parallel": {"pipeline": RANKS}, "pipeline": {"microbatches": 2}},
    "experts": {"parallel": {"expert": RANKS}},
    "ZeRO 3": {"zero": 3},
}
"""Options of `Strategy` for each way."""


@dataclass(frozen=True)
class Cell:
    """The result of one type in one way.

    Args:
        kind: "equal", "refused" or "wrong".
        reason: The message of the refusal, or what was wrong; empty if equal.
        worst: The largest difference of a loss or a weight, relative, absolute below 1.
    """

    kind: str
    reason: str = ""
    worst: float = 0.0


class Task:
    """A model, its data, and what one process makes of them.

    Args:
        model: The model, in fp64.
        kind: "causal", "masked" or "base", as `class_of` says.
        folder: A folder for files, which exists.
    """

    def __init__(self, model: Any, kind: str, folder: Path) -> None:
        self.model, self.kind, self.folder = model, kind, folder
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        # A model whose own loss is not that of the next token is trained by a criterion of ours.
        self.criterion = None if kind == "causal" and unlike_causal(model) is None else token_loss
        self.losses: list[float] = []

    def run_one_process(self) -> None:
        """Train in plain torch, and write the weights as Transformers does.

        Raises:
            ValueError: A loss is not finite.
        """
        model = copy.deepcopy(self.model).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        takes_cache = self.kind == "causal"
        for batch in self.batches():
            ids = batch["input_ids"]
            outputs = model(input_ids=ids, **({"use_cache": False} if takes_cache else {}))
            total, count = (causal_lm_loss if self.criterion is None else self.criterion)(outputs, batch)
            (total / count).backward()
            self.losses.append((total / count).item())
            optimizer.step()
            optimizer.zero_grad()
        if not all(torch.isfinite(each).all() for each in (torch.tensor(self.losses), *model.parameters())):
            raise ValueError(f"one process computes losses {self.losses}, or weights that are not finite")
        model.save_pretrained(self.folder / "one")

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches. Each row has another number of labels, so that a mean of ranks' means is wrong."""
        generator = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            ids = torch.randint(2, min(self.vocabulary, 100), (ROWS, TOKENS), generator=generator)
            labels = ids.clone()
            for row in range(ROWS):
                labels[row, : row + 1] = -100
            yield {"input_ids": ids, "labels": labels}

    def run_ranks(self, way: str) -> Cell:
        """Train on ranks in one way; in the processes of the ranks.

        Args:
            way: Name in `WAYS`.
        """
        rank = dist.get_rank()
        with Strategy(**WAYS[way]) as strategy:
            model: Any = copy.deepcopy(self.model).train()
            optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            model, optimizer = strategy.initialize(model, optimizer)
            over = ("data", "expert") if way == "experts" else ("data",)
            group = strategy.groups[over]
            replica, replicas = dist.get_rank(group), dist.get_world_size(group)
            rows = slice(replica * ROWS // replicas, (replica + 1) * ROWS // replicas)
            losses = []
            for batch in self.batches():
                part = {name: tensor[rows] for name, tensor in batch.items()}
                loss = strategy.execute_pipeline(iter([part]), model, self.criterion, optimizer)
                count = (part["labels"][:, 1:] != -100).sum()
                summed = torch.stack([loss * count, count.double()])
                dist.all_reduce(summed, group=group)
                losses.append((summed[0] / summed[1]).item())
                optimizer.step()
                optimizer.zero_grad()
            strategy.save(model, self.folder / "ranks")
        pairs = zip(losses, self.losses, strict=True)
        worst = max(abs(here - there) / max(1.0, abs(there)) for here, there in pairs)
        if not worst <= EXACT:
            return Cell("wrong", f"losses {losses} instead of {self.losses}", worst)
        return compare(self.folder / "ranks", self.folder / "one", worst) if rank == 0 else Cell("equal", "", worst)


def token_loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return a sum over tokens and their number, of a model whose own loss is another one, or that has no head.

    Args:
        outputs: The outputs; the logits, or else the features, are scores of the classes.
        batch: The batch, whose labels of the next token may be split.
    """
    scores = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    scores = outputs.last_hidden_state if scores is None else scores
    labels = (
        batch["shift_labels"]
        if "shift_labels" in batch
        else nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    )
    labels = torch.where(labels == -100, labels, labels % scores.shape[-1])
    total = nn.functional.cross_entropy(scores.flatten(0, -2), labels.reshape(-1), reduction="sum", ignore_index=-100)
    return total, (labels != -100).sum()


def compare(ours: Path, theirs: Path, worst: float) -> Cell:
    """Compare the files of a strategy with those that Transformers writes for the model of one process."""
    here, there = tensors_in(ours), tensors_in(theirs)
    if here.keys() != there.keys():
        return Cell("wrong", f"saved {sorted(here.keys() ^ there.keys())[:4]} on one side only", 1.0)
    name = ""
    for key, expected in there.items():
        found = here[key]
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return Cell("wrong", f"{key} is {found.dtype} {tuple(found.shape)}, not {tuple(expected.shape)}", 1.0)
        distance = ((found.double() - expected.double()).abs() / expected.double().abs().clamp(min=1.0)).nan_to_num(1e9)
        largest = distance.max().item() if distance.numel() else 0.0
        if largest > worst:
            worst, name = largest, key
    return Cell("equal", "", worst) if worst <= EXACT else Cell("wrong", f"{name} differs by {worst:.1e}", worst)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def try_way(task: Task, way: str, seconds: float = 600.0) -> Cell:
    """Fork ranks, train on them in one way, and judge.

    A fresh world for each cell: an error on one rank leaves collectives of the others open. A cell takes seconds; the
    limits are long, so that a busy machine is not taken for a hang.

    Args:
        task: The model, after its training in one process.
        way: Name in `WAYS`.
        seconds: Time limit of the ranks.
    """
    shutil.rmtree(task.folder / "ranks", ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_fork(lambda rank=rank: _rank(task, way, rank, Path(folder))) for rank in range(RANKS)]
        hanging = _wait(ranks, seconds)
        found: list[dict[str, Any]] = []
        for rank in range(RANKS):
            path = Path(folder, f"{rank}.json")
            found.append(json.loads(path.read_text()) if path.exists() else asdict(Cell("wrong", "killed")))
    cells = [Cell(**each) for each in found]
    if hanging:
        others = next((each.reason for each in cells if each.reason not in ("", "killed")), "all ranks wait")
        return Cell("wrong", f"hangs: {others}")
    kinds = {each.kind for each in cells}
    if kinds == {"equal"}:
        return max(cells, key=lambda each: each.worst)
    if kinds == {"refused"}:
        return min(cells, key=lambda each: len(each.reason))
    wrong = [each for each in cells if each.kind == "wrong" and "Connection closed" not in each.reason]
    return (
        wrong[0]
        if wrong
        else Cell("wrong", f"raised on some ranks only: {next(each.reason for each in cells if each.reason)}")
    )


def _rank(task: Task, way: str, rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    try:
        cell = task.run_ranks(way)
    except Exception as error:
        cell = judged(error)
        if os.environ.get("ATLAS_TRACEBACKS"):
            traceback.print_exc()
    (folder / f"{rank}.json").write_text(json.dumps(asdict(cell)))


def judged(error: BaseException) -> Cell:
    """Return the cell of an error: refused if a `raise` of our packages raised it, else wrong."""
    each: BaseException | None = error
    while each is not None:  # a pipeline wraps the error of a stage
        last = traceback.extract_tb(each.__traceback__)[-1]
        raises = linecache.getline(last.filename, last.lineno or 0).strip().startswith("raise")
        ours = "/par_" in last.filename and "/src/" in last.filename
        if ours and raises and isinstance(each, (ValueError, TypeError)):
            return Cell("refused", " ".join(str(each).split()))
        error, each = each, each.__cause__
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return Cell("wrong", f"{type(error).__name__}: {text} ({Path(last.filename).name}:{last.lineno})")


def _fork(body: Callable[[], None]) -> int:
    """Run a function in a fork of this process, which has the model already; return the fork's process id."""
    process = os.fork()
    if process:
        return process
    try:
        body()
    finally:
        os._exit(0)  # without what this process would do at its end


def _wait(processes: list[int], seconds: float) -> bool:
    """Wait for processes, and kill those that exceed the time limit; return whether any did."""
    end, waiting = time.monotonic() + seconds, set(processes)
    while waiting and time.monotonic() < end:
        for process in [*waiting]:
            if os.waitpid(process, os.WNOHANG)[0]:
                waiting.discard(process)
        time.sleep(0.01)
    for process in waiting:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return bool(waiting)


def try_type(name: str, ways: list[str] | None = None) -> dict[str, Any]:
    """Return all cells of a type, or the reason why no model of it can be made.

    Args:
        name: The type.
        ways: Names in `WAYS`. Default: all.
    """
    import transformers

    from . import _models

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # whose thread would not live on in forks
    warnings.simplefilter("ignore")
    began = time.monotonic()
    with keep_fp64(), tempfile.TemporaryDirectory() as folder:
        try:
            kind = _models.class_of(_models.tiny_config(name))
            task = Task(_models.make(name), kind[1], Path(folder))
            task.run_one_process()
        except Exception as error:
            text = " ".join(str(error).split())
            return {"type": name, "made": False, "reason": f"{type(error).__name__}: {text[:300]}"}
        cells = {way: asdict(try_way(task, way)) for way in ways or WAYS}
    seconds = time.monotonic() - began
    return {"type": name, "made": True, "class": kind[0].__name__, "kind": kind[1], "seconds": seconds, "cells": cells}
