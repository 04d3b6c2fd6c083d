"""State that moves between ranks in memory."""

import copy
import itertools
import random
import threading
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import CheckpointError, State, TensorSlice, release_memory, reshard
from par_groups import Sharding, set_sharding, whole
from par_testing import for_each, storm

from ..helpers import RUNS, Run, make_model, rectangle, train
from .cuts import KINDS, lacking, rectangles, sharded, values

SHAPES = [(24, 16), (16, 12, 5), (97,), (33, 7), (64, 40)]
BEFORE, AFTER = range(2), range(2, 4)


def move(before, after, full, *, kind=torch.float32, ranks=None, **options):
    """Moves tensors from one sharding to another, checks each element, and returns received bytes and the lower bound.

    Args:
        before: By name, the rectangles of each rank.
        after: The same of the target.
        full: By name, the full tensor.
        kind: Dtype of the target.
        ranks: Ranks that take part, by their number in the group; None: all.
        options: Options of `reshard`.
    """
    rank = dist.get_rank() if ranks is None else ranks.index(dist.get_rank())
    source, target = State(model={}, layout={}), State(model={}, layout={})
    for name, tensor in full.items():
        for state, held, dtype in ((source, before, tensor.dtype), (target, after, kind)):
            state.model[name], state.layout[name] = sharded(tuple(tensor.shape), held[name][rank], rank, dtype)
        for box in source.layout[name].boxes:
            box.of(source.model[name]).copy_(tensor[box.slices])
    report = reshard(source, target, dtype=kind, **options)
    bound = 0
    for name, tensor in full.items():
        for box in target.layout[name].boxes:
            assert torch.equal(box.of(target.model[name]), tensor[box.slices].to(kind)), name
        width = min(tensor.dtype.itemsize, kind.itemsize)
        bound += width * lacking(tuple(tensor.shape), before[name][rank], after[name][rank])
    assert report.missing == report.unexpected == report.mismatched == ()
    return report.received, bound


def drawn(rng, kinds, shapes, world):
    """Full tensors, and how ranks hold them."""
    full = {f"t{number}": values(shape, number) for number, shape in enumerate(shapes)}
    return full, {name: rectangles(rng.choice(kinds), tuple(each.shape), world, rng) for name, each in full.items()}


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.storm)])
@pytest.mark.ranks(4)
def test_reshard_between_cuts_receives_the_lower_bound(every):
    rng = random.Random(0)
    for before, after in list(itertools.product(KINDS, KINDS))[::every]:
        full, held = drawn(rng, [before], rng.sample(SHAPES, 2), 4)
        wanted = {name: rectangles(after, tuple(each.shape), 4, rng) for name, each in full.items()}
        received, bound = move(held, wanted, full)
        assert received == bound, (before, after)


@pytest.mark.parametrize("pairs", [10, pytest.param(300, marks=pytest.mark.storm)])
@pytest.mark.ranks(4)
def test_reshard_of_drawn_cuts_receives_the_lower_bound(pairs):
    rng = random.Random(7)
    for pair in range(pairs):
        full, held = drawn(rng, KINDS, rng.sample(SHAPES, 4), 4)
        wanted = {name: rectangles(rng.choice(KINDS), tuple(each.shape), 4, rng) for name, each in full.items()}
        kind = rng.choice([torch.float32, torch.float32, torch.bfloat16])
        received, bound = move(held, wanted, full, kind=kind, budget=rng.choice([512, 4096, 1 << 20]))
        assert received == bound, pair


@pytest.mark.ranks([storm(2), storm(3), 5])
def test_reshard_between_separate_ranks_moves_all():
    world, rng = dist.get_world_size(), random.Random(1)
    for givers in range(1, world):
        takers = world - givers
        full, held = drawn(rng, KINDS, SHAPES, givers)
        held = {name: [*each, *([[]] * takers)] for name, each in held.items()}
        wanted = {
            name: [*([[]] * givers), *rectangles(rng.choice(KINDS), tuple(each.shape), takers, rng)]
            for name, each in full.items()
        }
        received, bound = move(held, wanted, full)
        assert received == bound
        assert bool(received) == (dist.get_rank() >= givers)


@pytest.mark.ranks(2)
def test_reshard_with_empty_tensors_scalars_and_many_dims():
    shapes = [(), (0, 3), (2, 0), (1,), (3, 2, 4, 2, 3)]
    rng = random.Random(2)
    full, held = drawn(rng, ["rows"], shapes, 2)
    wanted = {name: rectangles("whole", tuple(each.shape), 2, rng) for name, each in full.items()}
    received, bound = move(held, wanted, full)
    assert received == bound


@pytest.mark.ranks(2)
def test_reshard_with_a_budget_of_one_element_moves_all():
    rng = random.Random(3)
    full, held = drawn(rng, ["columns"], [(5, 4), (3, 2, 2)], 2)
    wanted = {name: rectangles("whole", tuple(each.shape), 2, rng) for name, each in full.items()}
    received, bound = move(held, wanted, full, budget=8)
    assert received == bound


@for_each(source=[torch.float32, torch.bfloat16, torch.float64], target=[torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.ranks(2)
def test_reshard_casts_on_the_rank_with_the_wider_dtype(source, target):
    rng = random.Random(4)
    full = {"t": values((24, 16), 1, source)}
    held = {"t": rectangles("rows", (24, 16), 2, rng)}
    received, bound = move(held, {"t": rectangles("columns", (24, 16), 2, rng)}, full, kind=target, verify=True)
    assert received == bound == 96 * min(source.itemsize, target.itemsize)


EXTREME = torch.tensor([float("nan"), -float("nan"), 1e6, 1e-9, -0.0, float("inf"), 1.001, 3e38] * 5)


@for_each(
    source=[torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2],
    target=[torch.float32, torch.bfloat16, torch.float16],
)
@pytest.mark.ranks(2)
def test_reshard_with_verify_casts_values_that_the_target_lacks(source, target):
    given, other = EXTREME.to(source), torch.zeros(40, dtype=target)
    giver = State(model={"a": given}) if dist.get_rank() == 0 else State()
    reshard(giver, State(model={"a": other}), dtype=target, verify=True)
    torch.testing.assert_close(other, given.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.ranks(2)
def test_reshard_fills_parameters_made_in_inference_mode():
    model = make_model()
    with torch.inference_mode():
        other = make_model(1)
    reshard(State(model=model), State(model=other))
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.ranks(2)
def test_reshard_keeps_every_bit():
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x00000001], dtype=torch.int32).view(torch.float32)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide = torch.complex(torch.arange(3.0), -torch.arange(3.0)).to(torch.complex128)
    given = {"bits": bits, "codes": codes, "wide": wide}
    target = {name: torch.zeros_like(each) for name, each in given.items()}
    first = dist.get_rank() == 0
    reshard(State(model=given) if first else State(), State() if first else State(model=target), verify=True)
    for name, each in given.items() if not first else ():
        assert torch.equal(each.view(torch.uint8), target[name].view(torch.uint8))


def cases_of_bad_input(rank):
    """What replaces the source's model, the target's model, other keywords of the call, and the error."""
    good, other = {"a": torch.ones(4, 2), "b": torch.ones(3)}, {"a": torch.zeros(4, 2), "b": torch.zeros(3)}
    tied = torch.zeros(3)
    halves = rectangle((4, 2), 0, 0, 2, rank)
    gap = State(model={"a": torch.ones(2, 2)}, layout={"a": halves})
    memory, freed = torch.ones(14), torch.ones(3)
    beside = {"a": memory[:8].view(4, 2), "b": memory[8:11]}, {"a": other["a"], "b": memory[11:]}
    freed.untyped_storage().resize_(0)
    elements = "'a' in the target has elements that share memory"
    views, flat = torch.zeros(12), {"b": torch.zeros(3)}
    twice = Sharding((4, 2), (rectangle((4, 2), 0, 0, 2, 0).boxes + rectangle((4, 2), 0, 2, 4, 0).boxes))
    with warnings.catch_warnings(action="ignore"):  # deprecated, but in use
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    return {
        "missing": (good, {**other, "c": torch.zeros(1)}, {}, "missing in the source: c"),
        "unexpected": (good, {"a": other["a"]}, {}, "not wanted by anybody: b"),
        "shape": (good, {**other, "a": torch.zeros(2, 4)}, {}, r"'a' is torch.float32 \(4, 2\) in the source"),
        "dtype": (good, {**other, "a": torch.zeros(4, 2).half()}, {}, r"in the source, torch.float16 \(4, 2\)"),
        "gap": (gap, {"a": other["a"]}, {}, r"holds 'a' from index \(2, 0\) on, \(2, 2\)"),
        "shared": (good, {**other, "a": good["a"]}, {}, "'a' in the target shares memory with 'a' in the source"),
        "tied": ({**good, "c": torch.ones(3)}, {**other, "b": tied, "c": tied}, {}, "one tensor for 'b' and 'c'"),
        "float8": (good, other, {"dtype": torch.float8_e5m2}, "needs scales"),
        "budget": (good, other, {"budget": 0}, "budget"),
        "source": (good, other, {"source": good}, "source is a dict; pass a par_checkpoint.State"),
        "timeout": (good, other, {"timeout": -1}, "timeout is -1"),
        "differing": (good, other, {"release": rank == 0}, "release is"),
        "beside": (*beside, {"release": True}, "'b' in the target shares memory with 'a' in the source"),
        "overlapping": (good, {"a": views[:8].view(4, 2), "b": views[7:10]}, {}, "'a' and 'b' in the target share"),
        "one storage": (
            {"a": torch.ones(3), "b": torch.full((3, 1), 2.0)},
            {"a": views[:3], "b": views[:3, None]},
            {},
            "'a' and 'b' in the target share memory",
        ),
        "expanded": (good, {"a": torch.zeros(1, 2).expand(4, 2), **flat}, {}, elements),
        "stepped": (good, {"a": views.as_strided((4, 2), (1, 1)), **flat}, {}, elements),
        "boxes": (good, State(model={"a": torch.zeros(8), **flat}, layout={"a": twice}), {}, "boxes that overlap"),
        "freed": ({**good, "b": freed}, other, {}, "'b' has no memory, which was freed, as by reshard"),
        "quantized": ({**good, "b": quantized}, other, {}, "'b' is a quantized tensor; give its int_repr"),
        "dtype text": (good, other, {"dtype": "bfloat16"}, "dtype='bfloat16': not a floating-point dtype"),
        "integral": (good, other, {"dtype": (torch.float32, torch.int8)}, "int8.*: not a floating-point dtype"),
        "flag": (good, other, {"release": "no"}, "release is 'no'; it can be True, False"),
        "model": (State(model=3), other, {}, "model is a int; pass a module, or a mapping"),
        "optimizer": (State(model=good, optimizer=3), other, {}, "optimizer is a int without param_groups"),
    }


@for_each(case=cases_of_bad_input(0))
@pytest.mark.ranks(2)
def test_reshard_of_bad_input_raises_and_changes_nothing(case):
    source, target, options, text = cases_of_bad_input(dist.get_rank())[case]
    given = {
        side: each if isinstance(each, State) else State(model=each)
        for side, each in (("source", source), ("target", target))
    }
    target = given["target"].model
    before = copy.deepcopy(target)
    with pytest.raises((CheckpointError, ValueError, TypeError), match=text):
        reshard(**{**given, **options})
    assert all(torch.equal(target[name], each) for name, each in before.items())


@pytest.mark.ranks(2)
def test_reshard_fills_views_that_share_a_storage_but_no_element():
    matrix, given = torch.zeros(6, 9), {f"t{number}": values((6, 3), number) for number in range(3)}
    # The extents of these columns overlap, and no element is in two of them.
    target = {"t0": matrix[:, :3], "t1": matrix[:, 3:7:2].T, "t2": matrix[:, 4:9:2]}
    given["t1"] = values((2, 6), 1)
    tied = torch.zeros(3)
    given["u"] = given["v"] = torch.ones(3)
    reshard(State(model=given), State(model={**target, "u": tied, "v": tied}))
    assert all(torch.equal(target[name], given[name]) for name in target)
    assert tied.tolist() == [1, 1, 1]
    # The source may lie between the target's columns, too.
    reshard(State(model={"t0": matrix[:, :3]}), State(model={"t0": matrix[:, 3:8:2]}))
    assert torch.equal(matrix[:, 3:8:2], given["t0"])


@pytest.mark.ranks(2)
def test_reshard_of_an_error_on_one_rank_raises_on_both():
    model = {"a": torch.ones(2)}
    other = {"a": torch.zeros(2)} if dist.get_rank() else {"a": model["a"]}
    with pytest.raises(ValueError, match="shares memory"):
        reshard(State(model=model), State(model=other))
    assert dist.get_rank() == 0 or not other["a"].any()


@pytest.mark.ranks(2)
def test_reshard_without_strict_moves_what_fits():
    target = {"a": torch.zeros(2), "b": torch.zeros(3), "d": torch.zeros(1)}
    source = State(model={"a": torch.ones(2), "b": torch.ones(4), "c": torch.ones(1)})
    report = reshard(source, State(model=target), strict=False)
    assert (report.missing, report.unexpected) == (("d",), ("c",))
    assert [text.split()[0] for text in report.mismatched] == ["'b'"]
    assert target["a"].tolist() == [1, 1]
    assert not target["b"].any()


@pytest.mark.ranks(2)
def test_reshard_of_state_without_an_optimizer_raises():
    model, other = make_model(), make_model(1)
    optimizer = torch.optim.AdamW(other.parameters())
    with pytest.raises(ValueError, match="target has optimizer"):
        reshard(State(model=model), State(model=other, optimizer=optimizer))


@for_each(source=RUNS)
@pytest.mark.parametrize("pairs", ["every other", pytest.param("all", marks=pytest.mark.storm)])
@pytest.mark.ranks(4)
def test_reshard_of_a_training_continues_in_other_topologies(source, pairs):
    run = RUNS[source]()
    run.steps(BEFORE)
    before = run.whole()
    moved = []
    for distance, (name, kind) in enumerate(RUNS.items(), list(RUNS).index(source)):
        if pairs == "every other" and distance % 2 == 0:
            continue
        other = kind(seed=7)
        reshard(
            State(model=run.model, optimizer=run.optimizer),
            State(model=other.model, optimizer=other.optimizer),
            verify=True,
        )
        for key, value in other.whole().items():
            assert torch.equal(value, before[key]), f"{source} to {name}: {key}"
        moved.append((name, other))
    expected = run.steps(AFTER)
    for name, other in moved:
        losses = torch.tensor(other.steps(AFTER))
        # DTensors sum in another order than one process; these are float64.
        torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-12, atol=0, msg=f"{source} to {name}")


@pytest.mark.ranks(2)
def test_reshard_sets_param_groups_schedulers_and_extra():
    first = dist.get_rank() == 0

    def made(seed):
        model = make_model(seed)
        optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}])
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    model, optimizer, scheduler = made(0)
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        scheduler.step()
    other = made(1)
    source = State(model=model, optimizer=optimizer, scheduler=scheduler, extra={"samples": 24, "rng": torch.arange(3)})
    target = State(model=other[0], optimizer=other[1], scheduler=other[2])
    report = reshard(source if first else State(), target)
    assert report.extra["samples"] == 24
    assert report.extra["rng"].tolist() == [0, 1, 2]
    assert [group["lr"] for group in other[1].param_groups] == [group["lr"] for group in optimizer.param_groups]
    assert other[2].state_dict() == scheduler.state_dict()
    assert train(other[0], other[1], AFTER) == train(model, optimizer, AFTER)


@pytest.mark.ranks(3)
def test_reshard_returns_each_rank_its_extra():
    rank = dist.get_rank()
    source = State(extra=rank * 10) if rank else State()
    report = reshard(source, State())
    assert report.extra_of_ranks == (10, 20)
    assert report.extra == (10, 20, 10)[rank]


@pytest.mark.cpu(reason="compares with a model on the host")
@pytest.mark.ranks(2)
def test_reshard_with_release_frees_the_source():
    rank = dist.get_rank()
    shapes = {f"t{number}": (32, 8) for number in range(6)}
    source, target = {}, {}
    for number, (name, shape) in enumerate(shapes.items()):
        sharding = rectangle(shape, 0, 16 * rank, 16 * rank + 16, rank)
        source[name] = values(shape, number)[sharding.boxes[0].slices].clone()
        set_sharding(source[name], sharding)
        target[name] = torch.empty(shape, device="meta")
    report = reshard(State(model=source), State(model=target), release=True, budget=1024)
    assert all(each.untyped_storage().nbytes() == 0 for each in source.values())
    for number, (name, shape) in enumerate(shapes.items()):
        assert torch.equal(target[name], values(shape, number))
    assert report.received == report.sent == report.local == 6 * 16 * 8 * 4


@pytest.mark.ranks(2)
def test_reshard_with_release_keeps_one_round_at_a_time(monkeypatch):
    from par_checkpoint.live.source import MemorySource

    held, shape, count = [], (64, 64), 8
    source = {f"t{number}": values(shape, number) for number in range(count)}
    target = {name: torch.empty(shape, device="meta") for name in source}
    for each in source.values():
        set_sharding(each, whole(shape, (0, 1)))
    release = MemorySource._release_

    def released(self, *args):
        live = [each for each in (*source.values(), *target.values()) if not each.is_meta]
        held.append(sum(each.untyped_storage().nbytes() for each in live))
        release(self, *args)

    monkeypatch.setattr(MemorySource, "_release_", released)
    reshard(State(model=source), State(model=target), release=True, budget=shape[0] * shape[1] * 4 // 2)
    one = shape[0] * shape[1] * 4
    assert max(held) == (count + 1) * one  # all tensors, and the one that is in both for the moment


@pytest.mark.ranks(2)
def test_reshard_agrees_four_times_and_keeps_its_buffers(monkeypatch):
    from par_checkpoint.transfer.exchange import ReusedBuffer
    from par_checkpoint.transfer.ranks import Ranks

    rng, full, made, counted = random.Random(5), {"t": values((24, 16), 1)}, [], Counter()
    held, wanted = ({"t": rectangles(kind, (24, 16), 2, rng)} for kind in ("rows", "columns"))
    make = ReusedBuffer.__init__
    monkeypatch.setattr(ReusedBuffer, "__init__", lambda self: made.append(1) or make(self))
    for name in ("total", "distinct_bytes", "broadcast"):
        act = getattr(Ranks, name)
        noted = lambda self, value, name=name, act=act: counted.update([name]) or act(self, value)  # noqa: E731
        monkeypatch.setattr(Ranks, name, noted)
    calls = [(1 << 20, True), (1 << 20, False), (1 << 10, True), (1 << 10, False)]
    for budget, is_new in calls:
        made.clear(), counted.clear()
        move(held, wanted, full, budget=budget)
        assert bool(made) == is_new
    # The state that ranks have, the names that they fill, the pieces that they lack, and the end.
    assert counted == {"total": 4}
    release_memory()
    move(held, wanted, full, budget=1 << 10)
    assert made


@pytest.mark.ranks(2)
def test_reshard_converts_names_and_slices():
    rank = dist.get_rank()
    full = torch.arange(24.0).view(6, 4)
    parts = rectangle((6, 4), 0, 3 * rank, 3 * rank + 3, rank)

    def convert(name, shape):
        assert (name, shape) == ("qkv", (6, 4))
        return [TensorSlice(name=part, shape=(2, 4), start=(2 * at, 0), dims=(0, 1)) for at, part in enumerate("qkv")]

    fused = State(model={"qkv": full[parts.boxes[0].slices].clone()}, layout={"qkv": parts}, convert=convert)
    apart = {f"to.{part}": torch.zeros(2, 4) for part in "qkv"}
    reshard(fused, State(model=apart, names=[(r"^to\.", "")]))
    assert torch.equal(torch.cat(list(apart.values())), full)
    again = State(model={"qkv": torch.zeros(3, 4)}, layout={"qkv": parts}, convert=convert)
    reshard(State(model=apart, names=[(r"^to\.", "")]), again)
    assert torch.equal(again.model["qkv"], fused.model["qkv"])


class Tied(nn.Module):
    """A head that is the embedding, or not."""

    def __init__(self, *, tied):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


@pytest.mark.ranks(2)
def test_reshard_of_a_tied_tensor_fills_both():
    torch.manual_seed(0)
    source, target = Tied(tied=True), Tied(tied=False)
    reshard(State(model=source) if dist.get_rank() == 0 else State(), State(model=target))
    dist.broadcast(source.embedding.weight.data, 0)
    assert torch.equal(target.embedding.weight, source.embedding.weight)
    assert torch.equal(target.head.weight, source.embedding.weight)


@pytest.mark.ranks(4)
def test_reshard_of_two_groups_at_once_moves_both():
    mine = dist.get_rank() // 2
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][mine]
    everyone = dist.new_group()
    found = {}

    def run(name, group, value):
        target = {"t": torch.zeros(64, 3)}
        source = State(model={"t": torch.full((64, 3), value)}) if dist.get_rank(group) == 0 else State()
        for _ in range(3):
            reshard(source, State(model=target), group=group)
        found[name] = target["t"]

    threads = [
        threading.Thread(target=run, args=args) for args in (("pair", group, 1.0 + mine), ("all", everyone, 9.0))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["pair"].unique().tolist() == [1.0 + mine]
    assert found["all"].unique().tolist() == [9.0]


@pytest.mark.ranks(2, timeout=60)
def test_reshard_whose_copy_fails_on_one_rank_raises_on_all(monkeypatch):
    from par_checkpoint.live import source as module

    first = dist.get_rank() == 0
    if first:
        monkeypatch.setattr(module, "copy_elements_", lambda *_: {}["no memory"])
    target = {"t": torch.zeros(3, 5), "u": torch.zeros(2)}
    source = State(model={"t": torch.ones(5, 3).t(), "u": torch.ones(2)}) if first else State()
    with pytest.raises(CheckpointError, match=r"no memory.*now undefined"):
        reshard(source, State() if first else State(model=target))


@pytest.mark.ranks(2, timeout=60)
def test_reshard_with_verify_names_what_was_changed(monkeypatch):
    from par_checkpoint import CorruptError
    from par_checkpoint.live import source as module

    first = dist.get_rank() == 0
    real = module.copy_elements_

    def flipped(into, source):
        real(into, source)
        if first:
            into.view(-1).view(torch.uint8)[1] ^= 4

    monkeypatch.setattr(module, "copy_elements_", flipped)
    target = {"t": torch.zeros(3, 5)}
    sharding = Sharding((3, 5), whole((3, 5), (1,)).boxes)
    set_sharding(target["t"], sharding)
    source = State(model={"t": torch.ones(5, 3).t()}) if first else State()
    with pytest.raises(CorruptError, match="'t' and 0 more arrived with other values"):
        reshard(source, State() if first else State(model=target), verify=True, budget=16)


def test_reshard_in_one_process_copies():
    model, other = make_model(0), make_model(1)
    optimizer, second = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, other))
    train(model, optimizer, BEFORE)
    report = reshard(State(model=model, optimizer=optimizer), State(model=other, optimizer=second))
    assert (report.received, report.sent) == (0, 0)
    assert train(other, second, AFTER) == train(model, optimizer, AFTER)


@pytest.mark.cpu(reason="compares with a model on the host")
@pytest.mark.ranks(2)
def test_reshard_into_a_model_on_the_meta_device_fills_it():
    source = make_model(3)
    with torch.device("meta"):
        target = make_model(0)
    reshard(State(model=source) if dist.get_rank() == 0 else State(), State(model=target))
    assert not any(each.is_meta for each in target.parameters())
    weights = Run(seed=3).whole()
    assert all(torch.equal(each, weights[name]) for name, each in target.named_parameters())
