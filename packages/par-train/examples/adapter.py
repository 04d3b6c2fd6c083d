"""A loop of one's own that trains an adapter (LoRA) of a model of transformers, and saves it as peft does.

    python adapter.py Qwen3-0.6B chats.jsonl runs/adapter
    torchrun --nproc-per-node 4 adapter.py Qwen3-0.6B chats.jsonl runs/adapter --tensor 2 --rank 16

Start from here where there is no room for an optimizer of all weights, or where many tasks share one model. The adapter
is peft's own, put around linears that tensor ranks may have cut; what it begins with depends on the seed alone.
runs/adapter/adapter opens with PeftModel.from_pretrained.
"""

import argparse
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from torch.optim import AdamW
from torch.utils.data import DataLoader

from par_data import PackedDataset, read_corpus
from par_train import CheckpointPolicy, Run, Strategy


def main(arguments: list[str] | None = None) -> int:
    """Trains, saves the adapter, and returns the exit code of the process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model of transformers and its tokenizer")
    parser.add_argument("corpus", help="file to train on")
    parser.add_argument("folder", help="folder of the run")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step, over all ranks")
    parser.add_argument("--context", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--rank", type=int, default=8, help="rank of the adapter's matrices")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(arguments)

    with Strategy(
        parallel={"tensor": {"size": options.tensor, "mode": "1d"}}, clip_norm=1.0, device=options.device
    ) as strategy:
        corpus = read_corpus(options.corpus, options.model, Path(options.folder) / "data")
        rows = PackedDataset(corpus, context=options.context)
        dataloader = DataLoader(rows, batch_size=options.batch_size, sampler=rows.sampler, drop_last=True)
        lora = LoraConfig(
            r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = strategy.from_pretrained(options.model, dtype=torch.float32, adapter=lora).train()
        optimizer = AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-3)
        model, optimizer, dataloader = strategy.initialize(model, optimizer, dataloader)
        with Run(options.folder, strategy, resume="auto", checkpoint=CheckpointPolicy(every=100, keep_last=1)) as run:
            for batch in run.steps(dataloader, until=options.steps):
                loss = strategy.execute_pipeline(iter([batch]), model, None, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss, tokens=batch["input_ids"].numel())
        strategy.save(model, Path(options.folder) / "adapter", plan="peft")
        return run.exit_code


if __name__ == "__main__":
    sys.exit(main())
