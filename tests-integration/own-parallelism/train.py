"""Trains a small model with a config's options: torchrun --nproc-per-node 4 train.py tensor.py, or alone without."""

import runpy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from par_layers import LayerSet
from par_train import Strategy

KEYS = ("parallel", "pipeline", "gradient_handlers", "plugins")


class Block(nn.Module):
    """An MLP on a normed copy of its input."""

    def __init__(self, layers: LayerSet) -> None:
        super().__init__()
        self.norm = layers.LayerNorm(15)
        self.expand = layers.ColumnLinear(15, 60)
        self.contract = layers.RowLinear(60, 15)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(functional.gelu(self.expand(self.norm(x))))


def samples() -> TensorDataset:
    inputs = torch.randn(64, 15, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.roll(1, dims=-1).sin())


def main(config: str | None = None) -> None:
    given = runpy.run_path(config) if config else {}
    with Strategy(**{key: given[key] for key in KEYS if key in given}) as strategy:
        model = strategy.build([Block(strategy.layers) for _ in range(4)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(samples(), batch_size=16)
        model, optimizer, loader = strategy.initialize(model, optimizer, loader)
        for _ in range(20):
            criterion = functional.mse_loss
            loss = strategy.execute_pipeline(loader, model, criterion, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss, group=strategy.groups["data"])
            if strategy.is_master:
                print(float(loss) / strategy.groups.size("data"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
