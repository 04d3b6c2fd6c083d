"""Folders of transformers, read over two ranks in new processes: seconds, memory and bytes of a rank."""

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _ranks import spawned
from _table import Section
from _turns import quartile, ratio, shuffled
from torch import Tensor
from tqdm import tqdm

from par_train import Strategy

RANKS, TURNS = 2, 7
WHOLE, THEIRS, OURS = "whole on one rank", "transformers", "Strategy.from_pretrained"
LARGE: dict[str, Any] = {
    "vocab_size": 24_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SMALL = {**LARGE, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SHARD = "100MB"
SAMPLED = 0.001  # seconds between two looks at the memory
MODULES = ("torch", "transformers.models.llama.modeling_llama", "par_train")  # a new process has imported these


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one rank took to load a folder, or the most of all ranks, until its parameters are memory of its own.

    Args:
        seconds: Seconds from the first rank's begin to the last one's end.
        spent: CPU seconds, those of threads and of the system's part included.
        own: Bytes of the rank's parameters.
        resident: Most bytes resident at a time, less those before; pages of files that are mapped count.
        anonymous: Most bytes of memory that no file stands behind, less those before; 0 where nobody looked.
        read: Bytes that read calls gave.
        mapped: Most bytes of mapped files at a time, less those before; 0 where nobody looked.
    """

    seconds: float
    spent: float
    own: float
    resident: float
    anonymous: float
    read: float
    mapped: float


def loading(turns: int = TURNS) -> Section:
    """Loads a folder with every contender in turn, and gives the table.

    Args:
        turns: How often every contender loads for its time, and again for its memory.
    """
    multiprocessing.set_forkserver_preload(list(MODULES))
    timed: dict[str, list[Loaded]] = {name: [] for name in (WHOLE, THEIRS, OURS)}
    watched: dict[str, list[Loaded]] = {name: [] for name in timed}
    with tempfile.TemporaryDirectory(prefix="par-bench-") as folder:
        for name, sizes in (("large", LARGE), ("small", SMALL)):
            spawned(1, write_folder, str(Path(folder, name)), sizes, start_method="forkserver")
        size = sum(file.stat().st_size for file in Path(folder, "large").glob("*.safetensors"))
        files = len(list(Path(folder, "large").glob("*.safetensors")))
        for turn in tqdm(range(-1, turns), desc="loading", unit="turn"):
            for name in shuffled(list(timed), turn):
                for found, looking in ((timed, False), (watched, True)):
                    ranks = 1 if name == WHOLE else RANKS
                    values = spawned(ranks, loaded, name, folder, looking, start_method="forkserver")
                    if turn >= 0:
                        found[name].append(Loaded(**values))
    rows = [row(name, timed, watched[name]) for name in timed]
    note = (
        f"A Llama of {size / 1e6:.0f} MB in bf16 with random weights, in {files} safetensors files, all in the page "
        f"cache: {LARGE['num_hidden_layers']} layers of {LARGE['hidden_size']}, {LARGE['vocab_size']} words. Each load "
        f"is in processes of its own that have imported everything, and have loaded a tiny folder in the same way; "
        f"{turns} turns for times, and as many for memory. The clock runs from the first rank's begin until each page "
        f"of the parameters is written to on all ranks, for what is mapped from a file is not loaded yet. "
        f"{RANKS} gloo ranks, one thread for torch each; medians of the rank that takes most. Own MB: what a rank's "
        f"parameters take. Own memory is resident memory that no file stands behind, read from /proc/self/statm every "
        f"{1000 * SAMPLED:.0f} ms; resident is the system's own peak (VmHWM), in which pages of mapped files count; "
        f"both less what there was before. Read MB: what read calls gave; mapped MB: the most pages of files at a time."
    )
    return Section(title="Loading a folder", note=note, rows=rows)


def row(name: str, timed: Mapping[str, Sequence[Loaded]], watched: Sequence[Loaded]) -> dict[str, str]:
    """A contender's line of the table.

    Args:
        name: The contender.
        timed: By contender: the loads that nobody looked at.
        watched: The contender's loads whose memory was looked at.
    """
    seconds, base = ([each.seconds for each in timed[which]] for which in (name, THEIRS))
    spent, base_spent = ([each.spent for each in timed[which]] for which in (name, THEIRS))
    return {
        "contender": name,
        "median s": f"{statistics.median(seconds):.3f}",
        "quartiles s": f"{quartile(seconds, 1):.3f} to {quartile(seconds, 3):.3f}",
        "to transformers": f"{ratio(seconds, base):.2f}",
        "CPU to transformers": f"{ratio(spent, base_spent):.2f}",
        "own MB": f"{watched[0].own / 1e6:.0f}",
        "own memory, peak / own": f"{statistics.median(each.anonymous / each.own for each in watched):.2f}",
        "resident, peak / own": f"{statistics.median(each.resident / each.own for each in watched):.2f}",
        "read MB": f"{statistics.median(each.read for each in watched) / 1e6:.0f}",
        "mapped MB": f"{statistics.median(each.mapped for each in watched) / 1e6:.0f}",
    }


def write_folder(folder: str, sizes: Mapping[str, Any]) -> None:
    """Writes a Llama with random weights in bf16."""
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=SHARD)


def loaded(name: str, folder: str, looking: bool) -> dict[str, float]:
    """Loads the folder on this rank, and gives the most that any rank took, by the names of `Loaded`.

    Args:
        name: The contender.
        folder: Where the folders are.
        looking: Whether memory is looked at meanwhile, which takes some time.
    """
    warm(Path(folder, "large"))
    with ExitStack() as ends:
        load = loader(name, ends)
        load(str(Path(folder, "small")))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        pages = Pages()
        before, read = status("VmRSS"), read_bytes()
        dist.barrier()
        begin, spent = time.perf_counter(), time.process_time()
        if looking:
            pages.start()
        model = load(str(Path(folder, "large")))
        own = [local(parameter) for parameter in model.parameters()]
        for tensor in own:
            touch_(tensor)
        taken = time.process_time() - spent
        dist.barrier()
        seconds = time.perf_counter() - begin
        if looking:
            pages.stop()
        found = Loaded(
            seconds=seconds,
            spent=taken,
            own=sum(tensor.numel() * tensor.element_size() for tensor in own),
            resident=status("VmHWM") - before,
            anonymous=pages.anonymous,
            read=read_bytes() - read,
            mapped=pages.mapped,
        )
        most = torch.tensor(astuple(found), dtype=torch.float64)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(found.__dataclass_fields__, most.tolist(), strict=True))


def loader(name: str, ends: ExitStack) -> Callable[[str], Any]:
    """What loads a folder, ready to do so.

    Args:
        name: The contender.
        ends: Ends what it starts.
    """
    if name == OURS:
        strategy = ends.enter_context(Strategy(parallel={"tensor": {"size": RANKS, "mode": "1d"}}, device="cpu"))
        return strategy.from_pretrained
    read: Any = transformers.LlamaForCausalLM.from_pretrained
    if name == WHOLE:
        return partial(read, dtype="auto")
    over: Any = import_module("transformers.distributed")
    return partial(read, distributed_config=over.DistributedConfig(tp_size=RANKS), dtype="auto")


def local(parameter: Any) -> Tensor:
    """What this rank has of a parameter."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part.detach()


def touch_(tensor: Tensor) -> None:
    """Writes to every page of a tensor, which then is memory of this process alone; the values stay."""
    if tensor.is_contiguous():
        tensor.view(-1).view(torch.uint8)[::4096].bitwise_or_(0)
    else:
        tensor.mul_(1)


def warm(folder: Path) -> None:
    """Reads all files, so that they lie in the page cache."""
    room = bytearray(1 << 20)
    for file in folder.iterdir():
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(room):
                pass


def status(name: str) -> int:
    """Bytes, as the system counts them for this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def read_bytes() -> int:
    """Bytes that this process has read by calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


class Pages:
    """Looks at the memory of this process again and again, in a thread.

    Attributes:
        anonymous: The most bytes that no file stands behind, less those at the start.
        mapped: The most bytes of mapped files, less those at the start.
    """

    def __init__(self) -> None:
        self.anonymous = self.mapped = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Looks once more, and ends."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        with Path("/proc/self/statm").open("rb", buffering=0) as file:
            first: tuple[int, int] | None = None
            while True:
                ended = self._ended.is_set()
                _, resident, shared, *_ = map(int, os.pread(file.fileno(), 200, 0).split())
                first = first or (resident - shared, shared)
                self.anonymous = max(self.anonymous, (resident - shared - first[0]) * page)
                self.mapped = max(self.mapped, (shared - first[1]) * page)
                if ended:
                    return
                self._ended.wait(SAMPLED)
