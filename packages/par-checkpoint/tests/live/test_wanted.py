"""Plans of moves, and digests of tensors, without processes."""

import math
import random
import time
from types import SimpleNamespace

import pytest
import torch

from par_checkpoint.live.digest import MODULUS, digest_of_box
from par_checkpoint.live.requests import count_of_words, takers_of, words_of_givers
from par_checkpoint.live.wanted import MemoryPiece, PieceRequests, Wanted, halved, pieces_of, wire_dtype
from par_groups import Box, Claims, Sharding, merge_claims
from par_groups.sharding.held import by_shape

from .cuts import KINDS, lacking, rectangles, sharded


def world_of(shapes, kinds, size, rng):
    """Tensors of a simulated world, and what each rank holds of each."""
    held = {f"model:t{n}": rectangles(rng.choice(kinds), shape, size, rng) for n, shape in enumerate(shapes)}
    claims = []
    for rank in range(size):
        boxes = [
            (key, torch.float32, sharded(shape, of_ranks[rank], rank, torch.uint8)[1])
            for (key, of_ranks), shape in zip(held.items(), shapes, strict=True)
        ]
        claims.append(((rank,), Claims.of(boxes)))
    return merge_claims(claims), held


def request_of(requests, giver):
    """The bytes of a request, as a taker sends them."""
    return Claims(tensors=(), rows=requests.rows_to(giver)).boxes()


@pytest.mark.parametrize("seed", range(20))
def test_requests_cover_the_targets_once(seed):
    rng = random.Random(seed)
    shapes, size = [(12, 7), (5, 4, 6), (31,)], rng.choice([2, 3, 4])
    tensors, held = world_of(shapes, KINDS, size, rng)
    order = by_shape((tensor.key, tensor.dtype, tensor.shape) for tensor in tensors)
    for rank in range(size):
        targets = [rectangles(rng.choice(KINDS), shape, size, rng)[rank] for shape in shapes]
        wanted = [
            Wanted(number, sharded(shape, target, rank, torch.float32)[1], torch.float32, 0)
            for number, (shape, target) in enumerate(zip(shapes, targets, strict=True))
        ]
        requests = PieceRequests(tensors, wanted, rank, [0] * size)
        assert rank not in requests.givers
        received = 0
        seen = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]
        pieces = [(rank, piece) for piece in requests.local]
        for giver in requests.givers:
            # A giver decodes the request, and finds the same pieces in the same order.
            rows = Claims(tensors=(), rows={}).with_boxes(request_of(requests, giver)).rows
            taken = pieces_of(requests.rows_to(giver), tensors, order)
            assert pieces_of(rows, tensors, order) == taken
            pieces += [(giver, piece) for piece in taken]
            received += sum(torch.Size(piece.size).numel() for piece in taken)
        for giver, piece in pieces:
            assert (
                lacking(shapes[piece.tensor], held[f"model:t{piece.tensor}"][giver], [(piece.start, piece.size)]) == 0
            )
            seen[piece.tensor][tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))] += 1
        bound = 0
        for number, (shape, target) in enumerate(zip(shapes, targets, strict=True)):
            bound += lacking(shape, held[f"model:t{number}"][rank], target)
            mask = torch.zeros(shape, dtype=torch.bool)
            for start, count in target:
                mask[tuple(slice(a, a + n) for a, n in zip(start, count, strict=True))] = True
            assert torch.equal(seen[number], mask.long())
        assert received == bound


def test_requests_prefer_their_host_and_divide_over_replicas():
    rng = random.Random(0)
    tensors, _ = world_of([(8, 2)] * 12, ["whole"], 4, rng)
    wanted = [Wanted(n, sharded((8, 2), [((0, 0), (8, 2))], 4, torch.float32)[1], torch.float32, 0) for n in range(12)]
    assert PieceRequests(tensors, wanted, 4, [0, 0, 1, 1, 1]).givers == [2, 3]
    requests = PieceRequests(tensors, wanted, 4, [0, 0, 1, 1, 2])
    assert requests.givers == [0, 1, 2, 3]
    assert {int(rows[:, 2].sum()) for giver in range(4) for rows in requests.rows_to(giver).values()} == {3}


def test_requests_of_elements_without_holder_raise():
    rng = random.Random(0)
    tensors, _ = world_of([(8, 2)], ["rows"], 2, rng)
    wanted = [Wanted(0, sharded((8, 2), [((0, 0), (8, 2))], 2, torch.float32)[1], torch.float32, 0)]
    half = merge_claims(
        [((0,), Claims.of([("model:t0", torch.float32, sharded((8, 2), [((0, 0), (4, 2))], 0, torch.uint8)[1])]))]
    )
    assert len(PieceRequests(tensors, wanted, 2, [0, 0, 0]).givers) == 2
    with pytest.raises(ValueError, match=r"no rank of the group holds 't0' from index \(4, 0\) on"):
        PieceRequests(half, wanted, 2, [0, 0, 0])


def test_requests_for_many_alike_layers_are_small():
    """A request for many layers is as small as one for a few, because layers are sharded identically."""
    layers, size = 200, 64
    table = tuple((f"model:{n}.w", torch.bfloat16, (4096, 1024)) for n in range(layers))
    rows = 4096 // size
    claims = [
        ((rank,), Claims.of_boxes(table, [(n, (rank * rows, 0), (rows, 1024)) for n in range(layers)]))
        for rank in range(size)
    ]
    tensors = merge_claims(claims)
    column = sharded((4096, 1024), [((0, 0), (4096, 8))], size, torch.uint8)[1]
    requests = PieceRequests(
        tensors, [Wanted(n, column, torch.bfloat16, 0) for n in range(layers)], size, [0] * (size + 1)
    )
    assert sum(len(request_of(requests, giver)) for giver in requests.givers) < 100 * size
    assert sum(int(each[:, 2].sum()) for each in requests.rows.values()) == layers * size


EXPERTS, INNER, WIDTH = 384, 2048, 7168
PER_LAYER = {
    "up": (EXPERTS, INNER, WIDTH),
    "gate": (EXPERTS, INNER, WIDTH),
    "down": (EXPERTS, WIDTH, INNER),
    "q": (12288, WIDTH),
    "o": (WIDTH, 8192),
    "kv": (576, WIDTH),
    "kv_b": (16384, 512),
    "router": (EXPERTS, WIDTH),
    "norm_1": (WIDTH,),
    "norm_2": (WIDTH,),
}


def trainer_boxes(shapes, rank):
    """Experts over 64 ranks, their rows over 4; all other tensors by uneven rows over 256 ranks."""
    for number, shape in enumerate(shapes):
        if len(shape) == 3:
            rows = shape[1] // 4
            start = (rank // 4 * (EXPERTS // 64), rank % 4 * rows, 0)
            yield number, start, (EXPERTS // 64, rows, shape[2])
        else:
            low, high = rank * shape[0] // 256, (rank + 1) * shape[0] // 256
            if low < high:
                yield number, (low, *[0] * (len(shape) - 1)), (high - low, *shape[1:])


def generator_box(shape, rank):
    """Experts over 128 ranks, matrices by columns over 8 ranks, vectors on all."""
    if len(shape) == 3:
        return (rank * EXPERTS // 128, 0, 0), (EXPERTS // 128, *shape[1:])
    if len(shape) == 2:
        return (0, rank % 8 * shape[1] // 8), (shape[0], shape[1] // 8)
    return (0,), shape


def whole_box(shape, start, size):
    stride = tuple(math.prod(size[dim + 1 :]) for dim in range(len(size)))
    return Sharding(shape, (Box(start, size, 0, stride, (256,)),))


def test_plan_of_a_trillion_parameters_is_fast_and_small():
    """1.03 T parameters move from 256 to 128 ranks; the seconds are those of the processor in one rank."""
    table = [
        (f"model:{layer}.{name}", torch.bfloat16, shape) for layer in range(60) for name, shape in PER_LAYER.items()
    ]
    table += [(f"model:{name}", torch.bfloat16, (163840, WIDTH)) for name in ("embed", "head")]
    shapes = [shape for _, _, shape in table]
    assert sum(torch.Size(shape).numel() for shape in shapes) > 1e12
    claims = [((rank,), Claims.of_boxes(tuple(table), trainer_boxes(shapes, rank))) for rank in range(256)]
    told = len(claims[0][1].table()) + sum(len(each.boxes()) for _, each in claims)
    wanted = [
        Wanted(number, whole_box(shape, *generator_box(shape, 0)), torch.bfloat16, 0)
        for number, shape in enumerate(shapes)
    ]
    seconds = []
    for _ in range(2):  # the first time, torch makes its operators
        begin = time.process_time()
        tensors = merge_claims(claims)
        requests = PieceRequests(tensors, wanted, 256, [0] * 384)
        rows = {giver: requests.rows_to(giver) for giver in requests.givers}
        seconds.append(time.process_time() - begin)
    # A rank receives the claims of all ranks, and sends its requests.
    told += sum(len(Claims(tensors=(), rows=each).boxes()) for each in rows.values())
    print(f"{min(seconds):.2f} s, {told / 1e3:.0f} KB")
    assert min(seconds) < 0.5
    assert told < 1_000_000


def test_halved_pieces_are_disjoint_and_small():
    piece = MemoryPiece(0, (1, 2, 0), (3, 5, 4), torch.float32, 0)
    parts = list(halved(piece, 7))
    seen = torch.zeros(4, 7, 4, dtype=torch.int64)
    for part in parts:
        assert torch.Size(part.size).numel() <= 7
        seen[tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True))] += 1
    assert seen.sum() == 60
    assert seen.max() == 1
    assert list(halved(piece._replace(start=(), size=()), 0)) == [piece._replace(start=(), size=())]


@pytest.mark.parametrize(
    ("source", "target", "wire"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.bfloat16),
        (torch.float8_e4m3fn, torch.float32, torch.float8_e4m3fn),
        (torch.int64, torch.int64, torch.int64),
    ],
)
def test_wire_dtype_is_the_narrower_one(source, target, wire):
    assert wire_dtype(source, target) == wire


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_digest_does_not_depend_on_the_boxes(dtype):
    values = torch.arange(60).view(3, 5, 4).to(dtype)
    full = digest_of_box(values, (0, 0, 0), (3, 5, 4))
    parts = digest_of_box(values[:2], (0, 0, 0), (3, 5, 4))
    parts += digest_of_box(values[2:, :, 1:], (2, 0, 1), (3, 5, 4)) + digest_of_box(
        values[2:, :, :1], (2, 0, 0), (3, 5, 4)
    )
    assert full == parts % MODULUS


def test_digest_sees_swapped_flipped_and_lost_elements():
    values = torch.arange(12.0).view(3, 4)
    swapped, flipped = values.clone(), values.clone()
    swapped[0, 1], swapped[2, 3] = values[2, 3], values[0, 1]
    flipped.view(torch.int32)[1, 1] ^= 1
    found = {digest_of_box(each, (0, 0), (3, 4)) for each in (values, swapped, flipped, values.flip(0))}
    found.add(digest_of_box(values[:2], (0, 0), (3, 4)))
    assert len(found) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e5m2])
def test_digest_counts_all_nan_as_one_value(dtype):
    one = torch.tensor([1.0, float("nan"), 2.0]).to(dtype)
    other = one.clone()
    other.view(torch.uint8).view(3, -1)[1, 0] ^= 1  # another payload
    assert other[1].float().isnan()
    moved = one[[1, 0, 2]] if dtype != torch.float8_e5m2 else one.view(torch.uint8)[[1, 0, 2]].view(dtype)
    assert digest_of_box(one, (0,), (3,)) == digest_of_box(other, (0,), (3,)) != digest_of_box(moved, (0,), (3,))


@pytest.mark.parametrize("size", [1, 2, 62, 63, 130])
def test_givers_find_their_takers_in_a_sum(size):
    rng = random.Random(size)
    ranks = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    givers = [set(rng.sample(range(size), rng.randrange(size + 1))) for _ in range(size)]
    givers[0] = {*range(size)}  # all bits of an integer
    words = [words_of_givers(each, of) for each, of in zip(givers, ranks, strict=True)]
    assert {len(each) for each in words} == {count_of_words(ranks[0])}
    sums = torch.tensor(words).sum(0).tolist()  # in 64 bits, as ranks add
    for of in ranks:
        assert takers_of(sums, of) == [taker for taker in range(size) if of.rank in givers[taker]]
