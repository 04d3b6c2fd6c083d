"""An optimizer of whole matrices beside tensor parallelism and ZeRO: the update of one device, in every tensor mode."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_checkpoint import State, inspect, load, reshard, save
from par_groups import JointOptimizer, ProcessGroups, Topology
from par_layers import PartialGradientReducer, initialize, layer_set
from par_layers.examples import GPT
from par_precision import clip_grad_norm_
from par_testing import assert_equal_to_one_device, storm
from par_train import Strategy
from par_zero import shard, summon

LAYOUTS = {
    "1d": (4, {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, 4),
    "by sequence": (4, {"data": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}, 4),
    "copied keys and values": (4, {"tensor": {"size": 4, "mode": "1d", "kv_heads": 2}}, 2),
    "2d": (4, {"tensor": {"size": 4, "mode": "2d"}}, 4),
    "2d and data": (8, {"data": 2, "tensor": {"size": 4, "mode": "2d"}}, 4),
    "2.5d": (8, {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, 4),
    "3d": (8, {"tensor": {"size": 8, "mode": "3d"}}, 4),
}
"""Number of ranks, topology, and heads of keys and values."""

REASON = (
    "fp64: sums over ranks are in another order, and five steps of Newton and Schulz make rounding a few hundred times"
)


class MatricesAndRest(torch.optim.Optimizer):
    """Muon in the dtype of the parameters for groups of matrices, and SGD with momentum for others."""

    def __init__(self, module):
        parameters = list(module.parameters())
        matrices = {"params": [each for each in parameters if each.ndim == 2], "matrices": True}
        rest = {"params": [each for each in parameters if each.ndim != 2], "matrices": False}
        super().__init__([matrices, rest], {"lr": 0.02, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(parameter.grad)
                parameter.sub_(orthogonal(momentum) if group["matrices"] else momentum, alpha=group["lr"])


def orthogonal(matrix):
    """The matrix with singular values near one, by five steps of Newton and Schulz."""
    assert matrix.ndim == 2
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        square = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * square + 2.0315 * square @ square) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


WHICH = {"atomic": lambda group: group["matrices"], "elementwise": lambda group: not group["matrices"]}
"""How the groups of `MatricesAndRest` are stepped."""


def gpt(layers, key_heads, *, tied=False):
    model = GPT(layers, 29, 32, 4, 2, 12, tied=tied, key_heads=key_heads)
    initialize(model, seed=0)
    return model.double()


def data(step):
    return torch.randint(29, (8, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model, rows):
    return model.loss(rows[:, :-1], rows[:, 1:])


def one_device(key_heads, *, tied, clip):
    """q, k and v are matrices by themselves here too, as the layers of one device say."""
    model = gpt(layer_set(None), key_heads, tied=tied)
    return trained_alone(model, lambda rows: loss_of(model, rows), clip)


def trained_alone(model, loss, clip, steps=2):
    """The model after some steps of one device."""
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    optimizer = MatricesAndRest(model)
    shard(model, optimizer, stage=0, group=alone, update=WHICH)
    for step in range(steps):
        optimizer.zero_grad()
        loss(data(step)).backward()
        if clip:
            clip_grad_norm_(optimizer, clip, alone)
        optimizer.step()
    return model


STAGES = {"1d": (1, 2), "copied keys and values": (0,)}
"""Those that always run: `CHAIN` has others, and a storm every stage in every mode."""


def cases():
    for name, (ranks, parallel, key_heads) in LAYOUTS.items():
        marks = [pytest.mark.ranks(ranks, timeout=180)]
        if name in STAGES:
            marks += [pytest.mark.storm] * (name != "1d")
            yield pytest.param(parallel, key_heads, STAGES[name], id=name, marks=marks)
        others = (0, 1, 2, 3) if "data" in parallel else (0,)
        if others != STAGES.get(name):
            yield pytest.param(parallel, key_heads, others, id=f"{name}, all", marks=[*marks, pytest.mark.storm])


@pytest.mark.parametrize(("parallel", "key_heads", "stages"), list(cases()))
def test_matrices_step_as_on_one_device_in_every_tensor_mode(parallel, key_heads, stages):
    for stage in stages:
        tied, clip = stage % 2 == 1, 0.5 if stage > 1 else None
        topology = Topology.from_config(parallel, dist.get_world_size())
        with ProcessGroups(topology) as groups:
            model = gpt(layer_set("auto", groups), key_heads, tied=tied)
            optimizer = MatricesAndRest(model)
            update = {**WHICH, "tensor_group": groups["tensor"]}
            shard(model, optimizer, stage=stage, group=groups["data"], overlap={"bucket": 40_000}, update=update)
            partial = PartialGradientReducer(optimizer, groups)
            rank, ranks = groups.rank("data"), groups.size("data")
            for step in range(2):  # the second has momentum
                optimizer.zero_grad()
                loss_of(model, data(step).chunk(ranks)[rank]).backward()
                partial.handle_gradient()
                if clip:
                    clip_grad_norm_(optimizer, clip, dist.group.WORLD)
                optimizer.step()
            reference = one_device(key_heads, tied=tied, clip=clip)
            assert_equal_to_one_device(model, reference, rtol=0, atol=1e-10, reason=REASON)


def stack(layers, *, tied=False):
    """The model as layers one after the other, as a pipeline takes it; tied, its first and last one share a table."""
    parts = gpt(layers, 4, tied=tied)
    first, last = nn.Sequential(parts.tokens, parts.positions), nn.Sequential(parts.norm, parts.head)
    return nn.Sequential(first, *parts.blocks, last)


def stack_alone(*, tied=False):
    """The same after its steps on one device."""
    layers = layer_set(None)
    reference = stack(layers, tied=tied)
    trained_alone(reference, lambda rows: layers.cross_entropy(reference(rows[:, :-1]), rows[:, 1:], classes=29), 0.5)
    return reference


def two_steps(strategy, model):
    """The model as the strategy gives it, after the same steps, with the rows shared out over two data ranks."""
    model, optimizer = strategy.initialize(model, MatricesAndRest(model))
    rank = strategy.groups.rank("data")

    def criterion(logits, target):
        return strategy.layers.cross_entropy(logits, target, classes=29)

    for step in range(2):
        rows = data(step).chunk(2)[rank]
        strategy.execute_pipeline(iter([(rows[:, :-1], rows[:, 1:])]), model, criterion, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.storm
@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.storm), pytest.param(2, marks=pytest.mark.storm), 3]
)
@pytest.mark.ranks(8, timeout=180)
def test_data_pipeline_and_tensor_ranks_of_a_strategy_step_matrices_as_one_device(stage):
    reference = stack_alone()
    parallel = {"data": 2, "pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}
    zero = {"stage": stage, "update": WHICH, "overlap": {"bucket": 40_000}}
    with Strategy(parallel=parallel, zero=zero, clip_norm=0.5, pipeline={"microbatches": 4}) as strategy:
        model = two_steps(strategy, stack(strategy.layers))
        assert_equal_to_one_device(model, reference, rtol=0, atol=1e-10, reason=REASON)


class Muon(torch.optim.Optimizer):
    """Muon in the dtype of the parameters."""

    def __init__(self, parameters, lr=0.02, momentum=0.9):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "matrices": True})

    step = MatricesAndRest.step


def muon_and_adamw(model):
    """Two optimizers of one model."""
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW([each for each in parameters if each.ndim != 2], lr=1e-2, eps=1e-3)
    return [Muon([each for each in parameters if each.ndim == 2]), adamw]


STRATEGIES = [
    (0, {"data": 2, "tensor": {"size": 2, "mode": "1d"}}),
    (2, {"data": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}),
    (1, {"data": 2, "pipeline": 2}),
    (0, {"tensor": {"size": 4, "mode": "2d"}}),
    (3, {"data": 4}),
]
"""ZeRO stage and topology."""


@pytest.mark.ranks(4, timeout=180)
def test_a_strategy_takes_muon_and_adamw_and_goes_on_with_both_under_any_topology(tmp_path):
    """The gradients of both are clipped by one norm, and a checkpoint has the state of both."""
    steps = len(STRATEGIES)
    reference, layers = stack(layer_set(None)), layer_set(None)
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    both = JointOptimizer(*muon_and_adamw(reference))
    shard(reference, both, stage=0, group=alone, update={"atomic": lambda group: "matrices" in group})
    for step in range(steps):
        both.zero_grad()
        rows = data(step)
        layers.cross_entropy(reference(rows[:, :-1]), rows[:, 1:], classes=29).backward()
        clip_grad_norm_(both, 0.3, alone)
        both.step()
    for step, (stage, parallel) in enumerate(STRATEGIES):
        update = {"atomic": lambda group: "matrices" in group}
        zero = {"stage": stage, "update": update, "overlap": {"bucket": 40_000}}
        pipeline = {"microbatches": 2} if "pipeline" in parallel else {}
        with Strategy(parallel=parallel, zero=zero, clip_norm=0.3, pipeline=pipeline) as strategy:
            model = stack(strategy.layers)
            model, optimizer = strategy.initialize(model, muon_and_adamw(model))
            if step:
                assert strategy.resume(tmp_path) == step
            rows = data(step).chunk(strategy.groups.size("data"))[strategy.groups.rank("data")]

            def criterion(logits, target, strategy=strategy):
                return strategy.layers.cross_entropy(logits, target, classes=29)

            strategy.execute_pipeline(iter([(rows[:, :-1], rows[:, 1:])]), model, criterion, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            strategy.checkpoint(tmp_path, step=step + 1)
            if step + 1 == steps:
                assert_equal_to_one_device(model, reference, atol=1e-10, reason=REASON)


CHAIN = [
    (1, {"data": 2, "tensor": {"size": 2, "mode": "1d"}}),
    (0, {"tensor": {"size": 4, "mode": "2d"}}),
    (3, {"data": 4}),
    (2, {"data": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}),
]
"""ZeRO stage and topology of a run that goes on as another one each time."""


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=180)
def test_a_checkpoint_of_matrices_goes_on_under_any_other_topology(tmp_path):
    """What rank has the state of which matrix is not in the files."""
    for number, (stage, parallel) in enumerate(CHAIN):
        with ProcessGroups(Topology.from_config(parallel, 4)) as groups:
            model = gpt(layer_set("auto", groups), 4)
            optimizer = MatricesAndRest(model)
            update = {**WHICH, "tensor_group": groups["tensor"]}
            shard(model, optimizer, stage=stage, group=groups["data"], overlap={"bucket": 40_000}, update=update)
            partial = PartialGradientReducer(optimizer, groups)
            if number:
                load(tmp_path / str(number), model=model, optimizer=optimizer)
            rank, ranks = groups.rank("data"), groups.size("data")
            optimizer.zero_grad()
            loss_of(model, data(number).chunk(ranks)[rank]).backward()
            partial.handle_gradient()
            optimizer.step()
            save(tmp_path / str(number + 1), model=model, optimizer=optimizer)
            slots = {key.rpartition(".")[2] for key in inspect(tmp_path / str(number + 1)).optimizer}
            assert slots == {"momentum_buffer"}  # and no copies of the weights, though matrices are put together
    reference = gpt(layer_set(None), 4)
    trained_alone(reference, lambda rows: loss_of(reference, rows), None, steps=len(CHAIN))
    assert_equal_to_one_device(model, reference, rtol=0, atol=1e-10, reason=REASON)


@pytest.mark.storm
@pytest.mark.parametrize("stage", [storm(0), storm(1), 2])
@pytest.mark.ranks(4, timeout=180)
def test_a_table_that_two_stages_share_is_stepped_alike_on_both_or_refused(stage):
    """Cut over tensor ranks it is refused, for each stage would deal out its matrices by itself."""
    reference = stack_alone(tied=True)
    zero = {"stage": stage, "update": WHICH, "overlap": {"bucket": 40_000}}
    options = {"zero": zero, "clip_norm": 0.5, "pipeline": {"microbatches": 4}}
    with Strategy(parallel={"data": 2, "pipeline": 2}, **options) as strategy:
        model = two_steps(strategy, stack(strategy.layers, tied=True))
        assert_equal_to_one_device(model, reference, atol=1e-10, reason=REASON)
    with Strategy(parallel={"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, **options) as strategy:
        model = stack(strategy.layers, tied=True)
        with pytest.raises(ValueError, match=r"has copies on the ranks .* such as those of another pipeline stage"):
            strategy.initialize(model, MatricesAndRest(model))


def matrix_run(groups, stage):
    """The groups, the model and the optimizer of a run, and the reducer of its partial gradients."""
    model = gpt(layer_set("auto", groups), 4)
    optimizer = MatricesAndRest(model)
    update = {**WHICH, "tensor_group": groups["tensor"]}
    shard(model, optimizer, stage=stage, group=groups["data"], overlap={"bucket": 40_000}, update=update)
    return groups, model, optimizer, PartialGradientReducer(optimizer, groups)


def matrix_steps(run, first):
    """Two steps with every data rank's part of the same rows."""
    groups, model, optimizer, partial = run
    for step in range(first, first + 2):
        optimizer.zero_grad()
        loss_of(model, data(step).chunk(groups.size("data"))[groups.rank("data")]).backward()
        partial.handle_gradient()
        optimizer.step()


@pytest.mark.storm
@pytest.mark.ranks(4, timeout=180)
def test_reshard_of_matrices_continues_under_other_topologies():
    with contextlib.ExitStack() as stack:
        runs = []
        for stage, parallel in [(3, {"data": 4}), *CHAIN]:
            groups = stack.enter_context(ProcessGroups(Topology.from_config(parallel, 4)))
            runs.append(matrix_run(groups, stage))
        (groups, first, its, _), *others = runs
        matrix_steps(runs[0], 0)
        for _, model, optimizer, _ in others:
            reshard(State(model=first, optimizer=its), State(model=model, optimizer=optimizer), verify=True)
        for run in runs:
            matrix_steps(run, 2)
        for _, model, optimizer, _ in others:
            # A tensor mode shards the parameters, so they move back before they are compared.
            _, back, optimizer_of_back, _ = matrix_run(groups, 3)
            reshard(State(model=model, optimizer=optimizer), State(model=back, optimizer=optimizer_of_back))
            with summon(first), summon(back):
                for (name, value), expected in zip(back.named_parameters(), first.parameters(), strict=True):
                    torch.testing.assert_close(value, expected, rtol=0, atol=1e-10, msg=f"{name}: {REASON}")
