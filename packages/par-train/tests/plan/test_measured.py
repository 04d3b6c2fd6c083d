"""Memory and traffic of running trainers are what was predicted.

Traffic to the byte, and state to the byte but for counters of steps and the like. Activations to 1 %: what norms know
of a token has 2 bytes on CPUs where it has 4 on GPUs. What replicas keep to receive into is what gloo needs.
"""

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest
import torch
import torch.distributed as dist

from par_groups import ProcessGroups, Topology
from par_pipeline.wire.lanes import Lane
from par_plan.costs.memory import zero_sharding
from par_plan.costs.traffic import data_traffic
from par_plan.inputs import NUMBER_WIDTHS
from par_plan.shape import ModelSlice, Shape, TensorSplit, count
from par_testing import count_collectives, for_each, storm
from par_train.jobs.byte_gpt import fill_, make_gpt
from par_train.jobs.options import ModelOptions, TrainOptions
from par_train.jobs.trainer import make_optimizer
from par_zero import shard

from .measured_runs import SavedPeak, running

SLACK = 4096 + 6 * 5056  # bytes: counters of steps, loss scale, a batch; states of torch's generator of the loader
CLOSE = 0.01
AGREEMENT = torch.float64  # of the world, on norm and loss: some bytes that no axis is charged
SMALL = ModelOptions(width=32, layers=2, heads=4, context=16)


def received(events):
    """Bytes and operations: flags of gradients there were, and all else."""
    sums, calls = Counter(), Counter()
    for event in events:
        if event.dtype != AGREEMENT:
            kind = "flags" if event.dtype == torch.int32 else "values"
            sums[kind] += received_of(event)
            calls[kind] += 1
    return sums, calls


def received_of(event):
    part = Fraction(len(event.ranks) - 1, len(event.ranks))
    return {"all_reduce": 2 * part, "send": 0, "recv": 1}.get(event.op, part) * event.elements * event.dtype.itemsize


def predicted(transfers, axis):
    sums, calls = Counter(), Counter()
    for move in transfers:
        assert move.axis == axis
        kind = "flags" if move.what == "flags" else "values"
        sums[kind] += Fraction(move.bytes)
        calls[kind] += move.operations
    return sums, calls


def assert_state(run, more=0, apart=0, kept=0, fewer=0):
    """After a step; gathered parameters are gone, what gradients were reduced in is kept for the next one.

    Of two chunks, or of one (`fewer`), if each reduction had arrived before the next began.
    """
    job, memory = run.trainer.options, run.predicted.memory
    whole = run.predicted.parameters * NUMBER_WIDTHS[job.precision].weight
    gathered = whole - apart if job.zero == 3 else 0  # all of one unit; of several, all but what is `apart`
    expected = memory.state + memory.buffers - gathered + kept
    low, high = expected - SLACK - fewer, expected + SLACK + more
    assert low < run.wait_for_bytes(low, high) < high, memory


def step(run):
    """One more: what was communicated, and the most that autograd kept."""
    with SavedPeak(run.trainer.model.parameters()) as saved, count_collectives() as counted:
        run.trainer.advance(next(iter(run.trainer.loader)))
    return counted.events, saved.peak


def assert_all(axis, parallel, **options):
    """State, activations, bytes and operations of a run over one axis."""
    with running(parallel, **options) as run:
        assert_state(run)
        events, peak = step(run)
        case = (parallel, options)
        assert received(events) == predicted(run.predicted.transfers, axis), case
        assert run.predicted.memory.activations == pytest.approx(peak, rel=CLOSE), case


TYPICAL = [("fp32", 1), ("bf16", 0), ("bf16", 3), ("bf16-amp", 2)]
ALL = [*product(("fp32", "bf16", "bf16-sr"), range(4)), *product(("bf16-amp",), (0, 2))]


@pytest.mark.parametrize("cases", [TYPICAL, pytest.param(ALL, marks=pytest.mark.storm)], ids=["typical", "all"])
@pytest.mark.ranks(2, timeout=120, backend="gloo")
def test_replicas_in_every_stage(cases):
    """Autocast, of which replicas see what they see of fp32, at two stages: nothing is shared, or all that can be."""
    for precision, zero in cases:
        with running({"data": 2}, zero=zero, precision=precision) as run:
            block = sum(each.nbytes for each in make_gpt(run.trainer.options.model).blocks[0].parameters())
            assert_state(run, fewer=2 * block if zero == 3 else 0)
            sums, _ = received(step(run)[0])
            assert sums == predicted(run.predicted.transfers, "data")[0], (precision, zero)


@pytest.mark.ranks(2, timeout=120, backend="gloo")
def test_replicas_that_add_up_microbatches_reduce_once_and_keep_the_activations_of_one():
    for zero in (0, 1, 3):
        with running({"data": 2}, zero=zero, precision="bf16", microbatches=4) as run:
            named = make_gpt(run.trainer.options.model).named_parameters()
            ends = sum(NUMBER_WIDTHS["bf16"].gradient * each.numel() for name, each in named if "blocks." not in name)
            assert_state(run, fewer=ends)  # the second chunk, which is reduced in what the first has left if that came
            events, peak = step(run)
            assert received(events)[0] == predicted(run.predicted.transfers, "data")[0], zero
            if zero < 3:  # whose gathered parameters autograd is seen to keep
                assert run.predicted.memory.activations == pytest.approx(peak, rel=CLOSE)


@pytest.mark.storm  # the same traffic in the main job, below
@pytest.mark.ranks(2)
def test_all_units_but_the_last_two_and_the_ends_are_gathered_twice():
    model = ModelOptions(width=512, layers=3, heads=4, context=16)  # a block is more than a bucket
    gpt = fill_(make_gpt(model), 0)
    optimizer = make_optimizer(gpt, TrainOptions())
    shard(gpt, optimizer, stage=3, group=dist.group.WORLD)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    for _ in range(2):
        with count_collectives() as counted:
            gpt.layers.cross_entropy(gpt(tokens), tokens, classes=256).backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = count(
        Shape(layers=3, width=512, heads=4, context=16), TensorSplit(), ModelSlice(blocks=3, first=True, last=True)
    )
    transfers = data_traffic(zero_sharding(whole, NUMBER_WIDTHS["fp32"], zero=3, ranks=2), NUMBER_WIDTHS["fp32"])
    assert received(counted.events)[0] == predicted(transfers, "data")[0]


@pytest.mark.ranks(2, timeout=120, backend="gloo")
def test_shared_parameters_of_several_units_in_the_main_job():
    with running({"data": 2}, zero=3, model=ModelOptions(width=512, layers=3, heads=4, context=16)) as run:
        block = sum(each.nbytes for each in make_gpt(run.trainer.options.model).blocks[0].parameters())
        assert_state(run, apart=block, fewer=2 * block)  # two of three blocks are there at a time
        assert received(step(run)[0])[0] == predicted(run.predicted.transfers, "data")[0]


@pytest.mark.ranks(2, backend="gloo")
def test_sizes_that_do_not_divide_are_padded_by_less_than_16_elements_a_rank_and_group():
    model = ModelOptions(width=15, layers=3, heads=3, context=17)
    padding = 16 * 2 * 2 * (4 + 4 + 8)  # two groups of the optimizer; parameter, gradient, moments
    for zero in range(3):
        with running({"data": 2}, zero=zero, model=model) as run:
            assert_state(run, padding)


WHOLE, BY_SEQUENCE = ("bf16", "bf16-amp", "fp8"), ("fp32", "bf16", "bf16-amp", "fp8")


@pytest.mark.parametrize(
    ("of_whole", "by_sequence"),
    [(("bf16-amp",), ("fp8",)), pytest.param(WHOLE, BY_SEQUENCE, marks=pytest.mark.storm)],
    ids=["typical", "all"],
)
@pytest.mark.ranks(2, timeout=120)
def test_tensor_ranks_in_1d(of_whole, by_sequence):
    for sequence, precisions in ((False, of_whole), (True, by_sequence)):
        tensor = {"size": 2, "mode": "1d", "sequence_parallel": sequence}
        for precision in precisions:
            assert_all("tensor", {"tensor": tensor}, precision=precision)
    assert_all("tensor", {"tensor": tensor}, microbatches=2)


@pytest.mark.parametrize(
    "precisions", [("bf16",), pytest.param(("fp32", "bf16", "bf16-amp"), marks=pytest.mark.storm)], ids=["bf16", "all"]
)
@pytest.mark.ranks(4, timeout=120)
def test_tensor_ranks_in_2d(precisions):
    for precision in precisions:
        assert_all("tensor", {"tensor": {"size": 4, "mode": "2d"}}, precision=precision, model=SMALL)


@for_each(tensor=(storm({"mode": "2.5d", "depth": 2}), {"mode": "3d"}))
@pytest.mark.ranks(8, timeout=120)
def test_tensor_ranks_in_two_and_a_half_and_three_dimensions(tensor):
    assert_all("tensor", {"tensor": {"size": 8, **tensor}}, model=SMALL)


@pytest.mark.ranks(4)
def test_a_table_that_is_tied_in_2d_is_swapped_with_the_transposed_rank():
    model = ModelOptions(width=64, layers=1, heads=4, context=16, tied=True)
    with running({"tensor": {"size": 4, "mode": "2d"}}, model=model) as run:
        sums, _ = received(step(run)[0])
        swaps = 2 * 4 * 256 * 64 // 4 if dist.get_rank() in (0, 3) else 0  # on the diagonal there is nobody to ask
        assert sums["values"] + swaps == predicted(run.predicted.transfers, "tensor")[0]["values"]


STAGES = [
    ("1f1b", "fp32", True),
    ("interleaved", "bf16", False),  # of whose last rank one stage alone has logits
    ("zb_h1", "fp32", True),
]
MORE_STAGES = [("1f1b", "bf16", False), ("gpipe", "bf16", True), ("interleaved", "bf16", True)]


@pytest.mark.parametrize("cases", [STAGES, storm(MORE_STAGES)], ids=["typical", "more"])
@pytest.mark.ranks(2, timeout=120)
def test_stages_of_a_pipeline(cases):
    """What they send each other, and keep. Messages are not collectives, and are seen where they leave."""
    sent = []
    send = Lane.send

    def counting(lane, part, number):
        sent.append(part.nbytes)
        return send(lane, part, number)

    Lane.send = counting  # of this rank's process alone; what it sends, the other one receives
    for schedule, precision, tied in cases:
        model = ModelOptions(width=64, layers=4, heads=4, context=16, tied=tied)
        options = {"schedule": schedule, "precision": precision, "model": model, "microbatches": 4}
        with running({"pipeline": 2}, **options) as run:
            transfers = {move.what: move.bytes for move in run.predicted.transfers}
            # messages that wait for the next step, and the buffers that it will receive as many bytes in
            assert_state(run, more=transfers["activations"], kept=transfers["activations"])
            sent.clear()
            events, peak = step(run)
            case = schedule, tied
            assert sum(sent) == transfers["activations"], case
            assert received(events)[0]["values"] == transfers.get("tied table", 0), case
            if schedule != "zb_h1":
                assert run.predicted.memory.activations == pytest.approx(peak, rel=CLOSE), case
            else:  # inputs and gradients of linear layers, which do not wait in autograd, are counted as its are
                assert peak < (1 + CLOSE) * run.predicted.memory.activations, case


@pytest.mark.ranks(4, timeout=120)
def test_axes_do_not_disturb_each_other():
    """Sequence parallelism on replicas that share their gradients: partial sums are of shares, on average."""
    parallel = {"tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}
    with running(parallel, zero=1) as run, ProcessGroups(Topology.from_config(parallel, 4)) as groups:
        events = [each for each in step(run)[0] if each.dtype != AGREEMENT]
        for axis in ("data", "tensor"):
            mine = float(sum(received_of(each) for each in events if each.ranks == groups.ranks(axis)))
            total = torch.tensor(mine, dtype=torch.float64)
            dist.all_reduce(total)
            expected = sum(move.bytes for move in run.predicted.transfers if move.axis == axis)
            assert total.item() / 4 == pytest.approx(expected, rel=1e-9), axis
