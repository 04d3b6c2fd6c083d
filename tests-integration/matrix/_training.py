"""What all configurations train: the model, the data, the loop; and the one process that they follow."""

import functools
import itertools
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from par_data import ShardedDataLoader
from par_layers import Context, ExpertConfig, LayerSet, LoadBalancing, initialize, layer_set, normal
from par_layers.examples import GPT
from par_pipeline import Batch
from par_precision import DynamicScale, MixedOptimizer, mixed
from par_train import Strategy
from par_train.jobs.byte_gpt import fill_, gpt_stages, make_gpt
from par_train.jobs.options import ModelOptions

from ._cases import Case, case
from ._muon import MuonAndMomentum

try:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
except ImportError:  # the cells of a Llama are left out
    LlamaForCausalLM = None

VOCABULARY, WIDTH, HEADS, CONTEXT = 29, 32, 4, 16  # the vocabulary is padded wherever it is cut


class Sizes(NamedTuple):
    """The sizes of a model that are sharded."""

    vocabulary: int
    width: int
    inner: int
    heads: int
    head: int


SMALL = Sizes(VOCABULARY, WIDTH, 48, HEADS, WIDTH // HEADS)
IN_LANES = Sizes(128, 128, 128, 8, 32)
"""Four tensor lanes divide each of them, and so do the key heads of a Llama, half as many."""


BATCH, SAMPLES = 8, 44  # the last batch of an epoch is left out
SEED, CLIP_NORM = 0, 0.5
OURS = ("GPT", "Mixture")  # of the strategy's layers
EXISTING = ("Llama", "Qwen3")  # of transformers, unchanged


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


def tolerance(precision: str, rounding: float = 0.0) -> tuple[float, float]:
    """How far losses and norms may be from those of one process, relative.

    fp32: sums over ranks and microbatches are added in another order; losses measured: 2e-7, norms: 3e-6. Half
    precision: activations are rounded at other places, such as before a sum over ranks. A loss is a mean over many
    tokens, so it is within one rounding of the dtype; a norm, which has no such mean, is within sixteen, or within four
    times what one process's own roundings make of it. At equal weights, gradients over ranks are as near to the exact
    ones as those of one process, 1.2 times at most on average; but some steps of a curve make ten times as much of it.

    Args:
        precision: Of the run.
        rounding: The largest relative difference of norms between one process in this precision and in fp32.
    """
    if precision == "fp32":
        return 1e-5, 3e-5
    eps = torch.finfo(torch.bfloat16 if precision.startswith("bf16") else torch.float16).eps
    return eps, max(16 * eps, 4 * rounding)


class Mixed(nn.Module):
    """A block, and a mixture of experts on a normed copy of what it gives."""

    def __init__(self, layers: LayerSet, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block, self.norm = block, layers.LayerNorm(width)
        balance = LoadBalancing(aux_loss_coef=0.01, scope="sequence")
        self.mixture = layers.MoE(
            width,
            width,
            4,
            2,
            num_shared_experts=1,
            balance=balance,
            init=normal(0.1),
            expert=ExpertConfig(activation="gelu"),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.block(hidden)
        added: Tensor = self.mixture(self.norm(hidden))
        return hidden + added


def gpt(
    layers: LayerSet, blocks: int, *, tied: bool = False, experts: bool = False, sizes: Sizes = SMALL
) -> nn.Sequential:
    """As many layers as blocks, one before and one after them."""
    parts = GPT(layers, sizes.vocabulary, sizes.width, sizes.width // sizes.head, blocks, CONTEXT, tied=tied)
    first = OrderedDict(tokens=parts.tokens, positions=parts.positions)
    last = OrderedDict(norm=parts.norm, head=parts.head)
    between = [Mixed(layers, block, sizes.width) for block in parts.blocks] if experts else parts.blocks
    return nn.Sequential(nn.Sequential(first), *between, nn.Sequential(last))


def existing(kind: str, blocks: int, *, tied: bool = False, sizes: Sizes = SMALL) -> nn.Module:
    """As transformers has it; each rank makes the whole one, with the same weights."""
    torch.manual_seed(SEED)
    make, make_config = {
        "Llama": (LlamaForCausalLM, LlamaConfig),
        "Qwen3": (Qwen3ForCausalLM, Qwen3Config),
    }[kind]
    config = make_config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=blocks,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads // 2,
        head_dim=sizes.head,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
    )
    return make(config).train()


DOCUMENTS = ((5, 2, 9), (16,), (1, 15), (1,) * 16, (8, 1, 7))
"""Lengths of documents in a row; what a row holds decides which it has, so that every order gives it the same."""


def documents_of(row: Tensor) -> tuple[int, ...]:
    return DOCUMENTS[int(row.sum()) % len(DOCUMENTS)]


def cut_by_documents(context: Context) -> Any:
    """What gives a model of packed rows its batch: with no target at the end of a document."""

    def cut(samples: tuple[Tensor, Tensor]) -> Batch:
        inputs, targets = samples
        documents = [documents_of(row) for row in inputs]
        targets = targets.clone()
        for row, lengths in zip(targets, documents, strict=True):
            row[[end - 1 for end in itertools.accumulate(lengths)]] = -100
        counts = (targets >= 0).sum(1)
        (inputs, targets), tokens = context.cut((inputs, targets), documents=documents)
        return Batch((inputs,), {"tokens": tokens}, (targets, counts))

    return cut


def packed(blocks: int, *, tied: bool) -> ModelOptions:
    """The sizes of the GPT of `par-train run`."""
    return ModelOptions(width=WIDTH, layers=blocks, heads=HEADS, context=CONTEXT, tied=tied)


def summed(model: Any, logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses of all targets."""
    return model.layers.cross_entropy(logits, targets, classes=256, reduction="sum")


def alone_by_document(model: Any, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of rows each of whose documents is computed by itself: the mean over all targets."""
    sums, count = [], 0
    for row, following in zip(inputs, targets, strict=True):
        lengths = documents_of(row)
        for one, target in zip(row.split(lengths), following.split(lengths), strict=True):
            sums.append(summed(model, model(one[None, :-1]), target[None, :-1]) if len(one) > 1 else 0.0)
            count += len(one) - 1
    return sum(sums) / count


def as_batch(samples: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Tokens and targets, as a model of transformers under a strategy is given them."""
    inputs, targets = samples
    return {"input_ids": inputs, "shift_labels": targets}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """With an eps above the rounding of gradients: those of key biases are nothing else."""
    return torch.optim.AdamW(model.parameters(), lr=6e-3, eps=1e-6, weight_decay=0.1, fused=True)


def warm_up(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))


def loader(rows: int = BATCH) -> DataLoader[Any]:
    """Random tokens, whose targets are a function of them, so that there is something to learn.

    Args:
        rows: Of a batch.
    """
    generator = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(VOCABULARY, (SAMPLES, CONTEXT), generator=generator)
    targets = (5 * tokens + 3) % VOCABULARY
    return DataLoader(TensorDataset(tokens, targets), batch_size=rows, shuffle=True, drop_last=True)


def endless(batches: ShardedDataLoader) -> Iterator[Any]:
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
    if kind in OURS:
        model: Any = gpt(layers, blocks, tied=tied, experts=kind == "Mixture")
        initialize(model, SEED)
    elif kind == "Packed":
        model = fill_(make_gpt(packed(blocks, tied=tied), layers), SEED)
    else:
        model = existing(kind, blocks, tied=tied)
    model.to(device)
    optimizer: Any = adamw(model)
    scheduler: Any = warm_up(optimizer)
    if precision != "fp32":
        model, optimizer = mixed(model, optimizer, precision, clip_norm=CLIP_NORM, **precision_options(precision))
        scheduler = optimizer.schedule(scheduler)
    data = ShardedDataLoader(loader(), rank=0, num_replicas=1, seed=SEED)
    data.device = torch.device(device)
    batches = endless(data)
    curve = Curve([], [])
    for _ in range(steps):
        inputs, targets = next(batches)
        if kind == "Packed":
            loss = alone_by_document(model, inputs, targets)
        else:
            logits = model(inputs) if kind in OURS else model(input_ids=inputs, use_cache=False).logits
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
    chosen = {"precision": precision, **precision_options(precision)}
    options = {"precision": chosen, "clip_norm": CLIP_NORM, "seed": SEED}
    if device == "cuda":
        device = f"cuda:{(dist.get_rank() if dist.is_initialized() else 0) % torch.cuda.device_count()}"
    return Strategy(**case.options, **options, **further, device=device)


class Run:
    """Training under a strategy, as its README shows it."""

    def __init__(
        self, strategy: Strategy, blocks: int, *, tied: bool = False, model: str = "GPT", muon: bool = False
    ) -> None:
        self.strategy, self.kind, self.count = strategy, model, 1.0
        self.sizes = IN_LANES if strategy.layers.rules.lanes.tensor > 1 else SMALL
        if model == "Packed":
            whole = self.packed(packed(blocks, tied=tied))
        else:
            ours = partial(gpt, strategy.layers, experts=model == "Mixture")
            make = ours if model in OURS else partial(existing, model)
            whole = make(blocks, tied=tied, sizes=self.sizes)
        optimizer = MuonAndMomentum(whole) if muon else adamw(whole)
        lanes = strategy.options.canonical_lanes
        rows = loader(BATCH if lanes is None else lanes.data)  # a lane has one row
        self.model, self.optimizer, batches, self.scheduler = strategy.initialize(
            whole, optimizer, rows, warm_up(optimizer)
        )
        if model in EXISTING:  # whose batches are dicts, which are cut when they are taken
            batches.transform = None
        if model == "Packed":
            batches.transform = cut_by_documents(strategy.context)
        self.batches = map(as_batch, endless(batches)) if model in EXISTING else endless(batches)

    def packed(self, options: ModelOptions) -> nn.Module:
        """The GPT of `par-train run`, or this rank's stages of it."""
        strategy = self.strategy
        model: Any = make_gpt(options, strategy.layers)
        if strategy.schedule is not None:
            model = gpt_stages(model, strategy.schedule, strategy.groups.rank("pipeline"))
        return fill_(model, SEED, strategy.device)

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
        if self.kind == "Packed":
            batch = next(self.batches)
            self.count = float(batch.target[1].sum())
            return strategy.execute_pipeline(iter([batch]), self.model, self.packed_criterion, self.optimizer)
        if strategy.schedule is not None or strategy.options.lanes or self.kind not in OURS:
            criterion = self.criterion if self.kind in OURS else None  # a model of transformers has its own
            return strategy.execute_pipeline(self.batches, self.model, criterion, self.optimizer)
        inputs, targets = next(self.batches)
        loss = self.criterion(self.model(inputs), targets)
        strategy.backward(loss, self.optimizer)
        return loss

    def criterion(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.strategy.layers.cross_entropy(logits, targets, classes=self.sizes.vocabulary)

    def packed_criterion(self, logits: Tensor, target: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The sum over the targets of whole rows, and their number."""
        targets, counts = target
        return self.strategy.layers.cross_entropy(logits, targets, classes=256, reduction="sum"), counts.sum()

    def mean_over_data(self, loss: Tensor) -> float:
        """The mean over the data ranks, which weigh as many targets as they have."""
        both = torch.stack([loss.detach().double() * self.count, loss.new_tensor(self.count, dtype=torch.float64)])
        dist.all_reduce(both, group=self.strategy.groups[self.strategy.data_axes])
        return (both[0] / both[1]).item()
