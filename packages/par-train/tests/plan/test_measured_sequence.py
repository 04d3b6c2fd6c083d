"""Runs over sequences that are cut receive and keep what was predicted: bytes by kind exactly, activations to 1 %."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from par_testing import count_collectives
from par_train.jobs.options import ModelOptions

from .measured_runs import SavedPeak, running
from .test_measured import CLOSE, assert_state, received_of

MODEL = ModelOptions(width=64, layers=4, heads=8, context=32)
KINDS = ("keys and values", "tokens for heads", "states", "sums of losses", "flags", "data", "tensor")


class Messages(TorchDispatchMode):
    """Counts the bytes that messages and all-to-alls, whose parts may differ in size, bring, by what they are for.

    Attention's all-to-alls are functional collectives, those of replicas are not; rings have communicators of their
    own.
    """

    def __init__(self, groups):
        super().__init__()
        self.found = torch.zeros(2, len(KINDS), dtype=torch.float64)
        mode = groups.topology.modes["sequence"][0]
        self._inner = groups["ulysses" if mode == "2d" else "sequence"].group_name if mode in ("2d", "ulysses") else ""
        ring = groups.topology.channels
        self._rings = [each.group_name for one in ring for each in groups.channels(one.axes, one.count)]
        self._sequence = groups["sequence"].group_name

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            message, arriving, _, name = args
            foreign = sum(arriving) - arriving[dist.get_rank(dist.distributed_c10d._resolve_process_group(name))]
            received = foreign * math.prod(message.shape[1:]) * message.element_size()
            self._add("tokens for heads" if name == self._inner else "keys and values", received)
        elif func is torch.ops.c10d.alltoall_base_.default:  # parts are alike
            size = dist.ProcessGroup.unbox(args[2]).size()
            self._add("data", args[1].nbytes * (size - 1) / size)
        elif func is torch.ops.c10d.recv_.default:
            name, tag = dist.ProcessGroup.unbox(args[1]).group_name, args[3]
            # Replicas may be the ranks of the sequence; their messages have a tag.
            kind = (
                "keys and values" if name in self._rings else "states" if (name, tag) == (self._sequence, 0) else "data"
            )
            self._add(kind, sum(each.nbytes for each in args[0]))
        return func(*args, **(kwargs or {}))

    def _add(self, kind, number):
        self.found[:, KINDS.index(kind)] += torch.tensor([float(number), 1.0])


def kind_of(event, groups):
    """What a collective is for; None if no axis is charged for it, or it is counted elsewhere."""
    if event.op in ("send", "recv", "all_to_all"):
        return None
    if event.dtype == torch.float64:
        is_loss = (event.elements, event.ranks) == (2, groups.ranks("sequence"))
        return "sums of losses" if is_loss else None  # the others are what the world agrees on
    if event.dtype in (torch.int64, torch.uint8):
        return None  # batches that are not a data loader's are compared, and bytes are no activations
    if event.ranks != groups.ranks(("data", "sequence")):
        return "tensor"
    return "flags" if event.dtype == torch.int32 else "data"


def found_in(events, messages, groups):
    """Bytes and operations of a step by what they are for, [2, kinds]."""
    found = messages.found.clone()
    kinds = [(event, kind_of(event, groups)) for event in events]
    of_losses = [event for event, kind in kinds if kind == "sums of losses"]
    # The step's loss, which is there to be looked at, and its mean over the world, if that is these ranks.
    shown = of_losses[-2:] if groups.size("sequence") == dist.get_world_size() else of_losses[-1:]
    for event, kind in kinds:
        if kind is not None and not any(event is one for one in shown):
            found[:, KINDS.index(kind)] += torch.tensor([float(received_of(event)), 1.0])
    return found


def predicted(transfers):
    """Those that are predicted, but for what pipeline stages send each other."""
    said = torch.zeros(2, len(KINDS), dtype=torch.float64)
    for move in transfers:
        if move.axis != "pipeline":
            kind = move.what if move.what in KINDS else move.axis
            said[:, KINDS.index(kind)] += torch.tensor([move.bytes, move.operations])
    return said


def assert_bytes(events, messages, groups, transfers, case):
    """The mean over all ranks of bytes by kind, and of operations over the sequence's ranks."""
    both = torch.stack([found_in(events, messages, groups), predicted(transfers)])
    dist.all_reduce(both)
    both[:, 1, 4:] = 0  # how often replicas and tensor ranks meet is other tests' matter
    assert both[0].tolist() == both[1].tolist(), (case, KINDS)


def kept_message(run):
    """Bytes of the largest message of tokens for heads: q, k and v. CPUs keep its memory, accelerators do not."""
    groups, options = run.trainer.strategy.groups, run.trainer.options
    mode = groups.topology.modes["sequence"][0]
    if groups.size("ulysses" if mode == "2d" else "sequence") == 1 or mode not in ("2d", "ulysses"):
        return 0
    tokens = options.train.batch_size // groups.size("data") * MODEL.context // groups.size("sequence")
    return tokens * 3 * MODEL.width // groups.size("tensor") * (2 if options.precision.startswith("bf16") else 4)


def assert_as_predicted(parallel, **options):
    """Bytes and operations by kind, the mean over all ranks; state, and what autograd keeps."""
    case, options = (parallel, options), {"model": MODEL, **options}
    with running(parallel, **options) as run:
        groups = run.trainer.strategy.groups
        if groups.size("pipeline") == 1:  # whose messages wait for the next step
            assert_state(run, kept=kept_message(run))
        with (
            SavedPeak(run.trainer.model.parameters()) as saved,
            count_collectives() as counted,
            Messages(groups) as moved,
        ):
            run.trainer.advance(next(iter(run.trainer.loader)))
        assert_bytes(counted.events, moved, groups, run.predicted.transfers, case)
        if options.get("zero", 0) < 3:  # whose gathered parameters autograd is seen to keep
            peak = torch.tensor(saved.peak)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=groups["sequence"])  # of the rank that keeps most
            assert run.predicted.memory.activations == pytest.approx(peak.item(), rel=CLOSE), case


def over(ranks, mode, **options):
    return {"sequence": {"size": ranks, "mode": mode, **options}}


@pytest.mark.ranks(2, timeout=120, backend="gloo")
def test_every_mode_on_two_ranks():
    """Contiguous tokens, of which one rank fetches all and the other nothing, among them."""
    assert_as_predicted(over(2, "gather"), zero=1, precision="bf16")
    assert_as_predicted(over(2, "gather", split="contiguous", keep=True, parts=1))
    assert_as_predicted(over(2, "ring"), microbatches=2, precision="bf16-amp")
    assert_as_predicted(over(2, "ulysses"), precision="bf16")


TENSOR = {"size": 2, "mode": "1d"}
BY_TOKENS = {**TENSOR, "sequence_parallel": True}


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=120, backend="gloo")
def test_a_ring_beside_tensor_ranks_that_cut_the_tokens_further():
    assert_as_predicted({**over(2, "ring"), "tensor": BY_TOKENS}, zero=0)


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=300, backend="gloo")
def test_every_mode_on_four_ranks():
    for mode in ("gather", "ring", "ulysses"):
        assert_as_predicted(over(4, mode), precision="bf16")
        assert_as_predicted(over(4, mode), zero=2)
    for cut in ("contiguous", "zigzag", "balanced"):
        assert_as_predicted(over(4, "gather", split=cut))
    assert_as_predicted(over(4, "2d"))
    assert_as_predicted(over(4, "2d", ulysses=2, outer="gather"), precision="bf16")
    assert_as_predicted(over(4, "2d", ulysses=4))


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=300, backend="gloo")
def test_every_mode_beside_every_other_axis():
    for mode in ("gather", "ring", "ulysses"):
        sequence = over(2, mode)
        for zero in range(4):
            assert_as_predicted({**sequence, "data": 2}, zero=zero)
        for tensor in (TENSOR, BY_TOKENS):
            assert_as_predicted({**sequence, "tensor": tensor}, precision="bf16")
        for schedule in ("1f1b", "gpipe", "interleaved"):
            assert_as_predicted({**sequence, "pipeline": 2}, schedule=schedule, microbatches=4)


@pytest.mark.storm
@pytest.mark.ranks(8, timeout=300, backend="gloo")
def test_every_mode_beside_the_tensor_mode_2d():
    for mode in ("gather", "ring", "ulysses"):
        assert_as_predicted({**over(2, mode), "tensor": {"size": 4, "mode": "2d"}})
