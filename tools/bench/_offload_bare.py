"""What a disk itself takes for the reads and writes of a step."""

from collections.abc import Callable

import torch

from par_zero.offload.disk import Disk
from par_zero.offload.pieces import StateBlock, lay_out_blocks
from par_zero.offload.staging import StagingBuffer

Contender = tuple[Callable[[], None], Callable[[], None]]
"""What comes before a step, and the step, which is measured."""


def moving(parameters: int, folder: str, piece: int, ahead: int, threads: int) -> Contender:
    """The reads and writes of a step of Adam, through as many buffers, of pieces that nobody steps.

    Args:
        parameters: Number of elements.
        folder: A folder on a disk.
        piece: Bytes of each of the two slots that are moved as one.
        ahead: Number of pieces in memory.
        threads: Number of threads that read, and of threads that write.
    """
    count = piece // 4
    sizes = [min(count, parameters - start) for start in range(0, parameters, count)]
    places = lay_out_blocks((size, {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}, None) for size in sizes)
    disk = Disk(folder, sum(place.size for place in places), threads)
    ring = [StagingBuffer(places[0].size) for _ in range(ahead)]

    def part(number: int, place: StateBlock) -> memoryview:
        return ring[number % ahead].bytes[: place.size]

    def move() -> None:
        reads = [disk.read(place.start, part(number, place)) for number, place in enumerate(places[:ahead])]
        writes = []
        for number, place in enumerate(places):
            reads[number].wait()
            writes.append(disk.write(place.start, part(number, place)))
            if number + ahead < len(places):
                following = places[number + ahead]
                reads.append(disk.read(following.start, part(number, following), after=writes[-1]))
        for written in writes:
            written.wait()

    return lambda: None, move
