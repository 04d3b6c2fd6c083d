"""Trains a mixture of experts on sums, alike on any ranks: each token goes to two of eight experts, wherever they live.

    torchrun --nproc-per-node 2 mixture_of_experts.py runs/mixture --expert 2
    torchrun --nproc-per-node 8 mixture_of_experts.py runs/mixture --expert 8 --zero 3 --precision bf16
    torchrun --nproc-per-node 4 mixture_of_experts.py runs/mixture --expert 2 --tensor 2

Start from here for experts in a model of your own. `strategy.layers.MoE` is a layer as any other; what keeps experts
busy hangs on it, and needs no word in the loop. With tensor ranks experts are folded into these, and whole on each. The
task is made on the spot: the sum of two digits, modulo a number that a token before them names.
"""

import argparse
import sys
from itertools import count

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from par_layers import LayerSet, LoadBalancing, RouterConfig, normal
from par_train import CheckpointPolicy, Run, Strategy

WORDS, LENGTH = 32, 3


class Block(nn.Module):
    """Attention and a mixture of experts, each on a normed copy of the residual stream."""

    def __init__(self, layers: LayerSet, width: int, experts: int) -> None:
        super().__init__()
        self.layers, self.head = layers, width // 4
        self.attention_norm, self.mixture_norm = layers.LayerNorm(width), layers.LayerNorm(width)
        self.query_key_value = layers.ColumnLinear(width, 3 * width, blocks=3, unit=self.head)
        self.output = layers.RowLinear(width, width)
        balance = LoadBalancing(aux_loss_coef=1e-3, scope="sequence", bias_update_rate=1e-3)
        self.mixture = layers.MoE(
            width,
            2 * width,
            experts,
            2,
            num_shared_experts=1,
            balance=balance,
            router=RouterConfig(correction_bias=True),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, width] to the same."""
        query, key, value = self.query_key_value.parts(self.query_key_value(self.attention_norm(hidden)))
        hidden = hidden + self.output(self.layers.attention(query, key, value, head=self.head, causal=True))
        added: Tensor = self.mixture(self.mixture_norm(hidden))
        return hidden + added


class Adder(nn.Module):
    """Reads a modulus and two digits, and says their sum at the last place."""

    def __init__(self, layers: LayerSet, width: int, depth: int, experts: int) -> None:
        super().__init__()
        self.tokens = layers.VocabEmbedding(WORDS, width, init=normal(0.1))
        self.positions = layers.PositionEmbedding(LENGTH, width, init=normal(0.1))
        self.blocks = nn.ModuleList(Block(layers, width, experts) for _ in range(depth))
        self.norm, self.head = layers.LayerNorm(width), layers.VocabClassifier(width, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of ids [B, S]."""
        hidden = self.positions(self.tokens(ids))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def sums() -> TensorDataset:
    """Ids [rows, 3], and targets that count at the last place alone."""
    every = torch.cartesian_prod(torch.arange(2, 10), torch.arange(10), torch.arange(10))
    targets = torch.full_like(every, -100)
    targets[:, -1] = every[:, 1:].sum(1) % every[:, 0]
    ids = torch.cat([every[:, :1] + 10, every[:, 1:]], 1)
    return TensorDataset(ids, targets)


def main(arguments: list[str] | None = None) -> int:
    """Trains, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="rows a step, of all ranks together")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--expert", type=int, default=1, help="parts that experts are dealt out in")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each dense layer")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--recompute", default=None)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    with Strategy(
        parallel={
            "expert": {"size": options.expert, "tensor": 1},
            "tensor": {"size": options.tensor, "mode": "1d"},
        },
        zero=options.zero,
        recompute=options.recompute,
        precision=options.precision,
        clip_norm=1.0,
        device=options.device,
    ) as strategy:
        model = Adder(strategy.layers, options.width, options.depth, options.experts)
        optimizer = AdamW(model.parameters(), lr=3e-3, eps=1e-6)
        loader = DataLoader(sums(), batch_size=options.batch_size, shuffle=True, drop_last=True)
        model, optimizer, loader = strategy.initialize(model, optimizer, loader)
        with Run(options.folder, strategy, resume="auto", checkpoint=CheckpointPolicy(every=100, keep_last=2)) as run:
            for _ in run.steps(count(), until=options.steps):
                ids, targets = next(iter(loader))
                loss = strategy.layers.cross_entropy(model(ids), targets, classes=WORDS)
                strategy.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss, imbalance=strategy.router_metrics(model)["imbalance"], rows=len(ids))
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
