"""A training loop of one's own, kept alive by `par_train.Run`: a small model learns to undo a rotation.

    python own_loop.py runs/rotation
    torchrun --nproc-per-node 2 own_loop.py runs/rotation --zero 1

Stop it with Ctrl-C, kill its torchrun, or let a cluster send SIGTERM or SIGUSR1: started again, with as many ranks as
you like, it goes on where it stopped. What it has done is in runs/rotation/metrics.jsonl and loss.png.
"""

import argparse
import sys

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from par_train import CheckpointPolicy, LoggingPolicy, Run, Strategy


def rotations(count: int = 512) -> TensorDataset:
    """Points on a circle that turns, and where they were before."""
    angles = torch.linspace(0, 2 * torch.pi, count)
    turned = angles + 0.5
    points, before = ([each.cos(), each.sin()] for each in (turned, angles))
    return TensorDataset(torch.stack(points, dim=1), torch.stack(before, dim=1))


def main(arguments: list[str] | None = None) -> int:
    """Trains, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--zero", type=int, default=0)
    options = parser.parse_args(arguments)

    with Strategy(zero=options.zero, clip_norm=1.0, device="cpu") as strategy:
        model = nn.Sequential(nn.Linear(2, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 2))
        optimizer = AdamW(model.parameters(), lr=1e-2)
        lr_scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=20)
        dataloader = DataLoader(rotations(), batch_size=32, shuffle=True)  # the batch of all ranks together
        model, optimizer, lr_scheduler, dataloader = strategy.initialize(model, optimizer, lr_scheduler, dataloader)
        with Run(
            options.folder,
            strategy,
            resume="auto",
            checkpoint=CheckpointPolicy(every=options.checkpoint_every, keep_last=2),
            logging=LoggingPolicy(every=options.log_every),
        ) as run:
            for inputs, targets in run.steps(dataloader, until=options.steps):
                loss = nn.functional.mse_loss(model(inputs), targets)
                strategy.backward(loss, optimizer)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                run.log(loss=loss, points=len(inputs))
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
