"""What all configurations train: the model, the data, the loop; and the one process that they follow."""

import functools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from par_layers import LayerSet, initialize, layer_set
from par_layers.examples import GPT
from par_precision import DynamicScale, MixedOptimizer, mixed
from par_train import GlobalDataLoader, Strategy

from ._cases import Case, case
from ._muon import MuonAndMomentum

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:  # the cells of a Llama are left out
    LlamaForCausalLM = None

VOCABULARY, WIDTH, HEADS, CONTEXT = 29, 32, 4, 16  # the vocabulary is padded wherever it is cut
BATCH, SAMPLES = 8, 44  # the last batch of an epoch is left out
SEED, CLIP_NORM = 0, 0.5


class Extent(NamedTuple):
    """How much is computed.

    Attributes:
        steps: Of a curve: six go over the end of an epoch and the growth of the scale of fp16.
        part: Steps between checkpoints: the loss of the second is the first that shows moments and learning rate.
        blocks: Of the GPT, which has two layers more: five or six are cut unevenly into two stages or four.
    """

    steps: int
    part: int
    blocks: int


EXTENTS = {"cover": Extent(steps=6, part=2, blocks=3), "full": Extent(steps=20, part=3, blocks=4)}
"""By what `--matrix` says."""


class Curve(NamedTuple):
    """What a run shows of itself in each step: the mean loss of all its data, and the norm of all gradients."""

    losses: list[float]
    norms: list[float]

    def part(self, start: int, steps: int) -> "Curve":
        return Curve(self.losses[start : start + steps], self.norms[start : start + steps])

    def distance(self, other: "Curve") -> tuple[float, float]:
        """The largest relative differences of losses and norms."""
        return _distance(self.losses, other.losses), _distance(self.norms, other.norms)


def _distance(found: list[float], expected: list[float]) -> float:
    return max(abs(one / two - 1) for one, two in zip(found, expected, strict=True))


def tolerance(precision: str) -> tuple[float, float]:
    """How far losses and norms may be from those of one process, relative.

    fp32: sums over ranks and microbatches are added in another order; losses measured: 2e-7, norms: 3e-6. Half
    precision: activations are rounded at other places, such as before a sum over ranks. A loss is a mean over many
    tokens, so it is within one rounding of the dtype; a norm, which has no such mean, is within sixteen.
    """
    if precision == "fp32":
        return 1e-5, 3e-5
    eps = torch.finfo(torch.bfloat16 if precision.startswith("bf16") else torch.float16).eps
    return eps, 16 * eps


def gpt(layers: LayerSet, blocks: int, *, tied: bool = False) -> nn.Sequential:
    """As many layers as blocks, one before and one after them."""
    parts = GPT(layers, VOCABULARY, WIDTH, HEADS, blocks, CONTEXT, tied=tied)
    first = OrderedDict(tokens=parts.tokens, positions=parts.positions)
    last = OrderedDict(norm=parts.norm, head=parts.head)
    return nn.Sequential(nn.Sequential(first), *parts.blocks, nn.Sequential(last))


def llama(blocks: int, *, tied: bool = False) -> nn.Module:
    """As transformers has it; each rank makes the whole one, with the same weights."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=blocks,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).train()


def as_batch(samples: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Tokens and targets, as a model of transformers under a strategy is given them."""
    inputs, targets = samples
    return {"input_ids": inputs, "shift_labels": targets}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """With an eps above the rounding of gradients: those of key biases are nothing else."""
    return torch.optim.AdamW(model.parameters(), lr=6e-3, eps=1e-6, weight_decay=0.1, fused=True)


def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))


def loader() -> DataLoader[Any]:
    """Random tokens, whose targets are a function of them, so that there is something to learn."""
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT), generator=generator)
    targets = (5 * tokens + 3) % VOCABULARY
    return DataLoader(TensorDataset(tokens, targets), batch_size=BATCH, shuffle=True, drop_last=True)


def endless(batches: GlobalDataLoader) -> Iterator[Any]:
    while True:
        yield from batches


def precision_options(precision: str) -> dict[str, Any]:
    """The scale of fp16 grows once, after four steps."""
    return {"scale": DynamicScale(init=2.0**10, interval=4, max=2.0**11)} if precision.startswith("fp16") else {}


@functools.cache
def one_process(
    precision: str, steps: int, blocks: int, device: str, *, tied: bool, model: str = "GPT", muon: bool = False
) -> Curve:
    """What all others follow. To be left as it is.

    Where matrices are stepped as wholes, it is a strategy of one rank: only there are q, k and v, which lie in one
    weight, matrices of their own.
    """
    if not muon:
        return train_alone(precision, steps, blocks, device, tied=tied, kind=model)[0]
    with strategy_of(case(tied=tied, model=model, muon=True), precision, device) as strategy:
        return Run(strategy, blocks, tied=tied, model=model, muon=True).train(steps)


def train_alone(
    precision: str, steps: int, blocks: int, device: str, *, tied: bool, kind: str = "GPT"
) -> tuple[Curve, nn.Module]:
    """Trains without a strategy: in fp32 in torch's own way, else with par-precision."""
    layers = layer_set(None)
    model: Any = gpt(layers, blocks, tied=tied) if kind == "GPT" else llama(blocks, tied=tied)
    if kind == "GPT":
        initialize(model, SEED)
    model.to(device)
    optimizer: Any = adamw(model)
    scheduler: Any = warm_up(optimizer)
    if precision != "fp32":
        model, optimizer = mixed(model, optimizer, precision, clip_norm=CLIP_NORM, **precision_options(precision))
        scheduler = optimizer.schedule(scheduler)
    data = GlobalDataLoader(loader(), replica=0, replicas=1, seed=SEED)
    data.device = torch.device(device)
    batches = endless(data)
    curve = Curve([], [])
    for _ in range(steps):
        inputs, targets = next(batches)
        logits = model(inputs) if kind == "GPT" else model(input_ids=inputs, use_cache=False).logits
        loss = layers.cross_entropy(logits, targets, classes=VOCABULARY)
        norm = step_alone(model, optimizer, loss)
        scheduler.step()
        optimizer.zero_grad()
        curve.losses.append(loss.item())
        curve.norms.append(norm.item())
    return curve, model


def step_alone(model: nn.Module, optimizer: Any, loss: Tensor) -> Tensor:
    if isinstance(optimizer, MixedOptimizer):
        optimizer.backward(loss)
        return optimizer.step().grad_norm
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), CLIP_NORM)
    optimizer.step()
    return norm


def strategy_of(case: Case, precision: str, device: str, **further: Any) -> Strategy:
    """On GPUs, ranks beyond their number share them, which gloo allows."""
    options = {"precision": precision, "mixed": precision_options(precision), "clip_norm": CLIP_NORM, "seed": SEED}
    if device == "cuda":
        device = f"cuda:{(dist.get_rank() if dist.is_initialized() else 0) % torch.cuda.device_count()}"
    return Strategy(**case.options, **options, **further, device=device)


class Run:
    """Training under a strategy, as its README shows it."""

    def __init__(
        self, strategy: Strategy, blocks: int, *, tied: bool = False, model: str = "GPT", muon: bool = False
    ) -> None:
        self.strategy, self.kind = strategy, model
        whole = gpt(strategy.layers, blocks, tied=tied) if model == "GPT" else llama(blocks, tied=tied)
        optimizer = MuonAndMomentum(whole) if muon else adamw(whole)
        self.model, self.optimizer, batches, self.scheduler = strategy.initialize(
            whole, optimizer, loader(), warm_up(optimizer)
        )
        if model == "Llama":  # whose batches are dicts, which are cut when they are taken
            batches.cut = None
        self.batches = endless(batches) if model == "GPT" else map(as_batch, endless(batches))

    def train(self, steps: int) -> Curve:
        curve = Curve([], [])
        for _ in range(steps):
            loss = self.backward()
            norm = self.optimizer.step().grad_norm
            self.scheduler.step()
            self.optimizer.zero_grad()
            curve.losses.append(self.mean_over_data(loss))
            curve.norms.append(norm.item())
        return curve

    def backward(self) -> Tensor:
        """Forward and backward of the next batch; its loss on this data rank."""
        strategy = self.strategy
        if strategy.schedule is not None or self.kind != "GPT":
            criterion = self.criterion if self.kind == "GPT" else None  # a model of transformers has its own
            return strategy.execute_pipeline(self.batches, self.model, criterion, self.optimizer)
        inputs, targets = next(self.batches)
        loss = self.criterion(self.model(inputs), targets)
        strategy.backward(loss, self.optimizer)
        return loss

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.strategy.layers.cross_entropy(logits, targets, classes=VOCABULARY)

    def mean_over_data(self, loss: Tensor) -> float:
        groups = self.strategy.groups
        total = loss.detach().double()
        dist.all_reduce(total, group=groups["data"])
        return total.item() / groups.size("data")
