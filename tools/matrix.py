"""The whole matrix: runs every cell, and writes docs/concepts/matrix.md.

    python tools/matrix.py          # every cell that no result is there for, then the page
    python tools/matrix.py --bits   # those with canonical numerics alone, then their table on the page
    python tools/matrix.py FILE     # the page of results that are there; with --bits their table

Results are kept in runs/matrix, a file for each state of our sources and release of torch: a run that was interrupted
continues.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _state import ROOT, state_of

PAGE = ROOT / "docs/concepts/matrix.md"
RESULTS = ROOT / "runs/matrix"
TESTS = "tests-integration/matrix"

Rows = Sequence[Mapping[str, Any]]

INTRODUCTION = """\
# Equivalence to one device

This page shows that every parallel configuration trains to the same losses as one process. Read it to check how closely
your configuration matches before you trust it with a long run.

    pytest tests-integration/matrix --matrix full

A GPT of four blocks, written once against `Strategy.layers`, trains for 20 steps with the same data and seed under
every configuration. The optimizer is AdamW with a learning-rate warm-up. Gradients are clipped by their global norm,
data are shuffled, and fp16 uses a dynamic loss scale that grows once.

## Tolerances

| precision | baseline | loss | gradient norm |
|---|---|---|---|
| fp32 | a plain torch training loop | 1e-5 | 3e-5 |
| bf16 | one process in bf16, and one in fp32 | 7.8e-3, one rounding | 16 roundings |
| fp16 | one process in fp16, and one in fp32 | 9.8e-4, one rounding | 16 roundings |

All tolerances are relative. In half precision the ranks round activations at other places than one process, such as
before a sum over ranks. A loss is a mean over many tokens, so one rounding of the dtype is enough. A norm also passes
if its distance to fp32 is at most four times the distance of one process in the same precision.

Some steps of a run amplify a rounding ten times. In bf16 the norm of one process differs by up to 0.06 from fp32, and
over sequence and tensor ranks by up to 0.16. With equal weights nothing amplifies it: the gradients of these ranks are
then 1.2 times as far from the exact gradients as the gradients of one process, which a test of par-layers checks.

## Configurations

The number behind a name is the number of ranks.

- **DP**: data parallelism.
- **TP**: 1D tensor parallelism. **SP**: TP with sequence parallelism. **2D, 2.5D, 3D**: tensor modes.
- **PP**: a pipeline with its schedule and 4 microbatches. ZeRO 3 does not support schedules that compute weight
  gradients after a backward, because it has freed the weights by then.
- **Tied**: the logits share the embedding's table.
- **Gather, Ring, Ulysses**: context parallelism, by mode; two of these names mean mode 2d.
- **Packed**: packed documents with unequal numbers of targets, in the GPT of `par-train run`. The baseline processes
  each document separately.
- **Llama**: an unchanged Hugging Face Transformers model with the same number of layers.
- **Mixture**: the GPT with a mixture of four experts after each block, in two or four parts (EP). The parts are on a
  separate axis, or folded into the tensor or sequence axis. It runs only in fp32, because in half precision a rounding
  sends tokens to other experts.
- **Muon**: an optimizer that updates full matrices, with momentum for all other parameters. The baseline is a strategy
  of one rank. It treats q, k and v as separate matrices, although one weight stores them.

## Losses and times

Each cell has two numbers: the largest relative difference of the loss to one process in the same precision, over 20
steps (lower is better), and the run's seconds. The row "one rank" runs a strategy without any sharding. Under autocast,
weights and gradients are fp32, so the ZeRO cells would repeat the fp32 column and are empty.
"""
FARTHEST = """\
## The worst of all configurations
"""
BITS = """\
## Canonical numerics: one fingerprint

With `numerics="canonical", lanes=LaneCounts(data=8, tensor=4, sequence=4)` there is no tolerance: every configuration
must have the weights and the norms of one device to the last bit. The reference is a loop without a strategy, which
runs one lane after the other. Each cell is the first 12 digits of a sha256 of all weights after 20 steps and of each
step's norm. Cells of one model and one precision must be equal. A configuration that canonical numerics do not support
has no cell. The models are wider than in the rows above, so that tensor lanes divide them. The packed model has one
tensor lane, and the mixture one sequence lane. `python tools/matrix.py --bits` runs these cells again. See
[Same bits under every topology](../guides/same-bits.md).
"""
RESUMED = """\
## Saved under one configuration, resumed under the next

A run of one process is saved after 3 steps and resumes under another configuration. It is saved after 3 more steps, and
so on. Its losses stay equal to an undisturbed run of one process. The checkpoint restores model, optimizer, learning
rate and position in the data. Each cell is the largest relative difference of the loss after the change (lower is
better).
"""
END = """\
In every precision, a run that resumes under its own configuration repeats each loss and each norm bit for bit. Two more
tests count communication:

- Each gradient is summed exactly once a step over each axis that needs it, for any number of microbatches.
- If you remove a gradient handler, the losses change.

By default `pytest tests-integration` runs a subset of these cells. The subset covers each axis, ZeRO stage, precision,
tensor mode and schedule. It uses a GPT of three blocks, 6 steps per run and 2 steps between checkpoints.
"""


def main() -> None:
    """Runs the matrix, unless results are given, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="?", type=Path, metavar="FILE", help="write the page of these, and run none")
    parser.add_argument("--bits", action="store_true", help="the cells with canonical numerics and their table alone")
    given = parser.parse_args()
    results = given.results or run(f"{TESTS}/test_bits.py" if given.bits else TESTS)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    curves, resumed, bits = ([row for row in rows if row["kind"] == kind] for kind in ("curve", "resume", "bits"))
    text = with_bits(PAGE.read_text(), bits) if given.bits else page(curves, resumed, bits)
    PAGE.write_text(text)
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(bits)} fingerprints")


def run(tests: str) -> Path:
    """Runs every cell that has no result in this state of the sources, and returns the file of JSON lines."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = RESULTS / f"{state()}.jsonl"
    # The chain of resumed runs is a storm, which a run of pytest leaves out by default.
    command = [sys.executable, "-m", "pytest", tests, "--matrix", "full", "-m", "storm or not storm"]
    # Nothing is left to run where pytest collects nothing, which is its status 5.
    status = subprocess.run([*command, "--matrix-results", str(results)], cwd=ROOT, check=False).returncode
    if status not in (0, 5):
        sys.exit(status)
    return results


def state() -> str:
    """Returns a hash of everything that a result depends on."""
    return state_of(torch.__version__, ROOT.glob(f"{TESTS}/_*.py"))


def with_bits(text: str, bits: Rows) -> str:
    """Returns the page with another table of fingerprints.

    Args:
        text: The page.
        bits: Fingerprints of every configuration that canonical numerics support.
    """
    before, rest = text.split(BITS.partition("\n")[0], 1)
    after = rest[rest.index(RESUMED.partition("\n")[0]) :]
    return before + "\n".join([BITS, *bits_table(bits), after])


def page(curves: Rows, resumed: Rows, bits: Rows) -> str:
    """The whole page.

    Args:
        curves: Results of every configuration in every precision.
        resumed: Results of every change of configuration.
        bits: Fingerprints of every configuration that canonical numerics support.
    """
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    seconds = sum(row["seconds"] for row in curves)
    measured = (
        f"{len(curves)} cells, {seconds / 60:.0f} minutes, {machine}. `python tools/matrix.py` runs them again.\n"
    )
    parts = [INTRODUCTION, *curve_table(curves), FARTHEST, *farthest_table(curves), BITS, *bits_table(bits)]
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


def bits_table(bits: Rows) -> list[str]:
    """A row a configuration, a column a precision; configurations of one model stand together."""
    precisions, models = _in_order(bits, "precision"), {row["case"]: row["model"] for row in bits}
    cells = {(row["case"], row["precision"]): f"`{row['bits']}`" for row in bits}
    order = _in_order(bits, "model")
    cases = sorted(models, key=lambda case: order.index(models[case]))
    rows = [[models[case], case, *(cells.get((case, each), "") for each in precisions)] for case in cases]
    return table(["model", "configuration", *precisions], rows)


def resumed_table(resumed: Rows) -> list[str]:
    """A row a change, a column a precision."""
    precisions = _in_order(resumed, "precision")
    cells = {(row["saved"], row["case"], row["precision"]): f"{row['loss']:.0e}" for row in resumed}
    changes = dict.fromkeys((saved, case) for saved, case, _ in cells)
    rows = [[*change, *(cells.get((*change, each), "") for each in precisions)] for change in changes]
    return table(["saved under", "resumed under", *precisions], rows)


def _in_order(rows: Rows, key: str) -> list[str]:
    """The values of a key, once each."""
    return list(dict.fromkeys(row[key] for row in rows))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, with an empty line at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


if __name__ == "__main__":
    main()
