"""The whole matrix: runs every cell, and writes docs/concepts/matrix.md.

Run as `python tools/matrix.py`; `python tools/matrix.py FILE` writes the page of results that are there.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/concepts/matrix.md"
RESULTS = ROOT / "runs/matrix.jsonl"

Rows = Sequence[Mapping[str, Any]]

INTRODUCTION = """\
# The proof: one model under every configuration

A GPT of four blocks, written once against `Strategy.layers`, trains for 20 steps with the same data and seed under
every configuration. Losses and gradient norms must be those of one process. In fp32 they are compared with a plain
torch training loop: losses within 1e-5 and norms within 3e-5, relative. In half precision activations are rounded at
other places, such as before a sum over ranks. There a loss, which is a mean over many tokens, must be within one
rounding of the dtype (bf16: 7.8e-3, fp16: 9.8e-4), and a norm within sixteen, or within four times as far from fp32
as that of one process in the same precision; each is compared with one process in the same precision, and with one in
fp32. Some steps of a curve make ten times as much of a rounding: in bf16 a norm of one process is up to 0.06 from
fp32 here, and over sequence and tensor ranks 0.16. At equal weights, where nothing makes more of it, the gradients of
these ranks are 1.2 times as far from the exact ones as those of one process, which a test of par-layers holds. The
optimizer is AdamW with a warm-up of the learning rate; gradients are clipped by the norm of all of them, data are
shuffled, and fp16 has a dynamic loss scale that grows once.

DP: data parallel. TP: 1D tensor parallel. SP: TP with sequence parallelism. 2D, 2.5D, 3D: tensor modes. PP: a pipeline,
with its schedule and 4 microbatches. The number is that of ranks. Tied: the logits share the embedding's table. ZeRO 3
is refused with schedules that take weight gradients after a backward, for it has freed the weights. Gather, Ring,
Ulysses: a sequence that is cut over ranks, by its mode; two of these names are its mode 2d. Packed: rows of several
documents, unevenly many targets in each, in the GPT of `par-train run`; its one process takes each document by itself.
Llama: a model of transformers in the place of the GPT, as it is, of as many layers. Mixture: the GPT with a mixture of
four experts after each block, in two or four parts (EP), on ranks of their own or folded into those of the tensor or
sequence axis; in fp32 alone, since in half precision a rounding sends tokens to other experts. Muon: an optimizer that
steps whole matrices, and all else with momentum; its one process is a strategy of one rank, where q, k and v, which lie
in one weight, are matrices of their own.

Each cell has two numbers: the largest relative difference of the loss to one process in the same precision, over 20
steps, and how many seconds the run took. In the row "one rank" a strategy runs, but nothing is cut. Under autocast
weights and gradients are fp32, so ZeRO does the same as in the fp32 column; these cells are empty.
"""
FARTHEST = """\
## The worst of all configurations
"""
RESUMED = """\
## Saved under one, gone on under the next

A run of one process is saved after 3 steps and goes on under another configuration, is saved after 3 more, and so on.
Its losses stay those of one process that never stopped. Model, optimizer, learning rate and position in the data come
along. A cell: the largest relative difference of the loss after the change.
"""
END = """\
In every precision, a run that goes on under its own configuration repeats each loss and each norm to the last bit. Two
more tests count what is communicated: each gradient is summed over each axis that needs it exactly once a step, however
many microbatches there are; and with any gradient handler left out the run is another one.

The default of `pytest tests-integration` is a cover of these cells: each axis, ZeRO stage and precision, and each
kind of tensor mode and schedule, with a GPT of three blocks, in curves of 6 steps and 2 steps between checkpoints.
"""


def main() -> None:
    """Runs the matrix, unless results are given, and writes the page."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else run()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    curves, resumed = ([row for row in rows if row["kind"] == kind] for kind in ("curve", "resume"))
    PAGE.write_text(page(curves, resumed))
    print(f"wrote {PAGE.relative_to(ROOT)}")


def run() -> Path:
    """Every cell, into a file of JSON lines."""
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "tests-integration/matrix", "--matrix", "full"]
    subprocess.run([*command, "--matrix-results", str(RESULTS)], cwd=ROOT, check=True)
    return RESULTS


def page(curves: Rows, resumed: Rows) -> str:
    """The whole page.

    Args:
        curves: Results of every configuration in every precision.
        resumed: Results of every change of configuration.
    """
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    seconds = sum(row["seconds"] for row in curves)
    measured = f"{len(curves)} cells, {seconds / 60:.0f} minutes, {machine}. `python tools/matrix.py` runs them anew.\n"
    parts = [INTRODUCTION, *curve_table(curves), FARTHEST, *farthest_table(curves)]
    return "\n".join([*parts, RESUMED, *resumed_table(resumed), END, measured])


def curve_table(curves: Rows) -> list[str]:
    """A row a configuration, a column a precision."""
    precisions, ranks = _in_order(curves, "precision"), {row["case"]: str(row["ranks"]) for row in curves}
    cells = {(row["case"], row["precision"]): f"{row['loss']:.0e}, {row['seconds']:.1f} s" for row in curves}
    rows = [[case, ranks[case], *(cells.get((case, each), "") for each in precisions)] for case in ranks]
    return table(["configuration", "ranks", *precisions], rows)


def farthest_table(curves: Rows) -> list[str]:
    """A row a precision: the worst of all configurations."""
    kinds = ("loss", "norm", "loss to fp32", "norm to fp32")
    rows = []
    for precision in _in_order(curves, "precision"):
        of_it = [row for row in curves if row["precision"] == precision]
        rows.append([precision, *(f"{max(row[kind] for row in of_it):.0e}" for kind in kinds)])
    return table(["precision", *kinds], rows)


def resumed_table(resumed: Rows) -> list[str]:
    """A row a change, a column a precision."""
    precisions = _in_order(resumed, "precision")
    cells = {(row["saved"], row["case"], row["precision"]): f"{row['loss']:.0e}" for row in resumed}
    changes = dict.fromkeys((saved, case) for saved, case, _ in cells)
    rows = [[*change, *(cells.get((*change, each), "") for each in precisions)] for change in changes]
    return table(["saved under", "gone on under", *precisions], rows)


def _in_order(rows: Rows, key: str) -> list[str]:
    """The values of a key, once each."""
    return list(dict.fromkeys(row[key] for row in rows))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, with an empty line at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


if __name__ == "__main__":
    main()
