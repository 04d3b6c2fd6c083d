"""Seconds and memory to plan checkpoints of Llama 3.1 405B and of DeepSeek-V3, with their Adam, on one of 4,096 ranks.

The other ranks are simulated: what each of them would tell is made by the code that tells it, and the rank under
measurement, a process of its own, gets it as it would over the network. It decodes, merges and checks all claims, lays
out the files and lists its part of a save and of a load; then it does so again, from the digest of all claims.

Run as `python tools/bench/planning.py`; writes docs/benchmarks/planning.md and .json.
"""

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from _table import write

from par_checkpoint.format.crc import Crc, decode_crcs, encode_crcs
from par_checkpoint.format.manifest import FileRecord, Manifest, encode_manifest
from par_checkpoint.plan.coverage import check_covered
from par_checkpoint.plan.files import File, data_areas, join_crcs, lay_out
from par_checkpoint.plan.plan import BlockPlanner
from par_checkpoint.plan.tasks import AssignedRun, RankPlan
from par_checkpoint.transfer.exchange import claims_of_all, words_of
from par_checkpoint.transfer.ranks import Ranks, _halves
from par_checkpoint.transfer.sessions import Session
from par_groups import Claims, GlobalTensor, cut, merge_claims, whole
from par_groups.sharding.held import Tensors

RANKS, HOST = 4096, 8
MEASURED = (0, 1, 2047, 4095)
LAYERS, HIDDEN, WIDE, KEYS, VOCABULARY = 126, 16384, 53248, 1024, 128256
MIXTURE_LAYERS, EXPERTS = 61, 256

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
Boxes = list[tuple[int, Shape, Shape]]
Layout = Callable[[int], Claims]
"""What a rank claims."""

SLOTS = ("master", "exp_avg", "exp_avg_sq")


@lru_cache(maxsize=32)
def parameters(layers: range = range(LAYERS), *, ends: bool = True) -> dict[str, Shape]:
    """Shapes by name, in the order of the state dict."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)} if ends else {}
    for layer in layers:
        of_layer = {
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (KEYS, HIDDEN),
            "self_attn.v_proj": (KEYS, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (WIDE, HIDDEN),
            "mlp.up_proj": (WIDE, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDE),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes | ({"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)} if ends else {})


@lru_cache(maxsize=32)
def tensors_of(named: tuple[tuple[str, Shape], ...]) -> tuple[tuple[str, torch.dtype, Shape], ...]:
    """The model in bf16, then master, both moments in fp32 and the count of steps of each parameter."""
    model = [(f"model:{name}", torch.bfloat16, shape) for name, shape in named]
    state = [
        entry
        for name, shape in named
        for entry in (
            *((f"optimizer:{name}.{slot}", torch.float32, shape) for slot in SLOTS),
            (f"optimizer:{name}.step", torch.float32, ()),
        )
    ]
    return (*model, *state)


def claimed(shapes: dict[str, Shape], model: Callable[[str], list[Box]], state: Callable[[str], list[Box]]) -> Claims:
    """The claims of a rank that has these boxes of each parameter and of each slot."""
    boxes: Boxes = [(number, *box) for number, name in enumerate(shapes) for box in model(name)]
    for number, name in enumerate(shapes):
        first = len(shapes) + number * (len(SLOTS) + 1)
        found = state(name)
        boxes += [(first + slot, *box) for slot in range(len(SLOTS)) for box in found]
        boxes += [(first + len(SLOTS), (), ())] if found else []
    return Claims.of_boxes(tensors_of(tuple(shapes.items())), boxes)


@lru_cache(maxsize=64)
def chunk(box: Box, dim: int, parts: int, part: int) -> list[Box]:
    """A part of a box, as torch.chunk cuts; the last ones may be empty."""
    start, size = map(list, box)
    length = -(-size[dim] // parts)
    first = min(part * length, size[dim])
    start[dim], size[dim] = start[dim] + first, min(length, size[dim] - first)
    return [(tuple(start), tuple(size))] if size[dim] else []


def of_all(shape: Shape) -> Box:
    """A whole tensor."""
    return (0,) * len(shape), shape


def tensor_parallel(name: str, shape: Shape, parts: int, part: int) -> Box:
    """Rows or columns of a matrix, as Megatron cuts them; vectors are whole."""
    if len(shape) == 1:
        return of_all(shape)
    return chunk(of_all(shape), 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0, parts, part)[0]


def fsdp(rank: int) -> Claims:
    """Every tensor cut by rows over all ranks."""
    shapes = parameters()

    def rows(name: str) -> list[Box]:
        return chunk(of_all(shapes[name]), 0, RANKS, rank)

    return claimed(shapes, rows, rows)


def tensor_and_fsdp(rank: int) -> Claims:
    """Tensor parallel over the 8 ranks of a host, each part cut by rows over 512 hosts."""
    shapes = parameters()

    def part(name: str) -> list[Box]:
        return chunk(tensor_parallel(name, shapes[name], 8, rank % 8), 0, RANKS // 8, rank // 8)

    return claimed(shapes, part, part)


def megatron(rank: int) -> Claims:
    """Tensor 8 x data 32 x pipeline 16; the optimizer's state is a flat buffer cut over the data ranks (ZeRO-1)."""
    tensor, data, stage = rank % 8, rank // 8 % 32, rank // 256
    layers = range(LAYERS * stage // 16, LAYERS * (stage + 1) // 16)
    shapes = parameters(layers, ends=False)
    if stage == 0:
        shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)} | shapes
    if stage == 15:
        shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    of_model = {name: tensor_parallel(name, shape, 8, tensor) for name, shape in shapes.items()}
    numels = {name: torch.Size(size).numel() for name, (_, size) in of_model.items()}
    length = -(-sum(numels.values()) // 32)
    begins = dict(zip(numels, torch.tensor([0, *numels.values()]).cumsum(0).tolist(), strict=False))

    def flat(name: str) -> list[Box]:
        start, size = of_model[name]
        low, high = max(data * length - begins[name], 0), min((data + 1) * length - begins[name], numels[name])
        if low >= high:
            return []
        boxes = cut(whole(size, ()), low, high).boxes
        return [(tuple(a + b for a, b in zip(start, box.start, strict=True)), tuple(box.size)) for box in boxes]

    return claimed(shapes, lambda name: [of_model[name]], flat)


@lru_cache(maxsize=32)
def mixture(layers: range = range(MIXTURE_LAYERS)) -> dict[str, Shape]:
    """Shapes by name of DeepSeek-V3, whose experts have names of their own in the files, without its ends."""
    shapes: dict[str, Shape] = {}
    for layer in layers:
        mlp = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}
        of_layer: dict[str, Shape] = {
            "self_attn.q_a_proj": (1536, 7168),
            "self_attn.q_a_layernorm": (1536,),
            "self_attn.q_b_proj": (24576, 1536),
            "self_attn.kv_a_proj_with_mqa": (576, 7168),
            "self_attn.kv_a_layernorm": (512,),
            "self_attn.kv_b_proj": (32768, 512),
            "self_attn.o_proj": (7168, 16384),
            "input_layernorm": (7168,),
            "post_attention_layernorm": (7168,),
        }
        if layer < 3:  # these are dense
            of_layer |= {f"mlp.{name}": tuple(9 * n if n == 2048 else n for n in mlp[name]) for name in mlp}
        else:
            of_layer |= {f"mlp.experts.{number}.{name}": mlp[name] for number in range(EXPERTS) for name in mlp}
            of_layer |= {f"mlp.shared_experts.{name}": mlp[name] for name in mlp} | {"mlp.gate": (EXPERTS, 7168)}
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return shapes


def experts(rank: int) -> Claims:
    """Experts 64 x data 4 x pipeline 16; the state of what they share is cut over 256 ranks, of an expert over 4."""
    expert, data, stage = rank % 64, rank // 64 % 4, rank // 256
    each = EXPERTS // 64
    shapes = {
        name: shape
        for name, shape in mixture(range(MIXTURE_LAYERS * stage // 16, MIXTURE_LAYERS * (stage + 1) // 16)).items()
        if ".experts." not in name or int(name.split(".")[5]) // each == expert
    }

    def rows(name: str) -> list[Box]:
        parts, part = (4, data) if ".experts." in name else (256, rank % 256)
        return chunk(of_all(shapes[name]), 0, parts, part)

    return claimed(shapes, lambda name: [of_all(shapes[name])], rows)


LAYOUTS: dict[str, Layout] = {
    "FSDP 4096, rows": fsdp,
    "TP 8 x FSDP 512": tensor_and_fsdp,
    "TP 8 x DP 32 x PP 16, ZeRO-1": megatron,
    "DeepSeek-V3: EP 64 x DP 4 x PP 16, ZeRO-1": experts,
}


class World:
    """Stands for gloo: fills in what the other ranks would have sent.

    Args:
        rank: The rank that is not simulated.
        messages: What each rank tells, by round.
    """

    def __init__(self, rank: int, messages: list[list[bytes]]) -> None:
        self._rank, self._rounds = rank, [[(message, _halves(message)) for message in of_all] for of_all in messages]
        self._round = -1

    def _allgather_base(self, every: torch.Tensor, mine: torch.Tensor) -> "World":
        if every.dtype == torch.int64:  # digests and lengths: another round begins
            self._round = (self._round + 1) % len(self._rounds)
            told = [[*halves, len(message)] for message, halves in self._rounds[self._round]]
            assert told[self._rank] == mine.flatten().tolist()
            every.copy_(torch.tensor(told))
            return self
        rows, seen = every.view(RANKS, -1), set()
        rows.zero_()
        for rank, (message, halves) in enumerate(self._rounds[self._round]):
            if halves not in seen and len(message) <= rows.shape[1]:
                rows[rank, : len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            seen.add(halves)
        return self

    def broadcast(self, memory: torch.Tensor, root: int) -> "World":
        """What one rank tells."""
        memory.copy_(torch.frombuffer(bytearray(self._rounds[self._round][root][0]), dtype=torch.uint8))
        return self

    def wait(self, _: object) -> bool:
        """Nothing is under way."""
        return True


def told_by_all(layout: Layout) -> list[list[bytes]]:
    """By round: what each rank tells. Every rank makes its own, so it is not counted here."""
    with multiprocessing.get_context("fork").Pool() as pool:
        told = pool.map(partial(told_by, layout), range(RANKS), chunksize=64)
    numbers = {table: number for number, table in enumerate(dict.fromkeys(table for table, _ in told))}
    return [[table for table, _ in told], [numbers[table].to_bytes(8) + boxes for table, boxes in told]]


def told_by(layout: Layout, rank: int) -> tuple[bytes, bytes]:
    """What a rank tells: its tensors, and its boxes."""
    claims = layout(rank)
    return table_of(claims.tensors), claims.boxes()


@lru_cache(maxsize=32)
def table_of(tensors: Tensors) -> bytes:
    """What a rank tells of its tensors; many have the same."""
    return Claims(tensors=tensors, rows={}).table()


def measure(messages: list[list[bytes]], name: str, rank: int) -> dict[str, float]:
    """Seconds and MiB of a save and a load on one rank; runs in a process of its own."""
    torch.set_num_threads(1)
    ranks = Ranks(None, 60.0)
    ranks.rank, ranks.size, ranks._gloo = rank, RANKS, World(rank, messages)
    ranks._machines = [(range(first, first + HOST), f"host {first // HOST}") for first in range(0, RANKS, HOST)]
    session = Session(None)
    seconds: dict[str, float] = {}
    saved: list[tuple[list[GlobalTensor], list[File], RankPlan]] = []

    def prepare(saving: bool) -> None:
        claims = LAYOUTS[name](rank)
        key = saving, tuple(words_of(claims, rank))

        def make() -> tuple[list[GlobalTensor], list[File], RankPlan]:
            tensors = merge_claims(claims_of_all(ranks, claims))
            if saving:
                check_covered(tensors)
            files = lay_out(tensors, 5 * 10**9) if saving else saved[0][1]
            planner = BlockPlanner(tensors, data_areas(files), rank, RANKS, hosts=ranks.hosts())
            return tensors, files, planner.save() if saving else planner.load(near=False)

        saved.append(session.planned(key, make))

    some = [([other], LAYOUTS[name](other)) for other in range(0, RANKS, 64)]  # code takes memory when it first runs
    warm = merge_claims(some)
    BlockPlanner(warm, data_areas(lay_out(warm, 5 * 10**9)), rank, RANKS).load(near=False)
    del some, warm
    base = reset_peak()
    for step in ("save", "again", "load", "load again"):
        begin = time.process_time()
        prepare(step in ("save", "again"))
        seconds[step] = time.process_time() - begin
    seconds["MiB"] = peak() - base
    tensors, files, plan = saved[0]
    if rank == 0:
        told = list(checksums(tensors, files))
        base = reset_peak()
        begin = time.process_time()
        crcs = join_crcs(files, map(decode_crcs, told))
        records = {
            file.name: FileRecord(
                size=file.size, data_begin=file.data_begin, header_crc=0, block=file.block, crcs=of_file
            )
            for file, of_file in zip(files, crcs, strict=True)
        }
        empty = Manifest(style="", files=records, tied={}, model=None, optimizer=None, scheduler=None, extra=None)
        encode_manifest(empty)
        seconds["checksums s"], seconds["checksums MiB"] = time.process_time() - begin, peak() - base
    seconds["tensors"] = len(tensors)
    seconds["TB"] = sum(file.size for file in files) / 1e12
    seconds["mine"] = len(plan.files())
    seconds["others"] = len(plan._others)
    seconds["files"] = len(set(plan.files()))
    return seconds


def checksums(tensors: list[GlobalTensor], files: list[File]) -> Iterator[bytes]:
    """What every rank tells the first one of the blocks that it has written."""
    areas = data_areas(files)
    dealt = BlockPlanner(tensors, areas, 0, RANKS, hosts=[rank // HOST for rank in range(RANKS)])._dealt_out
    by_rank: dict[int, list[Crc]] = {}
    for area, runs in zip(areas, dealt(saving=True, near=False), strict=True):
        for run in runs:
            shares: Iterable[tuple[int, int, range]] = [(area.file % (RANKS - 1), 0, range(run.first, run.stop))]
            if isinstance(run, AssignedRun):
                shares = run.deal.segments(run.first, run.stop)
            for rank, _, numbers in shares:
                for number in numbers:
                    begin = area.begin + number * area.block
                    size = min(begin + area.block, area.end) - begin
                    is_whole = isinstance(run, AssignedRun) or number % 16  # in fact, boxes end in fewer of them
                    parts = [size] if is_whole else [size // 2, size - size // 2]
                    for part, count in enumerate(parts):
                        crc = begin * 2654435761 % (1 << 32)
                        by_rank.setdefault(rank + part, []).append((area.file, begin, count, crc))
                        begin += count
    return (encode_crcs(crcs) for crcs in by_rank.values())


def reset_peak() -> float:
    """Forgets the most memory that the process has had; MiB that it has now."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak() -> float:
    """The most MiB that the process has had since."""
    return status("VmHWM")


def status(field: str) -> float:
    """A size in /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def row(name: str, messages: list[list[bytes]]) -> dict[str, str]:
    """What is measured of a layout, from what its ranks tell."""
    found = []
    for rank in MEASURED:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(pool.apply(measure, (messages, name, rank)))
    most = {key: max(each.get(key, 0.0) for each in found) for key in found[0]}
    return {
        "layout": name,
        "tensors": f"{most['tensors']:.0f}",
        "TB": f"{most['TB']:.2f}",
        "told KiB a rank": f"{sum(map(len, messages[1])) / RANKS / 1024:.1f}",
        "save s": f"{most['save']:.2f}",
        "again s": f"{most['again']:.3f}",
        "load s": f"{most['load']:.2f}",
        "load again s": f"{most['load again']:.3f}",
        "MiB a rank": f"{most['MiB']:.0f}",
        "checksums s": f"{most['checksums s']:.2f}",
        "checksums MiB": f"{most['checksums MiB']:.0f}",
        "blocks of a rank": f"{most['mine']:.0f}",
        "others' blocks": f"{most['others']:.0f}",
        "files it writes": f"{most['files']:.0f}",
    }


def main() -> None:
    """Measures every layout on some ranks."""
    rows = [row(name, told_by_all(layout)) for name, layout in LAYOUTS.items()]
    note = (
        "The models are Llama 3.1 405B and DeepSeek-V3, in bf16, with fp32 master weights and fp32 Adam moments. The "
        f"256 experts of a layer of DeepSeek-V3 are separate tensors in the files. {RANKS:,} ranks on hosts of {HOST}, "
        f"blocks of 4 MiB. Ranks {', '.join(map(str, MEASURED))} are measured one after another, each in a process "
        "with one thread, and the table shows the slowest. The messages of the other ranks are computed by the same "
        "code. Seconds are CPU time, from a rank's boxes to the list of its blocks: the rank's claims, their digest, "
        "the claims of all ranks, the check for gaps, the files and the plan. `again` is the next call, which finds "
        "the cached plan by the digest. `MiB a rank` is the peak memory of the process, minus its memory before the "
        "call. The checksum columns cover all blocks of the checkpoint on the first rank, up to the bytes of the "
        "manifest."
    )
    write("planning", "Checkpoint plans for thousands of ranks", rows, note)


if __name__ == "__main__":
    main()
