"""A loop of one's own that fine-tunes a model of transformers on a file of text; `par-train run` is one without code.

    python fine_tune.py Qwen3-0.6B chats.jsonl runs/qwen
    torchrun --nproc-per-node 4 fine_tune.py Qwen3-0.6B chats.jsonl runs/qwen --tensor 2 --pipeline 2

Start from here where the loss, the data or the loop are yours: each line is a call of par_train's that stands alone.
Started again, with as many ranks as you like, it goes on where it stopped, with the rows that it would have seen. Each
folder in runs/qwen/checkpoints opens with AutoModelForCausalLM and AutoTokenizer.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from par_checkpoint import Format
from par_data import PackedDataset, read_corpus
from par_train import CheckpointPolicy, Run, Strategy


def main(arguments: list[str] | None = None) -> int:
    """Trains, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model of transformers and its tokenizer")
    parser.add_argument("corpus", help="file to train on")
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step, over all ranks")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--pipeline", type=int, default=1, help="ranks that have some of the layers each")
    parser.add_argument("--sequence", type=int, default=1, help="ranks that have some of the tokens of each row")
    parser.add_argument("--zero", type=int, default=1)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    with Strategy(
        parallel={
            "pipeline": options.pipeline,
            "sequence": options.sequence,
            "tensor": {"size": options.tensor, "mode": "1d"},
        },
        pipeline={"microbatches": options.pipeline},
        zero=options.zero,
        clip_norm=1.0,
        device=options.device,
    ) as strategy:
        corpus = read_corpus(options.corpus, options.model, Path(options.folder) / "data")
        rows = PackedDataset(corpus, context=options.context)
        dataloader = DataLoader(rows, batch_size=options.batch_size, sampler=rows.sampler, drop_last=True)
        model = strategy.from_pretrained(options.model, dtype=torch.float32).train()
        optimizer = AdamW(model.parameters(), lr=options.learning_rate)
        lr_scheduler = LinearLR(optimizer, start_factor=0.1, total_iters=20)
        model, optimizer, lr_scheduler, dataloader = strategy.initialize(model, optimizer, lr_scheduler, dataloader)
        files = Format(assets=[options.model])  # the files of its tokenizer
        with Run(
            options.folder, strategy, resume="auto", checkpoint=CheckpointPolicy(every=500, keep_last=2, format=files)
        ) as run:
            for batch in run.steps(dataloader, until=options.steps):
                loss = strategy.execute_pipeline(iter([batch]), model, None, optimizer)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                run.log(loss=loss, tokens=batch["input_ids"].numel() * options.sequence)
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
