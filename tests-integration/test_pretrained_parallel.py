"""A folder of transformers, read into cut stages: what each rank reads, holds and sends on; what is refused."""

import json
import math
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from par_checkpoint import CheckpointError
from par_groups import sharding_of
from par_pipeline.wire.lanes import Lane
from par_train import Strategy

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers", minversion="5.4")

WIDTH, LENGTH, ROWS = 512, 8, 4
TEXT = {
    "vocab_size": 8191,  # divides by no number of ranks
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
HEADER = 512
"""Bytes that par-pipeline puts before the tensors of a message."""
BLOCKS = 3 * 4 * 2**20
"""Bytes beside the tensors: a block for each of the two threads that read what cannot go straight into a tensor, and as
much as one for all else that a call takes, stacks and modules among it; of which 0.5 MB were seen."""


def write_folders(folder):
    """A model of 96 MB, a small one, a folder whose config is of another width, and one without weights."""
    torch.manual_seed(0)
    for name, options in {"model": {}, "small": {"hidden_size": 16, "intermediate_size": 16}}.items():
        config = transformers.LlamaConfig(**{**TEXT, **options})
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    said = json.loads((folder / "model/config.json").read_text())
    for name, width in {"wider": 5 * WIDTH, "empty": 4 * WIDTH}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({**said, "intermediate_size": width}))
    (folder / "wider/model.safetensors").symlink_to(folder / "model/model.safetensors")


def data_read(path, act):
    """What a function gives, and the bytes that this process read meanwhile behind the header of a file."""
    with path.open("rb") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
    original, counts = os.preadv, []

    def counted(file, views, offset, *flags):
        count = original(file, views, offset, *flags)
        counts.append(count if offset >= header else 0)
        return count

    os.preadv = counted
    try:
        return act(), sum(counts)
    finally:
        os.preadv = original


def read_for(parameter):
    """The bytes that are read for a parameter: those of its rows; all, where it is cut by columns.

    Ranks on one machine each read a block that both have columns of, from the page cache, and send nothing.
    """
    (box,) = sharding_of(parameter).boxes
    whole = sharding_of(parameter).shape
    return math.prod(box.size if box.size[1:] == whole[1:] else whole) * parameter.element_size()


def memory(name):
    """Bytes of this process, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def growth(act):
    """What a function gives, and how much more memory this process had meanwhile than before."""
    if sys.platform != "linux":
        return act(), 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    made = act()
    return made, memory("VmHWM") - before


@contextmanager
def messages():
    """A context, and the bytes of each message that this rank's pipeline sends in it."""
    original, sizes = Lane.send, []

    def counted(lane, part, number):
        sizes.append(part.numel() * part.element_size())
        return original(lane, part, number)

    Lane.send = counted
    try:
        yield sizes
    finally:
        Lane.send = original


@pytest.mark.ranks(4, timeout=120)
def test_each_rank_of_a_cut_pipeline_reads_holds_and_sends_its_own(tmp_path):
    if dist.get_rank() == 0:
        write_folders(tmp_path)
    dist.barrier()
    parallel = {"pipeline": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}
    with Strategy(parallel=parallel, pipeline={"microbatches": 2}) as strategy:
        strategy.from_pretrained(tmp_path / "small")  # imports of transformers are no memory of the model
        read, file = strategy.from_pretrained, tmp_path / "model/model.safetensors"
        (model, grown), count = data_read(file, lambda: growth(lambda: read(tmp_path / "model")))
        own = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        assert own < 0.27 * file.stat().st_size
        assert count == sum(map(read_for, model.parameters()))
        assert count < 0.36 * file.stat().st_size
        assert grown < 1.05 * own + BLOCKS

        model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
        strategy.save(model, tmp_path / "saved")
        if dist.get_rank() == 0:
            given = safetensors.load_file(file)
            opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
            assert opened.keys() == given.keys()
            assert all(torch.equal(opened[name], tensor) for name, tensor in given.items())
        dist.barrier()

        ids = torch.randint(8191, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
        for _ in range(2):  # in the second step each rank knows what will come, and sends one message for each tensor
            with messages() as sent:
                strategy.execute_pipeline(iter([{"input_ids": ids}]), model, None, optimizer)
        part = ROWS // 2 * LENGTH // 2 * WIDTH * 4  # bytes of [B, S/2, h] of a microbatch: activations, or gradients
        assert [size - HEADER for size in sent if size > HEADER] == [part] * 2

        with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.weight"):
            read(tmp_path / "wider")
        with pytest.raises(CheckpointError, match="empty"):
            read(tmp_path / "empty")
