"""Blocks that torch.compile compiles one by one, under every stage, precision, tensor parallelism, pipeline and policy.

Each case trains twice, eager and compiled, for ten steps of two shapes. Every compiled block is one graph: with
`fullgraph=True` a graph break raises. The table of docs/guides/compile.md is written by

    python tests-integration/test_compiled.py
"""

import tempfile
import warnings
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.multiprocessing.spawn import spawn

from par_checkpoint import load, save
from par_layers import initialize, layer_set
from par_layers.examples import GPT
from par_precision import mixed
from par_testing import for_each, storm
from par_train import Strategy
from par_zero import MixedPrecision, shard

# The tracer reads the gradients of all inputs, the inductor uses what torch has deprecated, and a compiled stage cannot
# split its backward.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:the schedule splits the backward:UserWarning"),
]

PAGE = Path(__file__).resolve().parent.parent / "docs/guides/compile.md"

PRECISIONS = ("fp32", "bf16", "fp16", "bf16-amp", "fp16-amp")
TENSOR = {"tensor": {"size": 2, "mode": "1d"}}
SEQUENCE = {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}
PIPELINE = {"pipeline": 2}
PARALLEL: dict[str, dict[str, Any]] = {
    "data parallel": {},
    "tensor parallel 1d": {"parallel": TENSOR},
    "1d, sequence parallel": {"parallel": SEQUENCE},
    "pipeline, 1F1B": {"parallel": PIPELINE, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
    "pipeline, ZB-H1": {
        "parallel": PIPELINE,
        "pipeline": {"schedule": "zb_h1", "microbatches": 4, "split_backward": "where possible"},
    },
}
"""Options of the strategy, by the name of the row."""

ROWS = (
    *product(("data parallel",), PRECISIONS, ("aot_eager",)),
    *product(("tensor parallel 1d", "pipeline, 1F1B"), ("fp32", "bf16"), ("aot_eager",)),
    *product(("1d, sequence parallel", "pipeline, ZB-H1"), ("fp32",), ("aot_eager",)),
    *product(("data parallel",), ("fp32", "bf16"), ("inductor",)),
    ("tensor parallel 1d", "fp32", "inductor"),
)
"""Rows of the table: what is parallel, precision and backend."""

VOCABULARY, WIDTH, LENGTHS = 29, 32, (16, 12)


class Training(NamedTuple):
    """A run of some steps.

    Attributes:
        losses: Loss of each step.
        weights: Tensors of the optimizer at the end.
        graphs: Number of graphs that were compiled until the end of each step.
    """

    losses: list[float]
    weights: list[torch.Tensor]
    graphs: list[int]


class Outcome(NamedTuple):
    """A comparison of compiled blocks with eager blocks.

    Attributes:
        graphs: Number of graphs in the first step.
        recompiles: Number of graphs in later steps.
        distance: Largest relative difference of a loss.
        is_equal: Whether all losses and weights are equal, bit for bit.
    """

    graphs: int
    recompiles: int
    distance: float
    is_equal: bool


def train(options: dict[str, Any], backend: str | None, steps: int) -> Training:
    """Train a GPT of four blocks under a strategy.

    Args:
        options: Options of the strategy.
        backend: Backend of torch.compile. None: the blocks are eager.
        steps: Number of steps. Their shapes alternate.
    """
    torch.compiler.reset()
    graphs = CompileCounterWithBackend(backend or "eager")
    with Strategy(**options, seed=0) as strategy:
        parts = GPT(strategy.layers, VOCABULARY, WIDTH, 4, 4, max(LENGTHS))
        if backend is not None:
            for block in parts.blocks:
                block.compile(backend=graphs, fullgraph=True)
        first, last = nn.Sequential(parts.tokens, parts.positions), nn.Sequential(parts.norm, parts.head)
        model: Any = nn.Sequential(first, *parts.blocks, last)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        model, optimizer = strategy.initialize(model, optimizer)

        def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return strategy.layers.cross_entropy(logits, targets, classes=VOCABULARY)

        batches = iter([batch(step, strategy.groups.rank("data")) for step in range(steps)])
        losses, counts = [], []
        for _ in range(steps):
            loss = strategy.execute_pipeline(batches, model, loss_of, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
            counts.append(graphs.frame_count)
        weights = [tensor.detach().clone() for group in optimizer.param_groups for tensor in group["params"]]
    return Training(losses, weights, counts)


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and targets of a step, of one of two lengths."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    tokens = torch.randint(VOCABULARY, (4, LENGTHS[step % 2]), generator=generator)
    return tokens, (5 * tokens + 3) % VOCABULARY


def compare(options: dict[str, Any], backend: str = "aot_eager", steps: int = 10) -> Outcome:
    """Train eager and compiled, and return the worst outcome of all ranks."""
    eager, compiled = train(options, None, steps), train(options, backend, steps)
    same = eager.losses == compiled.losses
    same &= all(torch.equal(one, two) for one, two in zip(eager.weights, compiled.weights, strict=True))
    distance = max(abs(one / two - 1) for one, two in zip(compiled.losses, eager.losses, strict=True))
    found = torch.tensor([compiled.graphs[0], compiled.graphs[-1] - compiled.graphs[0], distance, not same]).double()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    graphs, recompiles, distance, differs = found.tolist()
    return Outcome(int(graphs), int(recompiles), distance, not differs)


TESTED = (
    ("data parallel", 3, "bf16"),
    storm(("data parallel", 3, "bf16-amp")),
    storm(("tensor parallel 1d", 3, "fp32")),
    storm(("pipeline, 1F1B", 3, "bf16")),
    storm(("data parallel", 0, "fp16-amp")),
    storm(("1d, sequence parallel", 0, "fp32")),
    storm(("pipeline, ZB-H1", 1, "fp32")),
)
"""What is parallel, stage and precision. Stage 3 has hooks within blocks, and the others have none."""


@for_each(case=TESTED)
@pytest.mark.ranks(2, timeout=300)
def test_compiled_blocks_have_one_graph_and_equal_eager(case):
    name, stage, precision = case
    options = {**PARALLEL[name], "zero": stage, "precision": precision}
    if stage == 3 and precision.endswith("amp"):
        with pytest.raises(ValueError, match="autocast would keep a cast copy"):
            compare(options, steps=1)
        return
    found = compare(options, steps=3)
    # aot_eager runs the operators of eager blocks in their order. Every rank makes a graph of the first shape, and one
    # of any shape; microbatches of a pipeline's first stage differ from others in whether they require gradients.
    assert found.is_equal
    assert (found.graphs, found.recompiles) in {(1, 1), (1, 2)}


@pytest.mark.storm
@pytest.mark.ranks(2, timeout=300)
def test_inductor_blocks_equal_eager_within_rounding():
    found = compare({"zero": 3, "precision": "fp32"}, "inductor", steps=2)
    # Kernels of the inductor fuse and vectorise, so sums and exponentials round differently in the last digits.
    assert found.distance < 1e-6


@pytest.mark.storm
@for_each(stage=(1, 3))
@pytest.mark.ranks(2)
def test_checkpoint_of_wrapped_blocks_loads_into_eager_blocks(stage, tmp_path):
    states = []
    for wraps in (True, False):
        layers = layer_set(None)
        model = GPT(layers, VOCABULARY, WIDTH, 4, 2, max(LENGTHS))
        if wraps:
            for number, block in enumerate(model.blocks):
                model.blocks[number] = torch.compile(block, backend="eager")
        initialize(model, seed=0 if wraps else 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        half = MixedPrecision(param_dtype=torch.bfloat16)
        shard(model, optimizer, stage=stage, group=dist.group.WORLD, precision=half)
        model, optimizer = mixed(model, optimizer, "bf16", group=dist.group.WORLD)
        if wraps:
            inputs, targets = batch(0, dist.get_rank())
            optimizer.backward(layers.cross_entropy(model(inputs), targets, classes=VOCABULARY))
            optimizer.step()
            save(tmp_path / str(stage), model=model, optimizer=optimizer)
        else:
            load(tmp_path / str(stage), model=model, optimizer=optimizer)
        states.append([tensor.clone() for group in optimizer.param_groups for tensor in group["params"]])
    assert all(torch.equal(one, two) for one, two in zip(*states, strict=True))


def test_initialize_draws_the_same_weights_for_wrapped_blocks():
    models = [GPT(layer_set(None), VOCABULARY, WIDTH, 4, 1, max(LENGTHS)) for _ in range(2)]
    models[1].blocks[0] = torch.compile(models[1].blocks[0], backend="eager")
    for model in models:
        initialize(model, seed=0)
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


def measure(rank: int, folder: str) -> None:
    """Measure all rows on one of two ranks, and write the outcomes of each row to a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=2)
    for name, precision, backend in ROWS:
        cells = []
        for stage in range(4):
            try:
                found = compare({**PARALLEL[name], "zero": stage, "precision": precision}, backend)
            except ValueError as error:
                cells.append(f"`ValueError` ({number_of(str(error))})")
            else:
                same = "equal" if found.is_equal else f"{found.distance:.0e}"
                cells.append(f"{found.graphs} / {found.recompiles} / {same}")
        if rank == 0:
            with Path(folder, "rows").open("a") as rows:
                rows.write(f"| {name} | {precision} | {backend} | {' | '.join(cells)} |\n")
            print(name, precision, backend, *cells, flush=True)
    dist.destroy_process_group()


def number_of(error: str) -> str:
    """Return the number of the note below the table that explains an error."""
    return "1" if "autocast" in error else "2" if "weight gradients later" in error else error


def main() -> None:
    """Write the table between the two marks of the page."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(measure, (folder,), nprocs=2)
        rows = Path(folder, "rows").read_text()
    head = "| blocks under | precision | backend | stage 0 | stage 1 | stage 2 | stage 3 |\n" + "| --- " * 7 + "|\n"
    before, begin, rest = PAGE.read_text().partition("<!-- table -->\n\n")
    PAGE.write_text(before + begin + head + rows + "\n<!-- end -->" + rest.partition("<!-- end -->")[2])


if __name__ == "__main__":
    main()
