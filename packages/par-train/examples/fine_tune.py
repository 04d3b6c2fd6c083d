"""Fine-tunes a model of transformers on a file of text, over any number of ranks, and goes on when it was stopped.

    python fine_tune.py Qwen3-0.6B chats.jsonl runs/qwen
    torchrun --nproc-per-node 4 fine_tune.py Qwen3-0.6B chats.jsonl runs/qwen --zero 3 --precision bf16
    torchrun --nproc-per-node 4 fine_tune.py Qwen3-0.6B chats.jsonl runs/qwen --tensor 2 --pipeline 2 --microbatches 4

The text is a line a document, a JSON object with "text", or a conversation under "messages", of which the assistant's
part is learnt. Started again, with as many ranks as you like, it goes on where it stopped, with the rows that it would
have seen. Each folder in runs/qwen/checkpoints opens with AutoModelForCausalLM and AutoTokenizer.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, default_collate

from par_checkpoint import SaveOptions
from par_train import PackedRows, Run, Strategy, read_corpus


def validate(strategy: Strategy, model: nn.Module, rows: PackedRows, most: int) -> float:
    """The mean loss of the targets in some held-out rows, the same on every rank."""
    model.eval()
    size = 1 if strategy.schedule is None else strategy.schedule.microbatches  # a row for each of them
    total, targets = 0.0, 0
    for first in range(0, min(most, rows.count(0)) // size * size, size):
        batch = default_collate([rows[0, row] for row in range(first, first + size)])
        count = int((batch["labels"][:, 1:] != -100).sum())
        total += count * float(strategy.execute_pipeline(iter([batch]), model, None, forward_only=True))
        targets += count
    model.train()
    return total / targets


def main(arguments: list[str] | None = None) -> int:
    """Trains, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model of transformers and its tokenizer")
    parser.add_argument("corpus", help="file to train on")
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step, over all ranks")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--packing", choices=["whole", "stream"], default="whole")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--held-out", type=float, default=0.05, help="part of the documents")
    parser.add_argument("--validate-every", type=int, default=100)
    parser.add_argument("--checkpoint-every", type=int, default=500)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--sequence-parallel", action="store_true", help="they share what is between layers too")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks that have some of the layers each")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline")
    parser.add_argument("--microbatches", type=int, default=1, help="into which a step's rows on a rank are cut")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    with Strategy(
        parallel={
            "pipeline": options.pipeline,
            "tensor": {"size": options.tensor, "mode": "1d", "sequence_parallel": options.sequence_parallel},
        },
        pipeline={"schedule": options.schedule, "microbatches": options.microbatches},
        zero=options.zero,
        precision=options.precision,
        clip_norm=1.0,
        device=options.device,
    ) as strategy:
        corpus = read_corpus(options.corpus, options.model, Path(options.folder) / "data")
        train, held_out = corpus.split(options.held_out)
        rows = PackedRows(corpus, context=options.context, documents=train, packing=options.packing)
        others = PackedRows(corpus, context=options.context, documents=held_out)
        dataloader = DataLoader(rows, batch_size=options.batch_size, sampler=rows.sampler, drop_last=True)
        model = strategy.from_pretrained(options.model, dtype=torch.float32).train()
        optimizer = AdamW(model.parameters(), lr=options.learning_rate)
        lr_scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=20)
        model, optimizer, lr_scheduler, dataloader = strategy.initialize(model, optimizer, lr_scheduler, dataloader)
        with Run(
            options.folder,
            strategy,
            resume="auto",
            checkpoint_every=options.checkpoint_every,
            keep_last=2,
            log_every=1,
            save_options=SaveOptions(assets=[options.model]),
        ) as run:
            for batch in run.steps(dataloader, until=options.steps):
                loss = strategy.execute_pipeline(iter([batch]), model, None, optimizer)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                run.log(loss=loss, tokens=batch["input_ids"].numel())
                if (run.step + 1) % options.validate_every == 0:
                    run.log(validation_loss=validate(strategy, model, others, 64))
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
