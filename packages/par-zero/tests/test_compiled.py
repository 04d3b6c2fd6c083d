"""Blocks that are compiled one by one: one graph for all of them at every stage, and the numbers of eager blocks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from par_testing import for_each, storm
from par_zero import (
    Offload,
    disk_usage,
    no_sync,
    predict_step,
    program,
    reduces_gradients,
    reload_state,
    reset,
    residency,
    shard,
    summon,
    sync_module_states_,
    trace,
)

from .helpers import adamw, assert_same, batch, deferred, loss_of, sharded, train, whole

# The tracer reads the gradients of all inputs, also of those that have none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

ONE_BY_ONE = (
    (0, "in place", "before"),
    (3, "in place", "before"),
    (3, "wrapped", "after"),
    *(storm((stage, "wrapped", "before")) for stage in (1, 2, 3)),  # a block has the hooks of stage 0 at 1 and 2
    storm((3, "in place", "after")),
)
"""Stage, how blocks are compiled, and whether that is before or after `shard`."""

STEPS = ((4, 0), (6, 1), (4, 2), (6, 3))
"""Rows and seed of each step: two shapes, so that the second shape recompiles."""


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


class Block(nn.Module):
    """A class of its own: torch.compile skips the forward of torch's containers if they are compiled in place."""

    def __init__(self):
        super().__init__()
        self.expand, self.contract = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.contract(self.expand(x).tanh())


def blocks(depth):
    torch.manual_seed(0)
    # The first layer's output requires gradients, as the other inputs of blocks do, so that no guard differs.
    return nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(depth)))


def compile_in_place(module, **options):
    for block in module[1:]:
        block.compile(**options)


def compile_wrapped(module, **options):
    for number, block in enumerate(module[1:], 1):
        module[number] = torch.compile(block, **options)


COMPILE = {"in place": compile_in_place, "wrapped": compile_wrapped}


def trained(stage, compile_blocks=None, when="before"):
    """Return the parameters after some steps, by order, and the counter of graphs."""
    graphs = CompileCounterWithBackend("aot_eager")
    # A graph break raises, and so does a block that exceeds the limit of recompiles.
    options = {"backend": graphs, "fullgraph": True}
    torch.compiler.reset()
    module = blocks(depth=10)  # more blocks than torch.compile makes graphs of one code
    if compile_blocks is not None and when == "before":
        compile_blocks(module, **options)
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    if compile_blocks is not None and when == "after":
        compile_blocks(module, **options)
    for rows, seed in STEPS:
        microbatches = [batch(seed, width=8, rows=rows, micro=micro) for micro in range(2)]
        train(module, optimizer, [microbatches], deferred=deferred(module))
    return dict(enumerate(whole(module).values())), graphs


@for_each(case=ONE_BY_ONE)
@pytest.mark.ranks(2, timeout=240)
def test_compiled_blocks_share_one_graph_and_equal_eager(case):
    stage, how, when = case
    found, graphs = trained(stage, COMPILE[how], when)
    # aot_eager runs the operators that eager runs, in their order.
    assert_same(found, trained(stage)[0])
    assert graphs.frame_count == 2  # the first shape, and then any shape


@pytest.mark.ranks(2)
def test_compiled_module_at_stage_3_breaks_only_at_units():
    module, optimizer = sharded(blocks(depth=3), 3)
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(module, backend=graphs)
    for step in range(2):
        train(compiled, optimizer, [[batch(step, width=8)]])
    assert graphs.frame_count == 2  # of the first layer, and of all blocks


@pytest.mark.ranks(2)
def test_compiled_blocks_within_one_unit_share_one_graph():
    results = []
    for backend in (None, graphs := CompileCounterWithBackend("aot_eager")):
        module = nn.Sequential(*blocks(depth=1), blocks(depth=3))
        for block in module[2][1:] if backend else ():
            block.compile(backend=backend, fullgraph=True)
        module, optimizer = sharded(module, 3)
        for step in range(2):
            train(module, optimizer, [[batch(step, width=8)]])
        results.append(whole(module))
    assert_same(*results)
    assert graphs.frame_count == 1


@pytest.mark.ranks(2)
def test_inner_module_of_compiled_unit_called_directly_raises():
    module, optimizer = sharded(blocks(depth=3), 3)
    train(module, optimizer, [[batch(0, width=8)]])
    assert module[1].expand(batch(1, width=8)).shape == (4, 16)
    reset(module)
    module[1].compile(backend="eager")
    train(module, optimizer, [[batch(0, width=8)]])
    with pytest.raises(RuntimeError, match=r"'1\.expand\.weight' is used by linear outside of a call of its module"):
        module[1].expand(batch(1, width=8))
    assert module[2].expand(batch(1, width=8)).shape == (4, 16)  # of an eager unit


@for_each(stage=(0, 3))
@pytest.mark.ranks(2)
def test_compiled_wrapper_has_the_functions_of_its_module(stage):
    module = blocks(depth=2)
    compiled = torch.compile(module, backend="eager")
    optimizer = adamw(module.parameters())
    shard(compiled, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 300})
    with no_sync(compiled):
        assert not reduces_gradients(module)
        assert not reduces_gradients(compiled)
        loss_of(compiled, batch(0, width=8)).backward()
    loss_of(compiled, batch(1, width=8)).backward()
    optimizer.step()
    with summon(compiled):
        names = [name for name, _ in compiled.named_parameters()]
        assert names[0] == "_orig_mod.0.weight"  # as torch names it
        shapes = [tensor.shape for tensor in compiled.state_dict().values()]
    assert shapes == [parameter.shape for parameter in blocks(depth=2).parameters()]
    compiled.zero_grad()
    reset(compiled)
    assert isinstance(module, nn.Module)


@pytest.mark.cpu(reason="traces of a device have the other bytes of its allocator")
@for_each(stage=(0, 3), wrapped_first=(True, False))
@pytest.mark.ranks(1)
def test_compiled_wrapper_reports_what_its_module_reports(stage, wrapped_first, tmp_path):
    """The names and bytes of a wrapped module are those of the module, wherever it is wrapped."""

    def reports(wrap):
        module = nn.Sequential(*blocks(depth=3)[1:])
        module = wrap(module) if wrapped_first else module
        sync_module_states_(module, group=dist.group.WORLD)
        optimizer = adamw(module.parameters())
        found = [predict_step(module, optimizer, stage=stage, ranks=1).program]
        offload = Offload(optimizer="disk", path=tmp_path, budget="1MB" if stage == 3 else None)
        shard(module, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 1}, offload=offload)
        module = module if wrapped_first else wrap(module)
        for step in range(2):
            train(module, optimizer, [[batch(step, width=8)]])
        found += [program(module), residency(module), disk_usage(module).pieces, reload_state(module, 10**6)]
        return [*found, trace(module)]

    assert reports(lambda module: torch.compile(module, backend="eager")) == reports(lambda module: module)
