"""Pieces that are fetched and evicted: each in the order that is followed, through as many buffers as the ring has."""

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from par_zero.offload.disk import Disk, tensors_in
from par_zero.offload.errors import DiskErrors
from par_zero.offload.link import DeviceLink
from par_zero.offload.piece import DiskPiece
from par_zero.offload.pieces import PAGE, lay_out_blocks
from par_zero.offload.swapper import PieceValues, StateSwapper

from .cases import failing

COUNT, DEPTH = 6, 2


def made(tmp_path):
    """A swapper with two buffers, and six pieces whose state is their number, by piece."""
    blocks = lay_out_blocks([(PAGE // 4, {"moment": torch.float32}, None)] * COUNT)
    disk = Disk(str(tmp_path), blocks[-1].stop, 1)
    states = {}
    for number, block in enumerate(blocks):
        views = tensors_in(disk, block)
        tensor = nn.Parameter(torch.zeros(PAGE // 4))
        piece = DiskPiece(tensor=tensor, chunk=SimpleNamespace(), first=0, group=0, block=block, views=views)
        states[piece] = {"moment": views["moment"].fill_(number)}
    return StateSwapper(disk, PAGE, DEPTH, DiskErrors(str(tmp_path), (), torch.device("cpu")), lambda _: None), states


def update(swapper, states, pieces):
    """Adds 10 to the state of some pieces, and returns what each had before."""
    order = {piece: PieceValues(state=states[piece], gradient=torch.ones(1)) for piece in pieces}
    swapper.follow(order)
    found = []
    for piece in order:
        values = swapper.fetch(piece)
        found.append(float(values.state["moment"][0]))
        values.state["moment"].add_(10)
        swapper.evict(piece)
    return found


def test_swapper_any_order_returns_each_piece_and_writes_it(tmp_path):
    swapper, states = made(tmp_path)
    pieces = list(states)
    assert update(swapper, states, pieces[::-1]) == [5, 4, 3, 2, 1, 0]
    swapper.finish_writes()
    assert update(swapper, states, pieces[1:3]) == [11, 12]
    swapper.finish_writes()
    assert [float(state["moment"][0]) for state in states.values()] == [10, 21, 22, 13, 14, 15]
    assert all(state["moment"] is piece.views["moment"] for piece, state in states.items())
    assert swapper.buffer_bytes == DEPTH * PAGE


def test_swapper_prefetch_reads_as_many_pieces_as_buffers(tmp_path, monkeypatch):
    swapper, states = made(tmp_path)
    read = []
    original = Disk.read
    monkeypatch.setattr(
        Disk, "read", lambda self, start, *rest: read.append(start // PAGE) or original(self, start, *rest)
    )
    order = {piece: PieceValues(state=state) for piece, state in states.items()}
    swapper.follow(order)
    assert read == [0, 1]
    assert update(swapper, states, states) == list(range(COUNT))
    assert read == list(range(COUNT))  # the prefetched pieces were not read again


@pytest.mark.parametrize("change", ["order", "state"])
def test_swapper_prefetch_out_of_date_is_read_again(change, tmp_path):
    swapper, states = made(tmp_path)
    pieces = list(states)
    swapper.follow({piece: PieceValues(state=states[piece]) for piece in pieces})
    if change == "order":
        assert update(swapper, states, pieces[::-1]) == [5, 4, 3, 2, 1, 0]
    else:
        states[pieces[0]]["moment"].add_(100)
        assert update(swapper, states, pieces) == [100, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("call", [1, 3, COUNT])
def test_swapper_failed_write_keeps_the_piece_in_memory(call, tmp_path, monkeypatch):
    swapper, states = made(tmp_path)
    failing(monkeypatch, "pwritev", call)
    assert update(swapper, states, states) == list(range(COUNT))
    swapper.finish_writes()
    assert [float(state["moment"][0]) for state in states.values()] == [10 + number for number in range(COUNT)]
    assert sum(piece.in_memory for piece in states) == 1
    assert update(swapper, states, states) == [10 + number for number in range(COUNT)]


def test_bytes_of_buffers_are_counted_while_a_thread_adds_one():
    link = object.__new__(DeviceLink)
    link._buffers = deque()

    class Buffer:
        @property
        def nbytes(self):
            link._buffers.append((torch.empty(0), None))  # as the thread of a step does at this moment
            return 8

    link._buffers.extend([(Buffer(), None), (Buffer(), None)])
    assert link.buffer_bytes == 16
