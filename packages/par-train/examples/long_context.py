"""Trains on packed documents whose rows are cut over ranks: attention that is exact, whatever a token may see.

    torchrun --nproc-per-node 2 long_context.py runs/long --mode ring
    torchrun --nproc-per-node 8 long_context.py runs/long --sequence 8 --context 131072 --window 4096 --precision bf16

Start from here for sequences that one device has no room for. `strategy.context` cuts a batch, and says to attention
how; all else in the model works on its own tokens, as it would on one device. The rows are made on the spot: documents
that count up from a number, by a step of their own, with no two rows packed alike.
"""

import argparse
import random
import sys
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from par_layers import Context, Mask, Tokens
from par_train import CheckpointPolicy, Run, Strategy

WORDS = 64


class Reader(nn.Module):
    """A decoder with rotary positions that attends over a sequence which ranks share.

    Args:
        context: Attends, and knows where the tokens of this rank stand.
        width: Features of a token.
        depth: Number of layers.
        window: The last tokens that one sees; None: all before it.
    """

    def __init__(self, context: Context, width: int, depth: int, window: int | None) -> None:
        super().__init__()
        self.context, self.heads = context, width // 32
        self.mask = Mask(causal=True, window=window)
        self.embedding, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.query_key_values = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.outputs = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )

    def forward(self, ids: Tensor, tokens: Tokens) -> Tensor:
        """Logits [rows, local tokens, words] of ids [rows, local tokens] that were cut as `tokens` says."""
        hidden = self.embedding(ids)
        places = self.context.positions(tokens).to(ids.device)  # inside each document
        for number, (project, output, mlp) in enumerate(
            zip(self.query_key_values, self.outputs, self.mlps, strict=True)
        ):
            heads = project(self.norms[2 * number](hidden)).unflatten(-1, (3, self.heads, -1))
            query, key, value = heads.unbind(2)
            query, key = rotated(query, places), rotated(key, places)
            mixed = self.context.attention(query, key, value, tokens, mask=self.mask)
            hidden = hidden + output(mixed.flatten(2))
            hidden = hidden + mlp(self.norms[2 * number + 1](hidden))
        logits: Tensor = self.head(self.norms[-1](hidden))
        return logits


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """Heads [rows, tokens, heads, features] turned by their tokens' places. Source: Su et al. 2021 (RoPE)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = (places[..., None] * rates)[:, :, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def packed_rows(rows: int, length: int, step: int) -> tuple[Tensor, list[list[int]]]:
    """Ids [rows, length] of documents that count, and the documents' lengths, the same on all ranks of a replica."""
    drawn = random.Random(step)
    ids, documents = [], []
    for _ in range(rows):
        row, lengths = list[int](), list[int]()
        while len(row) < length:
            size = min(length - len(row), drawn.randint(8, length // 2))
            first, pace = drawn.randrange(WORDS), drawn.randint(1, 5)
            row += [(first + pace * place) % WORDS for place in range(size)]
            lengths.append(size)
        ids.append(row)
        documents.append(lengths)
    return torch.tensor(ids), documents


def main(arguments: list[str] | None = None) -> int:
    """Trains, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=4, help="rows a step, of all replicas")
    parser.add_argument("--context", type=int, default=512, help="tokens in a row")
    parser.add_argument("--window", type=int, default=None, help="the last tokens that one sees; else all")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=2, help="ranks that each row is cut over")
    parser.add_argument("--mode", default="gather", choices=["gather", "ring", "ulysses"])
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    with Strategy(
        parallel={"sequence": {"size": options.sequence, "mode": options.mode}},
        zero=options.zero,
        precision=options.precision,
        clip_norm=1.0,
        device=options.device,
    ) as strategy:
        torch.manual_seed(0)
        context = strategy.context
        model = Reader(context, options.width, options.depth, options.window)
        optimizer = AdamW(model.parameters(), lr=3e-3)
        model, optimizer = strategy.initialize(model, optimizer)
        replica, replicas = strategy.groups.rank("data"), strategy.groups.size("data")
        with Run(options.folder, strategy, resume="auto", checkpoint=CheckpointPolicy(every=50, keep_last=2)) as run:
            for _ in run.steps(count(), until=options.steps):
                place = run.step * replicas + replica
                ids, documents = packed_rows(options.rows // replicas, options.context, place)
                batch = {"ids": ids, "targets": ids}
                batch, tokens = context.cut(batch, documents=documents, masks=(model.mask,), shift=("targets",))
                batch = {name: value.to(strategy.device) for name, value in batch.items()}
                logits = model(batch["ids"], tokens)
                # The last token of a document has no target, so ranks have other numbers of targets, and weigh by them.
                loss = cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
                number = (batch["targets"] != -100).sum()
                strategy.backward(loss / number.clamp(min=1), optimizer, weight=number)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=context.sum(loss.detach()) / context.sum(number.float()), tokens=ids.numel())
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
