"""Forward and backward of blocks of GPT that keep less, beside torch's ways to do so, in one process.

Every contender has a model of its own with the same weights, and they take turns, each turn in another order; ratios
are medians over the turns. What is kept is counted: storages that operations have made and that live after the forward;
of compiled blocks those that their graph has saved. Run as `python tools/bench/recompute.py`; writes
docs/benchmarks/recompute.md and .json, in five minutes, of which torch.compile takes half.
"""

import copy
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _table import write
from _turns import quartile, ratio, shuffled
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch import config
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from par_recompute import Choice, Drop, Keep, checkpoint_layers, knapsack
from par_recompute.plan.frontier import pareto

WIDTH, TOKENS, HEADS, BLOCKS, TURNS = 512, 1024, 8, 2, 10
PRODUCTS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]
BUDGETS = (0.6, 0.35)
"""Budgets of torch.compile, parts of what it would save."""

EVERYTHING, COMPILED = "everything", "compiled"
SHARES = (0.07, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95)


class Attention(nn.Module):
    """One product for q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width], causal."""
        batch, tokens, width = x.shape
        q, k, v = (y.view(batch, tokens, HEADS, -1).transpose(1, 2) for y in self.qkv(x).split(width, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return y


class Block(nn.Module):
    """A block of GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.fc, self.act, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width]."""
        x = x + self.attn(self.ln1(x))
        y: Tensor = x + self.out(self.act(self.fc(self.ln2(x))))
        return y


class Checkpointed(nn.Module):
    """Blocks, each within torch's checkpoint.

    Args:
        blocks: The blocks.
        contexts: For selective checkpointing; None for whole blocks.
    """

    def __init__(self, blocks: nn.Sequential, contexts: Callable[[], Any] | None = None) -> None:
        super().__init__()
        options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
        self.blocks, self.options = blocks, options

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width]."""
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.options)
        return x


class Living(TorchDispatchMode):
    """Counts the bytes of storages that operations have made since it was entered and that live still.

    Args:
        fixed: Identities of storages that were there, of which operations make views.
    """

    def __init__(self, fixed: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fixed = fixed
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._fixed:
                    self._made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return output

    def bytes(self) -> int:
        """Those that live now."""
        return sum(size for alive, size in self._made.values() if not alive.expired())


def main() -> None:
    """Measures all contenders, and writes what they keep and how long they take."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    inputs = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    models = {name: make(copy.deepcopy(blocks), inputs) for name, make in contenders().items()}
    sizes = {name: kept(model, inputs) for name, model in models.items()}
    for _ in range(2):
        for model in models.values():
            step(model, inputs)
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(TURNS):
        for name in shuffled(list(models), turn):
            start = time.perf_counter()
            step(models[name], inputs)
            times[name].append(time.perf_counter() - start)
    rows = []
    for name in models:
        rows.append(
            {
                "contender": name,
                "keeps, h of a block": f"{sizes[name]:.2f}",
                "median ms": f"{1e3 * statistics.median(times[name]):.0f}",
                "quartiles ms": f"{1e3 * quartile(times[name], 1):.0f} to {1e3 * quartile(times[name], 3):.0f}",
                "ratio": f"{ratio(times[name], times[COMPILED if name.startswith(COMPILED) else EVERYTHING]):.3f}",
                "to the best that fits": to_best(name, sizes, times),
            }
        )
    write(
        "recompute",
        "Activation checkpointing policies",
        rows,
        f"Forward and backward of {BLOCKS} blocks of a GPT, width {WIDTH}, {HEADS} heads, {TOKENS} tokens, fp32, two "
        f"threads. Each of {TURNS} turns runs every contender once in the same process, in another order. `ratio` is "
        "the time relative to the contender that saves everything; for compiled blocks, relative to compiled blocks "
        "without a policy. It is the median over the turns (lower is better). `keeps` counts the saved activations "
        "after forward, without the model's input, in units of one block's output. `to the best that fits` compares "
        "`Keep` with the fastest uncompiled contender that saves no more than the budget. The name of `Keep` contains "
        f"its budget, as a fraction of all activations. {seconds_of_knapsack()}",
    )


def to_best(name: str, sizes: dict[str, float], times: dict[str, list[float]]) -> str:
    """The time of Keep to that of the fastest other contender within its budget; "" for others."""
    if not name.startswith("Keep"):
        return ""
    given = 1 / BLOCKS  # the model's input, which is a part of a budget
    budget = float(name[5:-1]) * (sizes[EVERYTHING] + given)
    fit = [each for each, size in sizes.items() if size + given <= budget and not each.startswith(("Keep", COMPILED))]
    best = min(fit, key=lambda each: statistics.median(times[each]))
    return f"{ratio(times[name], times[best]):.3f} ({best})"


def seconds_of_knapsack() -> str:
    """How long the choice for 200 layers takes, each with a frontier of 16 choices of its own."""
    generator = random.Random(0)
    frontiers = [
        pareto(Choice(frozenset(), generator.randrange(1 << 30), generator.random()) for _ in range(64))
        for _ in range(200)
    ]
    budget = sum(choices[len(choices) // 2].bytes for choices in frontiers)
    start = time.perf_counter()
    knapsack(frontiers, budget)
    spent = time.perf_counter() - start
    return f"`knapsack` of 200 layers with {sum(map(len, frontiers))} choices took {1e3 * spent:.0f} ms."


def contenders() -> dict[str, Callable[[nn.Sequential, Tensor], nn.Module]]:
    """Contenders by name: each makes a model out of blocks, and of what it is called with."""
    cheap = ("ln1", "ln2", "act")
    selective = partial(create_selective_checkpoint_contexts, PRODUCTS)
    return {
        "everything": lambda blocks, _: blocks,
        "cheap": lambda blocks, x: checkpoint_layers(blocks, "cheap", example=x),
        "and the MLP's first product": lambda blocks, x: dropping(blocks, x, (*cheap, "fc")),
        "and q, k, v": lambda blocks, x: dropping(blocks, x, (*cheap, "fc", "attn.qkv")),
        "layers": lambda blocks, _: checkpoint_layers(blocks, "layers"),
        **{f"Keep({share})": partial(keeping, share) for share in SHARES},
        "torch's checkpoint": lambda blocks, _: Checkpointed(blocks),
        "torch's selective checkpoint": lambda blocks, _: Checkpointed(blocks, selective),
        COMPILED: partial(compiled, 1.0),
        **{f"{COMPILED}, budget {budget}": partial(compiled, budget) for budget in BUDGETS},
    }


def compiled(budget: float, blocks: nn.Sequential, inputs: Tensor) -> nn.Module:
    """Compiled, with torch's budget for what is saved, a part of everything."""
    with config.patch(activation_memory_budget=budget):
        # Else what was compiled for another budget is used again. The option is not in torch's stubs.
        model: Any = torch.compile(blocks, isolate_recompiles=True)  # type: ignore[call-overload]
        model(inputs)
    result: nn.Module = model
    return result


def dropping(blocks: nn.Sequential, inputs: Tensor, names: tuple[str, ...]) -> nn.Module:
    """Modules of these names are dropped."""
    return checkpoint_layers(blocks, Drop(lambda name, _: name.split(".", 1)[-1] in names), example=inputs)


def keeping(share: float, blocks: nn.Sequential, inputs: Tensor) -> nn.Module:
    """Within a part of everything."""
    return checkpoint_layers(blocks, Keep(share), example=inputs)


def step(model: nn.Module, inputs: Tensor) -> None:
    """Forward and backward."""
    inputs.grad = None
    model.zero_grad()
    model(inputs).sum().backward()


def kept(model: nn.Module, inputs: Tensor) -> float:
    """What a block keeps, in activations as wide as it, without what the model gives."""
    given = {tensor.untyped_storage()._cdata for tensor in (inputs, *model.parameters())}
    if isinstance(model, OptimizedModule):  # a dispatch mode would run it as it was before
        saved = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in model(inputs).grad_fn.saved_tensors}
        size = sum(each for storage, each in saved.items() if storage not in given)
    else:
        with Living(given) as living:
            output = model(inputs)
            size = living.bytes() - int(output.untyped_storage().nbytes())
    return float(size) / (TOKENS * WIDTH * 4 * BLOCKS)


if __name__ == "__main__":
    main()
