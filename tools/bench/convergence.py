"""A small byte-level GPT, trained from the same weights on the same bytes in every precision.

Run as `python tools/bench/convergence.py`; writes docs/benchmarks/convergence.md, .json and .png.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from _table import FOLDER, write
from _transformer import Block
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from par_precision import mixed
from par_train.jobs.options import DataOptions
from par_train.jobs.text import read_text

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {},
    "bf16-amp": {},
    "fp16": {},
    "fp16-amp": {},
    "bf16-sr": {},
    "bf16-sr, fp32 moments": {"moments": torch.float32},
    "fp8": {},
    "bf16 alone": {},
}
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 16
STEPS, WARMUP, RATE, SMOOTH = 300, 30, 1e-3, 20


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training in one precision.

    Args:
        losses: Loss of each step, in nats a byte.
        held_out: Loss on held-out bytes at the end.
        skipped: Number of steps that were skipped.
        milliseconds: Median of a step.
    """

    losses: list[float]
    held_out: float
    skipped: int
    milliseconds: float


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for each in self.modules():
            if isinstance(each, nn.Linear | nn.Embedding):
                nn.init.normal_(each.weight, std=0.02)

    def forward(self, given: Tensor) -> Tensor:
        """Logits, (batch, time, 256), of bytes as int64, (batch, time)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(given) + self.positions)))
        return logits


def main() -> None:
    """Trains in every precision; writes the table and the plot."""
    text = read_text(DataOptions())
    train, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (text.train, text.held_out))
    runs = {name: trained(name, options, train, held_out) for name, options in PRECISIONS.items()}
    reference = runs["fp32"].held_out
    rows = [
        {
            "precision": name,
            "last 20 steps": f"{statistics.mean(run.losses[-20:]):.4f}",
            "held out": f"{run.held_out:.4f}",
            "against fp32": f"{100 * (run.held_out / reference - 1):+.2f} %",
            "skipped": run.skipped,
            "ms a step": round(run.milliseconds, 1),
        }
        for name, run in runs.items()
    ]
    note = (
        f"Each precision trains {LAYERS} blocks of width {WIDTH} for {STEPS} steps on the sources of Python's standard "
        f"library. A step has {BATCH} windows of {CONTEXT} bytes. All runs have equal initial weights and batches, "
        'fused AdamW and gradient clipping. Losses are in nats per byte. The baseline "bf16 alone" has bf16 weights '
        "and moments, rounded to nearest, without master weights. The times are from a CPU, which is slow at fp16 and "
        "float8.\n\n"
        "![Losses](convergence.png)"
    )
    plot(runs)
    write("convergence", "Convergence by precision", rows, note)


def trained(name: str, options: Mapping[str, Any], train: Tensor, held_out: Tensor) -> Run:
    """Trains from weights and on batches that are the same for all precisions."""
    torch.manual_seed(0)
    module, step, skipped = prepared(name, options)
    losses, times = [], []
    for given, wanted in windows(train, STEPS, seed=1):
        start = time.perf_counter()
        loss = loss_of(module, given, wanted)
        step(loss)
        losses.append(loss.item())
        times.append(time.perf_counter() - start)
    with torch.no_grad():
        validation = [loss_of(module, given, wanted).item() for given, wanted in windows(held_out, 32, seed=2)]
    return Run(
        losses=losses,
        held_out=statistics.mean(validation),
        skipped=skipped(),
        milliseconds=1000 * statistics.median(times),
    )


def prepared(name: str, options: Mapping[str, Any]) -> tuple[nn.Module, Callable[[Tensor], None], Callable[[], int]]:
    """A model, what makes a step of a loss, and how many steps were skipped so far."""
    model = GPT()
    if name == "bf16 alone":
        model = model.bfloat16()
    plain = AdamW(model.parameters(), lr=RATE, weight_decay=0.1, fused=True)
    precision = "fp32" if name == "bf16 alone" else name.partition(",")[0]
    module, optimizer = mixed(model, plain, precision, clip_norm=1.0, **options)
    scheduler = optimizer.schedule(LambdaLR(optimizer, rate))
    counted: list[Tensor] = []

    def step(loss: Tensor) -> None:
        optimizer.backward(loss)
        counted.append(optimizer.step().skipped)
        scheduler.step()
        optimizer.zero_grad()

    return module, step, lambda: int(torch.stack(counted).sum())


def rate(step: int) -> float:
    """Part of the peak learning rate: linear warm-up, then a cosine down to 5 %."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2


def windows(text: Tensor, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches at random places, and what follows each of their bytes."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        places = torch.randint(len(text) - CONTEXT, (BATCH,), generator=generator)
        batch = text[places[:, None] + torch.arange(CONTEXT + 1)].long()
        yield batch[:, :-1], batch[:, 1:]


def loss_of(module: nn.Module, given: Tensor, wanted: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte, in fp32."""
    return functional.cross_entropy(module(given).float().flatten(0, 1), wanted.flatten())


def plot(runs: Mapping[str, Run]) -> None:
    """Losses, and how far each is from that of fp32; means over 20 steps."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    reference = smooth(runs["fp32"].losses)
    for name, run in runs.items():
        losses = smooth(run.losses)
        steps = range(SMOOTH, len(run.losses) + 1)
        style = {"label": name, "linewidth": 1.5, "linestyle": "--" if name == "bf16 alone" else "-"}
        left.plot(steps, losses, **style)
        right.plot(steps, [100 * (loss / base - 1) for loss, base in zip(losses, reference, strict=True)], **style)
    left.set(title="Training loss", xlabel="step", ylabel="nats a byte")
    right.set(title="Against fp32", xlabel="step", ylabel="%", ylim=(-1, 4))
    right.legend(ncols=2, fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(FOLDER / "convergence.png", dpi=120)


def smooth(losses: list[float]) -> list[float]:
    """Means of as many steps as there are."""
    return [statistics.mean(losses[last - SMOOTH : last]) for last in range(SMOOTH, len(losses) + 1)]


if __name__ == "__main__":
    main()
