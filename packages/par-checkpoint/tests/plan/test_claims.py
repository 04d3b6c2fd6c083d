import pytest
import torch

from par_checkpoint.plan.claims import Claims, check_covered, digest, merge
from par_checkpoint.plan.entry import Entry, key_of, name_of, section_of, told_apart
from par_groups import Box, Sharding, whole

from ..helpers import rectangle


def entry(name, sharding, dtype=torch.float32, section="model"):
    local = torch.zeros(sharding.local_numel, dtype=dtype)
    return Entry(key=key_of(section, name), dtype=dtype, sharding=sharding, local=local)


def rows(name, begin, end, dtype=torch.float32):
    return entry(name, rectangle((6, 4), 0, begin, end, 0), dtype)


MANY = [
    rows("w", 0, 3),
    entry("scalar", whole((), (0,)), torch.bfloat16),
    entry("none", Sharding((0, 3), ())),
    entry("elsewhere", Sharding((2, 2), ()), torch.float8_e5m2),
    entry("two", Sharding((4,), (Box((0,), (1,), 0, (1,), (0,)), Box((3,), (1,), 1, (1,), (0,))))),
]


def test_they_survive_the_way_to_another_rank():
    claims = Claims.of(MANY)
    again = Claims.decode(claims.encode())
    assert again.tensors == claims.tensors
    assert {dims: each.tolist() for dims, each in again.rows.items()} == {
        0: [[1]],
        1: [[4, 0, 1], [4, 3, 1]],
        2: [[0, 0, 0, 3, 4]],
    }
    assert Claims.decode(Claims.of([]).encode()).tensors == ()


def test_equal_claims_have_equal_bytes_and_others_do_not():
    same = digest(Claims.of(MANY).encode())
    assert same == digest(Claims.of(list(MANY)).encode())
    others = [MANY[1:], MANY[::-1], [rows("w", 0, 4), *MANY[1:]], [rows("v", 0, 3), *MANY[1:]]]
    others.append([rows("w", 0, 3, torch.int32), *MANY[1:]])
    assert len({digest(Claims.of(each).encode()) for each in others} - {same}) == 5


def test_holders_of_one_box_are_replicas():
    low, high = Claims.of([rows("w", 0, 2)]), Claims.of([rows("w", 2, 6), entry("b", whole((3,), ()))])
    w, b = merge([([0, 2], low), ([1], high), ([3], low)])
    assert (w.key, w.shape, len(w)) == ("model:w", (6, 4), 2)
    assert w.starts.tolist() == [[0, 0], [2, 0]]
    assert w.sizes.tolist() == [[2, 4], [4, 4]]
    assert [w.holders(box).tolist() for box in (0, 1)] == [[0, 2, 3], [1]]
    assert (b.key, b.holders(0).tolist()) == ("model:b", [1])


def test_boxes_are_sorted_by_where_they_begin():
    (held,) = merge([([rank], Claims.of([rows("w", begin, begin + 2)])) for rank, begin in enumerate((4, 0, 2))])
    assert held.starts[:, 0].tolist() == [0, 2, 4]
    assert [held.holders(box).tolist() for box in range(3)] == [[1], [2], [0]]


def test_a_tensor_that_nobody_holds_is_known_all_the_same():
    (held,) = merge([([0], Claims.of([entry("none", Sharding((0, 3), ()))]))])
    assert len(held) == 0
    check_covered([held])


@pytest.mark.parametrize(
    "other", [rows("w", 0, 3, torch.float16), entry("w", whole((6, 5), ())), entry("w", whole((24,), ()))]
)
def test_ranks_must_agree_on_shape_and_dtype(other):
    with pytest.raises(ValueError, match=r"'w' is torch.float32 \(6, 4\) on rank 1, but .* on rank 3; .*layout="):
        merge([([1, 2], Claims.of([rows("w", 0, 3)])), ([3], Claims.of([other]))])


def test_gaps_are_named():
    claims = Claims.of([rows("whole", 0, 6), rows("low", 0, 3), rows("high", 3, 6), rows("x", 1, 2)])
    with pytest.raises(ValueError, match=r"of 'low' \(6, 4\) \(12 held\), 'high' .*, 'x' \(6, 4\) \(4 held\); pass"):
        check_covered(merge([([0], claims)]))
    check_covered(merge([([0], claims)])[:1])


def test_two_tensors_of_one_name_are_told_apart_by_key_alone():
    one, two, three = told_apart([rows("w", 0, 3), rows("w", 3, 6), rows("v", 0, 6)])
    assert len({one.key, two.key, three.key}) == 3
    assert [each.name for each in (one, two, three)] == ["w", "w", "v"]
    assert section_of(two.key) == "model"
    assert name_of("optimizer:a:b.exp_avg") == "a:b.exp_avg"
