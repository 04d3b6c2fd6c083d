"""Trains a vision transformer, written in plain torch, to tell shapes apart; its states are shared by ZeRO.

    python vision_transformer.py runs/vit
    torchrun --nproc-per-node 8 vision_transformer.py runs/vit --zero 3 --precision bf16 --recompute cheap

Start from here with a model that knows nothing of par: any nn.Module is trained over data ranks, at every ZeRO stage.
The images are drawn on the spot, discs, squares and crosses with noise, so nothing is downloaded.
"""

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, Dataset

from par_train import CheckpointPolicy, Run, Strategy

KINDS = ("disc", "square", "cross")


class Shapes(Dataset[tuple[Tensor, Tensor]]):
    """Gray images of one shape each, and which one it is.

    Args:
        count: Number of images.
        size: Pixels along a side.
    """

    def __init__(self, count: int, size: int = 32) -> None:
        self._count, self._size = count, size

    def __len__(self) -> int:
        """The number of images."""
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """An image [1, size, size] and its kind, int64 []; both depend on the index alone."""
        generator = torch.Generator().manual_seed(index)
        kind = index % len(KINDS)
        x, y, radius = (torch.rand(3, generator=generator) * torch.tensor([12.0, 12.0, 4.0])).tolist()
        along = torch.arange(self._size)
        across, down = (along - x - 10).abs()[None, :], (along - y - 10).abs()[:, None]
        inside = {
            "disc": across**2 + down**2 < (radius + 4) ** 2,
            "square": torch.maximum(across.expand(self._size, -1), down.expand(-1, self._size)) < radius + 4,
            "cross": (torch.minimum(across.expand(self._size, -1), down.expand(-1, self._size)) < 1.5)
            & (torch.maximum(across.expand(self._size, -1), down.expand(-1, self._size)) < radius + 5),
        }[KINDS[kind]]
        noise = torch.randn(1, self._size, self._size, generator=generator)
        return inside + 0.3 * noise, torch.tensor(kind)


class ViT(nn.Module):
    """Patches to tokens, an encoder of torch's own, and the mean token to a class.

    Source: Dosovitskiy et al. 2020; here without a class token.

    Args:
        width: Features of a token.
        depth: Number of layers.
        patch: Pixels along a side of a patch.
        size: Pixels along a side of an image.
    """

    def __init__(self, width: int = 64, depth: int = 4, patch: int = 8, size: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(KINDS))

    def forward(self, images: Tensor) -> Tensor:
        """Images [batch, 1, size, size] to logits [batch, kinds]."""
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for layer in self.layers:
            tokens = layer(tokens)
        logits: Tensor = self.head(self.norm(tokens).mean(1))
        return logits


def main(arguments: list[str] | None = None) -> int:
    """Trains, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, over all ranks")
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--recompute", default=None, help="what layers compute again, such as cheap or layers")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    with Strategy(
        zero=options.zero,
        precision=options.precision,
        recompute=options.recompute,
        clip_norm=1.0,
        device=options.device,
    ) as strategy:
        torch.manual_seed(0)  # a plain model has the same weights on all ranks before it is given to the strategy
        model = ViT()
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
        lr_scheduler = LinearLR(optimizer, start_factor=0.05, total_iters=20)
        dataloader = DataLoader(Shapes(3000), batch_size=options.batch_size, shuffle=True, drop_last=True)
        model, optimizer, lr_scheduler, dataloader = strategy.initialize(model, optimizer, lr_scheduler, dataloader)
        with Run(options.folder, strategy, resume="auto", checkpoint=CheckpointPolicy(every=100, keep_last=2)) as run:
            for images, kinds in run.steps(dataloader, until=options.steps):
                logits = model(images)
                loss = cross_entropy(logits, kinds)
                strategy.backward(loss, optimizer)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                run.log(loss=loss, accuracy=(logits.argmax(1) == kinds).float().mean(), images=len(images))
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
