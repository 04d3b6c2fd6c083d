"""Parameters that tensor ranks cut: an optimizer that must see whole tensors gets them, and steps as on one device."""

import zlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_groups import Box, ProcessGroups, Sharding, Topology, check_owned, gradients, segments_of, set_sharding
from par_testing import count_collectives, for_each, storm
from par_testing.optimizers import Shampoo
from par_zero import no_sync, shard, summon

from ..helpers import STAGES, NewtonSchulz, adamw, for_each_stage, matrices_and_rest, policies

EXACT = {"rtol": 0, "atol": 1e-10}  # fp64: sums in another order, and a few hundred times that through the iteration
WIDTH = 9
SPLIT = {"fused": (6, 5, 4), "shared": (5, 2)}
"""Rows of the matrices in one weight, of which no number of ranks divides all. All ranks copy the last of `shared`."""
SHAPES = {"fused": (15, WIDTH), "shared": (7, 6), "bias": (15,), "back": (WIDTH, 14), "grid": (7, 11)}
SHAPES |= {"square": (5, 5), "norm": (WIDTH,), "few": (3, 8)}
GRIDS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}
"""Rows and columns of tensor ranks that cut `grid`, by their number."""


def drawn(*key):
    """Whole tensors for all names, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) / 3 for name, shape in SHAPES.items()}


def even(length, ranks, rank):
    """First index and number of indices: as even as can be, the first ranks one more."""
    start = length // ranks * rank + min(rank, length % ranks)
    return start, length // ranks + (rank < length % ranks)


def row_of(boxes, shape, copies, sum_over=()):
    """A record of rectangles that lie one after the other in the local tensor."""
    made, offset = [], 0
    for start, size in boxes:
        stride = (size[1], 1) if len(size) == 2 else (1,)
        if min(size):
            made.append(Box(start, size, offset, stride, copies, sum_over))
        offset += size[0] * stride[0]
    return Sharding(shape, tuple(made))


def records(rank, ranks, copies, everybody):
    """How each tensor is cut on one of the tensor ranks."""
    found, first = {"fused": [], "bias": []}, 0
    for length in SPLIT["fused"]:
        start, count = even(length, ranks, rank)
        found["fused"].append(((first + start, 0), (count, WIDTH)))
        found["bias"].append(((first + start,), (count,)))
        first += length
    start, count = even(SHAPES["back"][1], ranks, rank)
    found["back"] = [((0, start), (WIDTH, count))]
    start, count = even(SHAPES["few"][0], ranks, rank)  # of four ranks the last has none
    found["few"] = [((start, 0), (count, SHAPES["few"][1]))]
    rows, columns = GRIDS[ranks]
    (top, height), (left, width) = even(7, rows, rank // columns), even(11, columns, rank % columns)
    found["grid"] = [((top, left), (height, width))]
    cut = {name: row_of(boxes, SHAPES[name], copies) for name, boxes in found.items()}
    whole = {name: row_of([((0,) * len(SHAPES[name]), SHAPES[name])], SHAPES[name], everybody) for name in SHAPES}
    start, count = even(5, ranks, rank)
    first = row_of([((start, 0), (count, 6))], SHAPES["shared"], copies).boxes
    stride, sum_over = (6, 1), ("tensor",) if ranks > 1 else ()  # each tensor rank has seen some of the data
    second = Box((5, 0), (2, 6), count * 6, stride, everybody, sum_over)
    return {**whole, **cut, "shared": Sharding(SHAPES["shared"], (*first, second))}


def parts(record, value, partial=1):
    """What a rank has of a whole tensor, flat; of what is a partial sum, `partial` of it."""
    boxes = [value[box.slices].reshape(-1) * (partial if box.sum_over else 1) for box in record.boxes]
    return torch.cat(boxes) if boxes else value.new_empty(0)


class Net(nn.Module):
    """Parameters whose gradients are given: the sum of all products with them is the loss."""

    def __init__(self, cut, values):
        super().__init__()
        self.cut = cut
        for name, record in cut.items():
            shape = record.boxes[0].size if len(record.boxes) == 1 else (-1, *SHAPES[name][1:])
            if not record.boxes:
                shape = (0, *SHAPES[name][1:])
            self.register_parameter(name, nn.Parameter(parts(record, values[name]).view(shape)))
            set_sharding(getattr(self, name), record)

    def forward(self, given, ranks):
        total = 0.0
        for name, parameter in self.named_parameters():
            total = total + (parameter.flatten() * parts(self.cut[name], given[name], 1 / ranks)).sum()
        return total


def pair_of(module, matrix):
    matrices, rest = matrices_and_rest(module)
    return [matrix(matrices), adamw(rest)]


def is_matrix(group):
    return "betas" not in group


def apart(values):
    """The matrices in one weight as tensors by themselves."""
    return {
        f"{name}.{i}": each
        for name, value in values.items()
        for i, each in enumerate(value.split(SPLIT.get(name, len(value))))
    }


def on_one_device(matrix, steps, data, micro=1):
    """What plain torch gives, where the matrices in one weight are parameters by themselves."""
    parameters = {name: nn.Parameter(value.clone()) for name, value in apart(drawn("start")).items()}
    optimizers = [
        matrix([each for each in parameters.values() if each.ndim == 2]),
        adamw([each for each in parameters.values() if each.ndim != 2]),
    ]
    for step in range(steps):
        every = [apart(drawn(step, rank, n)) for rank in range(data) for n in range(micro)]
        for name, parameter in parameters.items():
            parameter.grad = sum(each[name] for each in every) / data
        for optimizer in optimizers:
            optimizer.step()
    return {
        name: torch.cat([value.detach() for key, value in parameters.items() if key.partition(".")[0] == name])
        for name in SHAPES
    }


class World:
    """A net that is cut over tensor ranks, and the data ranks that share each part."""

    def __init__(self, groups, matrix, stage, **options):
        self.groups, self.ranks, self.data = groups, groups.size("tensor"), groups.size("data")
        copies = groups.topology.group("data", dist.get_rank())
        cut = records(groups.rank("tensor"), self.ranks, copies, tuple(range(dist.get_world_size())))
        self.net = Net(cut, drawn("start"))
        self.optimizers = pair_of(self.net, matrix)
        given = {
            "atomic": is_matrix,
            "bucket": 600,
            "tensor_group": groups["tensor"] if self.ranks > 1 else None,
            **options,
        }
        shard(self.net, self.optimizers, stage=stage, group=groups["data"], **policies(**given))

    def train(self, steps, micro=1, first=0):
        for step in range(first, first + steps):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            for n in range(micro):
                given = drawn(step, self.groups.rank("data"), n)
                if n < micro - 1:
                    with no_sync(self.net):
                        self.net(given, self.ranks).backward()
                else:
                    self.net(given, self.ranks).backward()
            for optimizer in self.optimizers:
                optimizer.step()
        return self

    def check(self, expected, **tolerance):
        with summon(self.net):
            for name, parameter in self.net.named_parameters():
                found = parts(self.net.cut[name], expected[name])
                given = tolerance or EXACT
                torch.testing.assert_close(parameter.detach().flatten(), found, **given, msg=name.__add__)


def grids(world):
    """Every way to share a world between data and tensor ranks."""
    for tensor in (each for each in range(1, world + 1) if world % each == 0):
        with ProcessGroups(Topology({"data": world // tensor, "tensor": tensor})) as groups:
            yield groups


@pytest.mark.ranks([1, 3, storm(4)], timeout=120)  # test_microbatches_add_up has 4
def test_matrices_that_are_cut_step_as_on_one_device():
    """Also q, k and v in one weight, each by itself, on one device too; and copies whose gradients are partial."""
    for groups in grids(dist.get_world_size()):
        check_stages(groups, NewtonSchulz, steps=2)
        check_stages(groups, Shampoo, stages=(1,), steps=2)  # how tensors are put together is blind to the optimizer


@pytest.mark.ranks(4)
def test_microbatches_add_up():
    for groups in grids(4):
        check_stages(groups, NewtonSchulz, stages=(0, 2, 3), steps=2, micro=2)  # stage 1 reduces as stage 2


def check_stages(groups, matrix, stages=STAGES, **amount):
    expected = on_one_device(matrix, data=groups.size("data"), **amount)

    @for_each(stage=stages)
    def check(stage):
        World(groups, matrix, stage).train(**amount).check(expected)

    check()


@pytest.mark.ranks(4)
def test_each_gradient_and_each_tensor_of_an_optimizer_is_there_once():
    """As a norm and a checkpoint count them."""
    for groups in grids(4):
        check_each_is_there_once(groups=groups)


@for_each_stage
def check_each_is_there_once(groups, stage):
    world = World(groups, NewtonSchulz, stage).train(1)
    held = {}
    for optimizer in world.optimizers:
        for tensor in optimizer.param_groups[0]["params"]:
            for each in segments_of(tensor):
                before = held.get(each.name, Sharding(each.sharding.shape, ()))
                held[each.name] = Sharding(before.shape, before.boxes + each.sharding.boxes)
    check_owned(held.items(), dist.group.WORLD)
    everybody = range(4)
    squares = torch.zeros((), dtype=torch.float64)
    world.net.zero_grad()
    world.net(drawn(9, groups.rank("data"), 0), world.ranks).backward()
    for optimizer in world.optimizers:
        for _, box, gradient in gradients(optimizer):
            squares += gradient.square().sum() if box.owns(dist.get_rank(), everybody) else 0
    dist.all_reduce(squares)
    every = [drawn(9, rank, 0) for rank in range(groups.size("data"))]
    expected = sum((sum(each[name] for each in every) / len(every)).square().sum() for name in SHAPES)
    torch.testing.assert_close(squares, expected, rtol=1e-12, atol=0)


@for_each_stage
@pytest.mark.ranks(4)
def test_masters_of_more_digits_stay_and_what_is_written_from_outside_counts(stage):
    with ProcessGroups(Topology({"data": 2, "tensor": 2})) as groups:
        world = World(groups, NewtonSchulz, stage, param_dtype=torch.float32, reduce_dtype=torch.float64).train(3)
        assert all(each.dtype == torch.float64 for each in world.optimizers[0].param_groups[0]["params"])
        expected = on_one_device(NewtonSchulz, 3, 2)
        # Rounded once, at the end: had masters been rounded in each step, a few hundred times that would show.
        world.check({name: value.float() for name, value in expected.items()}, rtol=0, atol=6e-8)
        world.optimizers[0].zero_grad()
        start = drawn("start")
        with summon(world.net), torch.no_grad():
            for name, parameter in world.net.named_parameters():
                parameter.copy_(parts(world.net.cut[name], start[name]).view(parameter.shape))
        for group in world.optimizers[0].param_groups:
            group["lr"] = 0.0
        world.train(1, first=9)
        with summon(world.net):
            for name in ("fused", "back", "grid", "square", "shared"):
                wanted = parts(world.net.cut[name], start[name]).float()
                assert torch.equal(getattr(world.net, name).detach().flatten(), wanted), name


@pytest.mark.ranks(4)
def test_each_rank_steps_some_of_the_matrices_and_sends_no_more_than_their_parts():
    for groups in grids(4):
        world = World(groups, NewtonSchulz, 1).train(1)
        own = [tensor.numel() for tensor in world.optimizers[0].param_groups[0]["params"]]
        total = torch.tensor([sum(own)])
        dist.all_reduce(total)
        whole = sum(value.numel() for name, value in drawn("start").items() if value.ndim == 2)
        square = SHAPES["square"][0] ** 2  # which all tensor ranks have whole
        assert total.item() == whole + square * (groups.size("tensor") - 1)
        with count_collectives() as counted:
            world.train(1, first=1)
        own_group = groups.topology.group("tensor", dist.get_rank())
        exchanged = [each for each in counted.events if each.op.startswith("all_to_all") and each.ranks == own_group]
        assert len(exchanged) == (3 if world.ranks > 1 else 0)


def refused(*words, **given):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the words are looked for below
        shard(**policies(**{"stage": 1, "atomic": is_matrix, **given}))
    for word in words:
        assert word in str(raised.value), str(raised.value)
    dist.barrier()


def net_of(groups, change=None):
    copies = groups.topology.group("data", dist.get_rank())
    cut = records(groups.rank("tensor"), groups.size("tensor"), copies, tuple(range(dist.get_world_size())))
    if change is not None:
        change(cut)
    return Net(cut, drawn("start"))


@pytest.mark.ranks(4)
def test_what_does_not_fit_together_is_named_on_all_ranks_before_anything_changes():
    with ProcessGroups(Topology({"data": 2, "tensor": 2})) as groups:
        given = {"group": groups["data"], "tensor_group": groups["tensor"]}
        net = net_of(groups)
        words = ("NewtonSchulz would step a part of 'fused'", "update=dict(tensor_group=...)")
        refused(*words, module=net, optimizer=pair_of(net, NewtonSchulz), group=groups["data"])
        words = ("tensor_group=", "have only this rank in common")
        refused(
            *words, module=net, optimizer=pair_of(net, NewtonSchulz), group=groups["data"], tensor_group=groups["data"]
        )

        def lacking(cut):
            cut["back"] = row_of([((0, 0), (WIDTH, 5))], SHAPES["back"], groups.topology.group("data", dist.get_rank()))

        net = net_of(groups, lacking)
        words = ("of 'back' the ranks of tensor_group have 45 of 126 elements",)
        refused(*words, module=net, optimizer=pair_of(net, NewtonSchulz), **given)

        def gaps(cut):
            first, size = ((0, 0), (4, 7)) if groups.rank("tensor") else ((5, 3), (4, 7))
            cut["back"] = row_of([(first, size)], SHAPES["back"], groups.topology.group("data", dist.get_rank()))

        net = net_of(groups, gaps)
        words = ("have of 'back' are no rectangle together",)
        refused(*words, module=net, optimizer=pair_of(net, NewtonSchulz), **given)
        net = net_of(groups)
        matrices, rest = matrices_and_rest(net)
        adagrad = torch.optim.Adagrad(matrices)
        words = ("Adagrad has made state for 'fused' before its first step",)
        refused(*words, module=net, optimizer=[adagrad, adamw(rest)], **given)
        net = net_of(groups)
        optimizers = pair_of(net, NewtonSchulz)
        if dist.get_rank() == 3:  # of another tensor group and another data group than rank 0
            optimizers[1].param_groups[0]["weight_decay"] = float("nan")
        refused("NaN", module=net, optimizer=optimizers, **given)
        assert not hasattr(net, "no_sync")
        shard(net, pair_of(net, NewtonSchulz), stage=1, **policies(atomic=is_matrix, **given))
