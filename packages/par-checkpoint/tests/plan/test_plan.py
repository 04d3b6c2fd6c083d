"""Worlds of any cut, saved and loaded in one process: the bytes that move are those that the plan names."""

from collections import Counter
from dataclasses import replace
from itertools import accumulate, pairwise, zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from par_checkpoint.format.bytes import copy_elements_
from par_checkpoint.plan.claims import LocalTensor, claims_of, key_of, name_of, with_unique_keys
from par_checkpoint.plan.coverage import check_covered
from par_checkpoint.plan.files import data_areas, lay_out, tensor_areas
from par_checkpoint.plan.plan import BlockPlanner
from par_checkpoint.transfer.exchange import by_wave
from par_checkpoint.transfer.memory import LocalState
from par_groups import Claims, Sharding, bytes_of, cut, merge_claims, whole

from ..helpers import rectangle

BLOCK = 64
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8]


@st.composite
def tensors(draw):
    """Values by name; no element is 0."""
    made = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
        count = torch.Size(shape).numel()
        made[f"t{number}"] = (torch.arange(count) % 97 + 1).view(shape).to(draw(st.sampled_from(DTYPES)))
    return made


def cuts(draw, shape, size):
    """A record and the elements of a local tensor for each rank; together they hold everything, some twice."""
    parts = draw(st.integers(1, size))
    kind = draw(st.sampled_from(["whole", "flat", *range(len(shape))]))
    length = torch.Size(shape).numel() if isinstance(kind, str) else shape[kind]
    inner = st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)
    bounds = list(pairwise([0, *sorted(draw(inner)), length]))
    for rank in range(size):
        begin, end = bounds[rank % parts]
        padding = draw(st.integers(0, 2))
        if kind == "whole":
            yield (whole(shape, (rank,)) if rank < parts else Sharding(shape, ())), length
        elif kind == "flat":
            yield cut(whole(shape, (rank,)), begin, end, offset=padding), end - begin + 2 * padding
        else:
            record = rectangle(shape, kind, begin, end, rank)
            yield record, record.local_numel + padding


@st.composite
def worlds(draw, values, *, partly=False):
    """What each rank of a world holds of these values."""
    size = draw(st.integers(1, 5))
    world = [[] for _ in range(size)]
    for name, value in values.items():
        for rank, (record, count) in enumerate(cuts(draw, tuple(value.shape), size)):
            local = torch.zeros(count, dtype=value.dtype)
            for box in record.boxes:
                box.of(local).copy_(value[box.slices])
            if not (partly and draw(st.booleans())):
                world[rank].append(
                    LocalTensor(key=key_of("model", name), dtype=value.dtype, sharding=record, local=local)
                )
    return world


def held_by(world):
    return merge_claims([([rank], claims_of(entries)) for rank, entries in enumerate(world)])


def laid_out(held, limit=1 << 40):
    return [replace(file, block=BLOCK) for file in lay_out(held, limit)]


def contents(files, held, values):
    """The bytes of each file, as they should be."""
    found = []
    for file in files:
        data = bytearray(file.header) + bytes(file.size - len(file.header))
        for number, begin, end in file.placed:
            data[begin:end] = bytes(bytes_of(values[name_of(held[number].key)].contiguous()))
        found.append(data)
    return found


def carried_out(plans, each):
    """By round: each rank's blocks, and those of others; every block once."""
    assert len({(plan.turns, plan.peers) for plan in plans}) == 1
    of_ranks = [list(plan.rounds(each)) for plan in plans]
    assert not plans[0].peers or len({len(rounds) for rounds in of_ranks}) == 1
    return [list(of_round) for of_round in zip_longest(*of_ranks, fillvalue=([], []))]


def exchanged(rounds):
    """Every piece that goes from one rank to another, wave by wave, as both ends agree on it."""
    for of_round in rounds:
        sent, taken = {}, {}
        for rank, (mine, others) in enumerate(of_round):
            for outgoing, incoming in by_wave([*mine, *others], rank):
                sent.update({(pieces[0].wave, rank, to): pieces for to, pieces in outgoing.items()})
                taken.update({(pieces[0].wave, source, rank): pieces for source, pieces in incoming.items()})
        assert sent == taken
        for key, pieces in sorted(sent.items(), key=lambda item: item[0]):
            yield from zip(pieces, taken[key], strict=True)


def holders_of(world, held, piece):
    """The ranks that hold all of a piece."""
    parts = [LocalState.of(entries, held).parts.get(piece.tensor, ()) for entries in world]
    return [rank for rank, of_rank in enumerate(parts) if any(part.holds(piece) for part in of_rank)]


def blocks_of(areas, held):
    return [area.at(number, held) for area in areas for number in range(area.count)]


def saved(world, held, files, owners, each, **how):
    """Carries out a save; the bytes of each file, and which rank wrote which blocks."""
    areas = data_areas(files)
    plans = [BlockPlanner(held, areas, rank, len(world), owners=owners, **how).save() for rank in range(len(world))]
    locals_ = [LocalState.of(entries, held) for entries in world]
    memory, writers = {}, {}
    rounds = carried_out(plans, each)
    for of_round in rounds:
        for rank, (mine, _) in enumerate(of_round):
            for task in mine:
                block = torch.zeros(task.block.size, dtype=torch.uint8)
                locals_[rank].to_block_((piece for piece in task.pieces if piece.source == rank), block)
                memory.update({id(piece): block for piece in task.pieces})
                place = task.block.file, task.block.begin
                assert place not in writers
                writers[place] = rank, block
    sends = False
    hosts = how.get("hosts") or [0] * len(world)
    for given_, taken in exchanged(rounds):
        source, to = given_.source, given_.to
        copy_elements_(locals_[to].in_block(taken, memory[id(taken)]), locals_[source].view(given_))
        sends = True
        holders = holders_of(world, held, given_)
        assert hosts[source] == hosts[to] or hosts[to] not in {hosts[rank] for rank in holders}
    assert plans[0].peers or not sends
    parts = sorted((file, begin, begin + block.numel()) for (file, begin), (_, block) in writers.items())
    for block in blocks_of(areas, held):  # one after the other, and none over the end of its block
        inside = [each for each in parts if each[0] == block.file and block.begin <= each[1] < block.end]
        assert [begin for _, begin, _ in inside] + [block.end] == [block.begin] + [end for _, _, end in inside]
        assert len(inside) == 1 or not (owners or how.get("alone"))
    data = [bytearray(file.header) + bytes(file.size - len(file.header)) for file in files]
    for (file, begin), (_, block) in writers.items():
        data[file][begin : begin + block.numel()] = bytes(bytes_of(block))
    return data, {place: rank for place, (rank, _) in writers.items()}


@settings(max_examples=120)
@given(st.data())
def test_a_save_writes_every_block_once_with_every_byte_in_it(data):
    values = data.draw(tensors())
    world = data.draw(worlds(values))
    held = held_by(world)
    check_covered(held)
    files = laid_out(held, data.draw(st.sampled_from([1, 100, 1 << 40])))
    owners = [data.draw(st.integers(0, len(world) - 1)) for _ in files] if data.draw(st.booleans()) else None
    hosts = [data.draw(st.integers(0, 1)) for _ in world]
    few = data.draw(st.sampled_from([1, 2, 64]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("par_checkpoint.plan.plan._HOLDERS", few)
        patch.setattr("par_checkpoint.plan.plan._WRITERS", 2)
        alone = data.draw(st.booleans())
        written, writers = saved(world, held, files, owners, data.draw(st.integers(1, 3)), hosts=hosts, alone=alone)
    assert written == contents(files, held, values)
    if few < 64 and not owners:
        assert all(
            count <= max(few, 4)
            for count in Counter(file for file, _ in {(f, r) for (f, _), r in writers.items()}).values()
        )
    if owners:
        assert all(rank == owners[file] for (file, _), rank in writers.items())


def loaded(world, held, areas, stored, each, *, near=False, window=0, hosts=None):
    """Carries out a load into tensors of zeros; how often each block was read."""
    planners = [BlockPlanner(held, areas, rank, len(world), window=window, hosts=hosts) for rank in range(len(world))]
    plans = [planner.load(near=near) for planner in planners]
    locals_ = [LocalState.of(entries, held) for entries in world]
    memory, readers = {}, Counter()
    rounds = carried_out(plans, each * max(window, 1))
    for of_round in rounds:
        for rank, (mine, _) in enumerate(of_round):
            for task in mine:
                block = torch.frombuffer(stored[task.block.file][task.block.begin : task.block.end], dtype=torch.uint8)
                locals_[rank].from_block_((piece for piece in task.pieces if piece.to == rank), block)
                memory.update({id(piece): block for piece in task.pieces})
                readers[task.block.file, task.block.begin, task.block.spans] += 1
    entered = set()
    for given_, taken in exchanged(rounds):
        source, to, block = given_.source, given_.to, memory.get(id(given_))
        held_there = locals_[source].view(given_) if block is None else locals_[source].in_block(given_, block)
        copy_elements_(locals_[to].view(taken), held_there)
        if hosts is not None and hosts[source] != hosts[to]:
            place = given_.tensor, given_.start, given_.size, hosts[to]
            assert place not in entered
            entered.add(place)
    return readers


def emptied(world):
    """What the ranks hold, which is then zeros."""
    kept = [[entry.local.clone() for entry in entries] for entries in world]
    for entries in world:
        for entry in entries:
            entry.local.zero_()
    return kept


def are_equal(world, kept):
    pairs = [zip(entries, values, strict=True) for entries, values in zip(world, kept, strict=True)]
    return all(torch.equal(entry.local, value) for pair in pairs for entry, value in pair)


@settings(max_examples=120)
@given(st.data())
def test_a_load_brings_every_box_to_every_holder(data):
    values = data.draw(tensors())
    world = data.draw(worlds(values, partly=True))
    held = held_by(world)
    expected = emptied(world)
    files = laid_out(held)
    near = data.draw(st.booleans())
    areas = (data_areas if data.draw(st.booleans()) else tensor_areas)(files)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("par_checkpoint.plan.plan._HOLDERS", data.draw(st.sampled_from([1, 2, 64])))
        window = 0 if near else data.draw(st.integers(0, 3))
        each = data.draw(st.integers(1, 3))
        hosts = None if near else [data.draw(st.integers(0, 4)) for _ in world]
        patch.setattr("par_checkpoint.plan.replicas._FEW", data.draw(st.sampled_from([1, 8])))
        stored = contents(files, held, values)
        readers = loaded(world, held, areas, stored, each, near=near, window=window, hosts=hosts)
    assert are_equal(world, expected)
    assert near or all(count == 1 for count in readers.values())


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("way", ["save", "alone", "load", "near", "windows"])
def test_boxes_cut_inside_an_index_of_the_first_dim_that_is_more_than_a_block(replicas, way):
    """As experts' weights are that lie in one packed tensor and are cut over tensor ranks."""
    value = torch.arange(1.0, 2 * 12 * BLOCK // 4 + 1).view(2, 12, BLOCK // 4)  # a row of the second dim is a block
    world = []
    for rank in range(2 * replicas):
        record = rectangle(tuple(value.shape), 1, *((0, 9), (9, 12))[rank // replicas], rank)
        local = torch.zeros(record.local_numel)
        for box in record.boxes:
            box.of(local).copy_(value[box.slices])
        world.append([LocalTensor(key=key_of("model", "experts"), dtype=value.dtype, sharding=record, local=local)])
    held = held_by(world)
    files = laid_out(held)
    expected = contents(files, held, {"experts": value})
    if way in ("save", "alone"):
        written, _ = saved(world, held, files, None, 2, alone=way == "alone")
        assert written == expected
        return
    kept = emptied(world)
    loaded(world, held, data_areas(files), expected, 2, near=way == "near", window=2 * (way == "windows"))
    assert are_equal(world, kept)


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (1, 1), (0, None), (None, 0)])
@pytest.mark.parametrize("way", ["load", "near", "windows"])
def test_two_tensors_that_are_filled_from_the_same_bytes(dims, way):
    """As a head and an embedding are that the files tie and the model does not."""
    value = torch.arange(1.0, 12 * BLOCK // 4 + 1).view(12, BLOCK // 4)  # a row is a block
    world = [[], []]
    for dim in dims:
        for rank, edges in enumerate([(0, 5), (5, 12)] if dim is not None else [(0, 12)] * 2):
            record = rectangle(tuple(value.shape), dim or 0, *edges, rank)
            local = torch.zeros(record.local_numel)
            for box in record.boxes:
                box.of(local).copy_(value[box.slices])
            world[rank].append(LocalTensor(key=key_of("model", "w"), dtype=value.dtype, sharding=record, local=local))
    world = [list(with_unique_keys(entries)) for entries in world]
    held = held_by(world)
    (file,) = laid_out(held[:1])
    stored = contents([file], held, {"w": value})
    _, begin, end = file.placed[0]
    areas = data_areas([replace(file, placed=((0, begin, end), (1, begin, end)))])
    kept = emptied(world)
    loaded(world, held, areas, stored, 2, near=way == "near", window=2 * (way == "windows"))
    assert are_equal(world, kept)


@pytest.mark.parametrize("areas_of", [data_areas, tensor_areas])
@pytest.mark.parametrize("sizes", [[30], [8, 8, 8, 8], [1, 7, 1, 3, 17]])
@pytest.mark.parametrize("cut_at", [None, 5])
def test_windows_go_to_replicas_in_turn_and_each_lies_in_one_round(areas_of, sizes, cut_at, monkeypatch):
    monkeypatch.setattr("par_checkpoint.plan.files.BLOCK", BLOCK)
    values = {f"t{number}": torch.ones(size, BLOCK // 4) for number, size in enumerate(sizes)}  # of so many blocks
    world = [
        [
            LocalTensor(
                key=key_of("model", name),
                dtype=value.dtype,
                sharding=rectangle(tuple(value.shape), 1, *((0, BLOCK // 4) if cut_at is None else edges), rank),
                local=value,
            )
            for name, value in values.items()
        ]
        for rank, edges in enumerate([(0, 5), (0, 5), (5, BLOCK // 4)])
    ]
    held = held_by(world)
    areas = areas_of(laid_out(held))
    begin = min(area.begin for area in areas)
    plans = [BlockPlanner(held, areas, rank, 3, window=3).load(near=False) for rank in range(3)]
    found = [
        Counter((task.block.begin - begin) // (3 * BLOCK) for task in mine)
        for plan in plans
        for mine, _ in plan.rounds(3)
    ]
    assert sum(found, Counter()) == Counter(number // 3 for number in range(sum(sizes)))
    assert sum(map(len, found)) == len({window for counts in found for window in counts}) == -(-sum(sizes) // 3)
    assert cut_at is not None or max(map(len, (list(plan.mine) for plan in plans))) <= 12


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_replicas_split_the_work(replicas):
    values = {f"t{i}": torch.ones(40 + i, 8) for i in range(5)}
    world = [
        [
            LocalTensor(
                key=key_of("model", name), dtype=value.dtype, sharding=whole(value.shape, ()), local=value.view(-1)
            )
            for name, value in values.items()
        ]
        for _ in range(replicas)
    ]
    held = held_by(world)
    files = laid_out(held)
    _, writers = saved(world, held, files, None, 1)
    counts = Counter(writers.values())
    assert len(counts) == replicas
    assert max(counts.values()) - min(counts.values()) <= 1


def of_rows(value, rows):
    """A world in which each rank holds some rows of one matrix."""
    starts = list(accumulate(rows, initial=0))
    return [
        [
            LocalTensor(
                key=key_of("model", "w"),
                dtype=value.dtype,
                sharding=rectangle(tuple(value.shape), 0, first, first + count, rank),
                local=value[first : first + count],
            )
        ]
        for rank, (first, count) in enumerate(zip(starts, rows, strict=False))
    ]


@pytest.mark.parametrize(("rows", "peers"), [([3, 2, 4], False), ([1] * 9, True)])
def test_a_few_runs_of_rows_are_written_by_their_holders(rows, peers, monkeypatch):
    monkeypatch.setattr("par_checkpoint.plan.plan._RUNS", 3)
    value = torch.arange(9.0 * BLOCK // 8).view(9, -1)  # four rows to a block
    world = of_rows(value, rows)
    held = held_by(world)
    files = [replace(file, block=2 * BLOCK) for file in lay_out(held, 1 << 40)]
    plans = [BlockPlanner(held, data_areas(files), rank, len(world)).save() for rank in range(len(world))]
    assert {plan.peers for plan in plans} == {peers}
    assert saved(world, held, files, None, 1)[0] == contents(files, held, {"w": value})


@pytest.mark.parametrize("near", [False, True])
def test_ranks_read_their_own_rows_of_a_block_and_nothing_twice(near):
    value = torch.arange(9.0 * BLOCK // 8).view(9, -1)
    held = held_by(of_rows(value, [3, 2, 4]))
    files = [replace(file, block=2 * BLOCK) for file in lay_out(held, 1 << 40)]
    plans = [BlockPlanner(held, data_areas(files), rank, 3).load(near=near) for rank in range(3)]
    assert not any(plan.peers for plan in plans)
    row = value[0].nbytes
    assert [sum(task.block.size for task in plan.mine) for plan in plans] == [3 * row, 2 * row, 4 * row]


def test_a_shard_that_is_whole_blocks_is_written_where_it_is():
    value = torch.ones(8, 16)  # a row is a block
    world = [
        [
            LocalTensor(
                key=key_of("model", "w"),
                dtype=value.dtype,
                sharding=rectangle((8, 16), 0, 4 * (rank % 2), 4 * (rank % 2) + 4, rank),
                local=value[:4],
            )
        ]
        for rank in range(4)
    ]
    held = held_by(world)
    plans = [BlockPlanner(held, data_areas(laid_out(held)), rank, 4).save() for rank in range(4)]
    assert not any(plan.peers for plan in plans)
    assert [len(list(plan.mine)) for plan in plans] == [2, 2, 2, 2]
    assert {task.block.begin for task in plans[1].mine}.isdisjoint(task.block.begin for task in plans[3].mine)


@pytest.mark.parametrize("columns", [1, 8])
def test_a_rank_of_many_meets_few(columns):
    """64 hosts of 8 ranks, which are replicas of a matrix, or hold its columns and are replicas across the hosts."""
    hosts = [rank // 8 for rank in range(512)]
    width = 64 // columns
    claims = [
        Claims.of_boxes((("model:w", torch.float32, (1024, 64)),), [(0, (0, width * part), (1024, width))])
        for part in range(columns)
    ]
    held = merge_claims([(range(part, 512, columns), claim) for part, claim in enumerate(claims)])
    files = [replace(file, block=256) for file in lay_out(held, 1 << 40)]  # a row is a block; all read some
    for rank in (0, 77, 511):
        plans = [
            BlockPlanner(held, data_areas(files), rank, 512, hosts=hosts).load(near=False),
            BlockPlanner(held, data_areas(files), rank, 512, hosts=hosts).save(),
        ]
        loading, saving = (
            {end for task in (*plan.mine, *plan.others) for piece in task.pieces for end in (piece.source, piece.to)}
            for plan in plans
        )
        assert len(loading) == 1 + 7 + 11  # itself, its host, and hosts 1, 2, ... 32 away, the last of them on one side
        assert len(saving) == (columns if rank == 0 else 0)  # a few neighbours write, and have all on their hosts
