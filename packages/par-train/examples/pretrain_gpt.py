"""Pretrains a small GPT on the bytes of text files, over data, tensor and sequence ranks.

    python pretrain_gpt.py runs/gpt
    torchrun --nproc-per-node 2 pretrain_gpt.py runs/gpt --tensor 2
    torchrun --nproc-per-node 8 pretrain_gpt.py runs/gpt --tensor 2 --zero 3 --precision bf16 --recompute cheap

Start from here to pretrain a model of your own: it is written once, against `strategy.layers`, and runs in every tensor
mode. The text is the sources of Python's standard library, which are on every machine.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

from par_layers import LayerSet, normal
from par_train import CheckpointPolicy, Run, Strategy


class Block(nn.Module):
    """Attention and MLP, each on a normed copy of the residual stream.

    Args:
        layers: The layers of a tensor mode.
        width: Features of the residual stream.
        heads: Number of attention heads.
    """

    def __init__(self, layers: LayerSet, width: int, heads: int) -> None:
        super().__init__()
        self.layers, self.head = layers, width // heads
        self.attention_norm, self.mlp_norm = layers.LayerNorm(width), layers.LayerNorm(width)
        self.query_key_value = layers.ColumnLinear(width, 3 * width, blocks=3, unit=self.head, init=normal(0.02))
        self.output = layers.RowLinear(width, width, init=normal(0.02))
        self.mlp = nn.Sequential(
            layers.ColumnLinear(width, 4 * width, init=normal(0.02)),
            nn.GELU(),
            layers.RowLinear(4 * width, width, init=normal(0.02)),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, time, width] to the same."""
        query, key, value = self.query_key_value.parts(self.query_key_value(self.attention_norm(hidden)))
        hidden = hidden + self.output(self.layers.attention(query, key, value, head=self.head, causal=True))
        mixed: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return mixed


class GPT(nn.Module):
    """Predicts the next byte.

    Args:
        layers: The layers of a tensor mode.
        width: Features of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads.
        context: The longest window of bytes.
    """

    def __init__(self, layers: LayerSet, width: int, depth: int, heads: int, context: int) -> None:
        super().__init__()
        self.layers = layers
        self.bytes = layers.VocabEmbedding(256, width, init=normal(0.02))
        self.positions = layers.PositionEmbedding(context, width, init=normal(0.02))
        self.blocks = nn.ModuleList(Block(layers, width, heads) for _ in range(depth))
        self.norm = layers.LayerNorm(width)
        self.head = layers.VocabClassifier(width, 256, init=normal(0.02))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of windows of bytes, both int64 [batch, time]."""
        hidden = self.positions(self.bytes(inputs))
        for block in self.blocks:
            hidden = block(hidden)
        return self.layers.cross_entropy(self.head(self.norm(hidden)), targets, classes=256)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of bytes, and the bytes that come one further.

    Args:
        text: All bytes.
        context: Bytes in a window.
    """

    def __init__(self, text: bytes, context: int) -> None:
        self._text, self._context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        """The number of windows."""
        return (len(self._text) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """A window, twice int64 [time]."""
        window = self._text[index * self._context :][: self._context + 1].long()
        return window[:-1], window[1:]


def main(arguments: list[str] | None = None) -> int:
    """Trains, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="windows a step, over all ranks")
    parser.add_argument("--context", type=int, default=128, help="bytes in a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--files", type=int, default=200, help="source files to read")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--mode", default="1d", help="how they share it: 1d, 2d, 2.5d or 3d")
    parser.add_argument("--sequence", type=int, default=1, help="ranks that have some of each window's bytes")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--recompute", default=None, help="what layers compute again, such as cheap or keep:2GB")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    with Strategy(
        parallel={"sequence": options.sequence, "tensor": {"size": options.tensor, "mode": options.mode}},
        zero=options.zero,
        precision=options.precision,
        recompute=options.recompute,
        clip_norm=1.0,
        device=options.device,
    ) as strategy:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: options.files]
        windows = Windows(b"".join(path.read_bytes() for path in sources), options.context)
        dataloader = DataLoader(windows, batch_size=options.batch_size, shuffle=True, drop_last=True)
        model = GPT(strategy.layers, options.width, options.depth, options.width // 32, options.context)
        optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.1)
        lr_scheduler = LinearLR(optimizer, start_factor=0.05, total_iters=40)
        model, optimizer, lr_scheduler, dataloader = strategy.initialize(model, optimizer, lr_scheduler, dataloader)
        with Run(options.folder, strategy, resume="auto", checkpoint=CheckpointPolicy(every=200, keep_last=2)) as run:
            for inputs, targets in run.steps(dataloader, until=options.steps):
                loss = model(inputs, targets)
                strategy.backward(loss, optimizer)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                run.log(loss=loss, bytes=inputs.numel() * options.sequence)
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
