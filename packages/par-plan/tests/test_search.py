"""The search: what is allowed, and that leaving out what cannot win changes nothing."""

from dataclasses import replace
from functools import cache

import pytest

from par_groups import Topology
from par_pipeline import simulate
from par_plan import prediction, search
from par_plan.costs import pipeline
from par_plan.fit import cheapest, offload_to_fit
from par_plan.inputs import RECOMPUTES, Machine, OffloadTiers, TrainingJob
from par_plan.prediction import Predictor, predict
from par_plan.search import configurations, search_configurations, tensor_configs, variants
from par_plan.shape import ExpertLayers, Shape

SHAPE = Shape(layers=8, width=512, heads=8, context=256)
JOB = TrainingJob(batch=64, precision="bf16")


@cache
def all_of(shape, world, job):
    found = []
    for topology, frame in configurations(shape, world, job):
        for variant in variants(topology, frame):
            try:
                found.append(predict(shape, topology, variant))
            except ValueError:  # dualpipe_v wants more microbatches
                assert variant.schedule == "dualpipe_v" or topology.size("pipeline") > shape.layers // 2
    return found


def test_all_modes_and_stages_are_looked_at():
    found = all_of(SHAPE, 16, JOB)
    modes = {each.topology.modes.get("tensor", (None, {}))[0] for each in found}
    assert modes == {None, "1d", "2d", "2.5d", "3d"}
    assert {each.job.zero for each in found} == {0, 1, 2, 3}
    assert {each.topology.size("pipeline") for each in found} == {1, 2, 4, 8}
    assert any(each.topology.modes.get("tensor", (None, {}))[1].get("sequence_parallel") for each in found)


def test_float8_is_not_planned_where_it_cannot_multiply():
    assert {each.get("mode") for each in tensor_configs(SHAPE, 64, "fp8")} == {None, "1d"}


@pytest.mark.parametrize(("precision", "stages"), [("bf16", {0, 1, 2, 3}), ("bf16-amp", {0, 1, 2})])
def test_stage_3_is_not_planned_under_autocast(precision, stages):
    frames = configurations(SHAPE, 8, replace(JOB, precision=precision))
    assert {job.zero for topology, frame in frames for job in variants(topology, frame)} == stages


@pytest.mark.parametrize("memory", [1e12, 2e9, 0.8e9])
@pytest.mark.parametrize("world", [8, pytest.param(16, marks=pytest.mark.storm)])
def test_what_is_left_out_would_not_have_won(world, memory):
    machine = Machine(memory=memory, network=5e9)
    best = {}
    for topology, frame in configurations(SHAPE, world, JOB):
        for job in variants(topology, frame):
            try:
                made = predict(SHAPE, topology, job, machine)
            except ValueError:
                continue
            if made.fits(machine):
                key = topology.to_json()
                best[key] = min(best.get(key, made.seconds), made.seconds)
    found = search_configurations(SHAPE, world, JOB, machine, top=5)
    assert [each.seconds for each in found.best] == sorted(best.values())[:5]


def test_each_topology_is_seen_to_be_looked_at():
    seen = []
    found = search_configurations(SHAPE, 8, JOB, Machine(memory=80e9), top=1, watch=lambda: seen.append(1))
    topologies = {topology.to_json() for topology, _ in configurations(SHAPE, 8, JOB)}
    assert len(topologies) < len(seen) <= 2 * len(topologies) < 2 * found.frames


def test_no_topology_is_shown_twice():
    found = search_configurations(SHAPE, 16, JOB, Machine(memory=80e9), top=8).best
    assert len({each.topology.to_json() for each in found}) == 8
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)


def test_if_nothing_fits_the_smallest_is_given():
    found = search_configurations(SHAPE, 8, JOB, Machine(memory=1e7))
    assert not found.best
    least = min(
        predict(SHAPE, each.topology, replace(each.job, recompute=recompute)).memory.total
        for each in all_of(SHAPE, 8, JOB)
        for recompute in RECOMPUTES
    )
    assert found.nearest.memory.total == least
    assert found.short.tier == "device"
    assert found.short.missing == pytest.approx(least - 0.9e7)


def test_a_batch_that_no_world_divides():
    found = search_configurations(
        Shape(layers=3, width=96, heads=3, context=8), 7, TrainingJob(batch=5), Machine(memory=80e9)
    )
    assert (found.best, found.nearest, found.frames) == ((), None, 0)


@pytest.mark.parametrize("world", [102_400, *(pytest.param(each, marks=pytest.mark.storm) for each in (64, 1024))])
def test_the_largest_models_are_planned_in_seconds(monkeypatch, world):
    """1T parameters: most configurations are left out by a bound, and no long pipeline is simulated."""
    calls, simulated = [], [0]
    once = Predictor.predict
    monkeypatch.setattr(Predictor, "predict", lambda *given: calls.append(given) or once(*given))
    monkeypatch.setattr(pipeline, "simulate", lambda made: simulated.append(len(made.ranks)) or simulate(made))
    shape = Shape(layers=128, width=25600, heads=160, context=4096)
    found = search_configurations(shape, world, TrainingJob(batch=12_800, precision="bf16"), Machine(memory=80e9))
    assert bool(found.best) == (world >= 1024)
    # One for the bound of each, and a few more, most where a model fits by what it computes again alone; with all
    # schedules, stages and modes there are 30 and more.
    assert len(calls) <= 5 * found.frames
    assert max(simulated) <= pipeline.EXACT


def test_each_part_of_a_model_is_worked_out_once_for_all_variants_of_a_frame(monkeypatch):
    """What 60 predictions say is what each of them says alone."""
    shape = Shape(layers=16, width=64, heads=4, context=256, experts=ExpertLayers(number=8, dense_layers=1))
    topology = Topology.from_config({"pipeline": 4, "expert": 2, "tensor": {"size": 2, "mode": "1d"}}, 32)
    job, machine = TrainingJob(batch=64, microbatches=8, precision="bf16"), Machine()
    counted, within = [], prediction.seconds_within
    monkeypatch.setattr(prediction, "seconds_within", lambda *a, **k: counted.append(k["part"]) or within(*a, **k))
    frame = Predictor(shape, topology, job, machine)
    every = [replace(each, recompute=again) for each in variants(topology, job) for again in RECOMPUTES]
    made = [frame.predict(each) for each in every]
    assert (len(made), sum(len(each.ranks) for each in made)) == (60, 180)
    # Stages dealt out one a rank, in a loop and as a v make 3, 3 and 2 parts; shared state or not; recomputation.
    assert len(counted) == 8 * 2 * len(RECOMPUTES)
    assert made == [predict(shape, topology, each, machine) for each in every]


def test_a_topology_of_many_devices_is_predicted_without_them():
    topology = Topology.from_config({"pipeline": 64, "tensor": {"size": 8, "mode": "1d"}}, 102_400)
    shape = Shape(layers=128, width=25600, heads=160, context=4096)
    made = predict(shape, topology, TrainingJob(batch=12_800, zero=1, precision="bf16", microbatches=64))
    assert made.bubble == pytest.approx(63 / 127)


LONG = Shape(layers=8, width=512, heads=8, context=32_768)
FEW = TrainingJob(batch=2, precision="bf16")


def test_sequences_are_cut_as_far_as_ranks_have_tokens_enough():
    sizes = {topology.size("sequence") for topology, _ in configurations(LONG, 64, FEW)}
    assert sizes == {1, 2, 4, 8, 16}  # of 2,048 tokens at least
    assert {topology.size("sequence") for topology, _ in configurations(LONG, 64, FEW, 32)} == {32}
    assert {topology.size("sequence") for topology, _ in configurations(SHAPE, 16, JOB)} == {1}


def test_every_mode_of_a_sequence_is_looked_at_and_exchanges_of_heads_stay_in_a_node():
    topology = Topology.from_config({"sequence": {"size": 16, "mode": "gather"}}, 16)
    found = [each.modes["sequence"] for each in search.sequence_modes(LONG, topology, Machine(devices_per_node=4))]
    assert found == [
        *(("gather", {}), ("ring", {}), ("ulysses", {})),
        *(("2d", {"ulysses": 4, "outer": outer}) for outer in ("ring", "gather")),
    ]


def test_no_mode_that_is_left_out_would_have_won():
    job, machine = replace(FEW, microbatches=2), Machine(memory=3e9, devices_per_node=4)
    topology = Topology.from_config({"sequence": {"size": 8, "mode": "gather"}}, 8)
    kept = [each.topology for each in search.best_modes(Predictor(LONG, topology, job, machine), job)]
    for variant in variants(topology, job):
        made = [(way, predict(LONG, way, variant, machine)) for way in search.sequence_modes(LONG, topology, machine)]
        for memory in (each.memory.total for _, each in made):  # devices that this one just fits
            fitting = [(each.seconds, way) for way, each in made if each.memory.total <= memory]
            least = min(seconds for seconds, _ in fitting)
            assert any(way in kept for seconds, way in fitting if seconds == least)


def test_long_sequences_fit_where_they_are_cut_and_few_rows_keep_many_devices_busy():
    machine = Machine(memory=0.33e9)
    assert not search_configurations(LONG, 16, FEW, machine, sequence=1).best
    found = search_configurations(LONG, 16, FEW, machine).best[0]
    assert found.topology.size("sequence") > 1


TIERS = {"tiers": OffloadTiers(host_memory=64e9, disk=1e12), "devices_per_node": 1}


def test_what_a_device_has_no_room_for_is_computed_again_or_lies_elsewhere_whichever_is_quicker():
    """The less memory there is, the more is done for it; each tier is filled before the next."""
    shape, job = Shape(layers=16, width=2048, heads=16, context=1024), TrainingJob(batch=8, precision="bf16")
    done = []
    for memory in (40e9, 16e9, 13e9, 9e9):
        found = search_configurations(shape, 1, job, Machine(memory=memory, **TIERS)).best[0]
        assert found.memory.total <= 0.9 * memory * (1 + 1e-6)
        done.append((found.seconds, found.job.host))
        for recompute in RECOMPUTES:  # no way by hand that is as frugal is quicker
            by_hand = predict(shape, found.topology, replace(found.job, recompute=recompute), Machine(**TIERS))
            assert by_hand.seconds >= found.seconds or by_hand.memory.total > found.memory.total
    assert done == sorted(done)
    assert done[0][1] == 0 < done[-1][1]
    full = search_configurations(
        shape, 1, job, Machine(memory=9e9, devices_per_node=1, tiers=OffloadTiers(host_memory=4e9, disk=1e12))
    ).best[0]
    assert full.memory.host == pytest.approx(0.85 * 4e9)
    assert full.job.disk > 0
    assert full.binds(Machine(memory=9e9, tiers=OffloadTiers(host_memory=4e9, disk=1e12))) == "host"


def test_a_model_that_fits_nowhere_names_the_tier_that_is_short():
    shape, job = Shape(layers=16, width=2048, heads=16, context=1024), TrainingJob(batch=8, precision="bf16")
    for tiers, short in (({}, "device"), ({"host_memory": 1e9}, "host"), ({"host_memory": 6e9, "disk": 1e9}, "disk")):
        found = search_configurations(
            shape, 1, job, Machine(memory=9e9, devices_per_node=1, tiers=OffloadTiers(**tiers))
        )
        assert not found.best
        assert found.short.tier == short, found.short
        assert found.short.missing > 0
    assert search_configurations(shape, 1, job, Machine(memory=2e9, **TIERS)).best[0].job.parameters_host == 1
    short = search_configurations(shape, 1, job, Machine(memory=1e9, **TIERS)).short
    assert short.tier == "device"
    assert "with all of the optimizer's state and the parameters elsewhere" in str(short)


def test_thirteen_billion_parameters_on_one_device_take_a_part_of_their_state_to_the_host():
    """208e9 bytes of state; the device has 149e9, of which a tenth stays free, the host 170e9, of which 0.15 do."""
    shape, job = Shape(layers=41, width=5120, heads=40, context=2048), TrainingJob(batch=8, precision="bf16")
    assert shape.parameters == pytest.approx(13e9, rel=0.01)
    both = Machine(memory=149e9, tiers=OffloadTiers(host_memory=170e9), devices_per_node=1)
    assert not search_configurations(shape, 1, job, Machine(memory=149e9, devices_per_node=1)).best
    best = search_configurations(shape, 1, job, both).best[0]
    gathered = replace(job, zero=3)  # where parameters are on the host, and layers are recomputed
    found, problem = cheapest(Predictor(shape, best.topology, gathered, both), gathered)
    assert problem is None
    assert 0.4 < found.job.host < 0.64
    assert (found.job.parameters_host, found.job.disk, found.binds(both)) == (1, 0, "device")
    whole = replace(job, microbatches=8)  # at stage 0, where parameters stay
    kept, problem = cheapest(Predictor(shape, found.topology, whole, both), whole)
    assert problem is None
    assert 0.47 < kept.job.host < 0.64
    assert (kept.job.recompute, kept.job.disk, kept.binds(both)) == ("", 0, "device")
    assert best.seconds == min(kept.seconds, found.seconds)
    for host in (0.0, 1.0):  # all of the optimizer's state on the device, or all of it on the host
        assert not predict(shape, kept.topology, replace(kept.job, host=host), both).fits(both)


def test_parameters_leave_before_the_state_or_after_it_whichever_is_quicker():
    """A quick link fetches parameters while others compute; where it is slow state goes first, which a host steps."""
    shape, job = Shape(layers=16, width=2048, heads=16, context=1024), TrainingJob(batch=8, precision="bf16", zero=3)
    topology = Topology.from_config({}, 1)
    for link, host_step, first in ((50e9, 1e11, "parameters"), (5e9, 1e12, "optimizer")):
        tiers = OffloadTiers(link=link, host_step=host_step, host_memory=64e9)
        machine = Machine(memory=13e9, tiers=tiers, devices_per_node=1)
        found, problem = cheapest(Predictor(shape, topology, job, machine), job)
        assert problem is None
        parts = {"optimizer": found.job.optimizer_offloaded, "parameters": found.job.parameters_offloaded}
        assert max(parts, key=lambda name: parts[name]) == first, (link, parts)
        assert found.memory.total == pytest.approx(0.9 * 13e9, rel=1e-6)
        for order in parts:
            by_hand = predict(
                shape, topology, offload_to_fit(predict(shape, topology, job, machine), machine, order), machine
            )
            assert by_hand.seconds >= found.seconds


def test_parts_of_parameters_are_those_of_stage_3():
    with pytest.raises(ValueError, match="need ZeRO stage 3, but zero=1"):
        TrainingJob(batch=1, zero=1, parameters_host=0.5)
    with pytest.raises(ValueError, match=r"parameters_host=0.7 and parameters_disk=0.7: fractions must be 0 to 1"):
        TrainingJob(batch=1, zero=3, parameters_host=0.7, parameters_disk=0.7)


def test_a_trillion_parameters_on_256_devices_take_both():
    """Norms and activations again cost less than layers, and a part of the state less than either."""
    shape = Shape(layers=128, width=25600, heads=160, context=2048)
    assert shape.parameters == pytest.approx(1e12, rel=0.01)
    machine = Machine(memory=80e9, tiers=OffloadTiers(host_memory=1e12, disk=16e12))
    found = search_configurations(shape, 256, TrainingJob(batch=2048, precision="bf16"), machine, top=1).best[0]
    assert (found.job.recompute, found.job.disk, found.binds(machine)) == ("cheap", 0, "device")
    assert 0 < found.job.host < 1
