"""Model FLOPs, MFU, and where the time of a run went: against what torch counts, and against the wall's clock."""

import json
import sys
import time
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from par_diagnosis import CollectiveWaits, PhaseClock
from par_plan import PretrainedShape, Shape, model_flops
from par_testing import observe_results, wait_until
from par_train import LoggingPolicy, MonitoringPolicy, Run, Strategy
from par_train.jobs.byte_gpt import fill_, make_gpt
from par_train.jobs.options import ModelOptions

AGREEMENT = 0.02  # what the design asks of MFU and goodput


@pytest.mark.ranks(1)
@pytest.mark.parametrize("tied", [False, True])
def test_the_formula_counts_what_torch_counts_with_causal_attention_by_half(tied):
    options = ModelOptions(width=32, layers=3, heads=4, context=64, tied=tied)
    strategy = Strategy()

    model = fill_(make_gpt(options, strategy.layers), 0)
    inputs = torch.randint(0, 256, (2, 64))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        strategy.layers.cross_entropy(model(inputs), inputs, classes=256).backward()
    whole_attention = 3 * options.layers * 2 * options.context * options.width  # what the causal half leaves out
    expected = (model_flops(options.shape) + whole_attention) * inputs.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=AGREEMENT)
    assert model_flops(options.shape) == sum(
        options.shape.flops(part=SimpleNamespace(blocks=3, mixtures=0, first=True, last=True))
    )


def test_experts_count_as_far_as_a_token_goes_to_them():
    transformers = pytest.importorskip("transformers")

    def flops(**changes):
        config = transformers.MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=32, **changes,
        )  # fmt: skip
        with torch.device("meta"):
            return model_flops(PretrainedShape(transformers.MixtralForCausalLM(config), context=32))

    one, two = (flops(num_local_experts=8, num_experts_per_tok=number) for number in (1, 2))
    of_an_expert = 3 * 2 * 2 * (3 * 16 * 32)  # forward and backward, two layers, two a multiplication, three matrices
    assert two - one == of_an_expert
    assert flops(num_local_experts=16, num_experts_per_tok=2) - two == 3 * 2 * 2 * 16 * 8  # the router alone


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks(2, backend="gloo")
def test_run_lines_have_mfu_and_the_times_of_the_clock(tmp_path, monkeypatch):
    """Each part of a step is slept through: it lasts as long or, on a busy machine, longer.

    Rank 1 works on until rank 0 has been seen to wait for it in four more looks, of which there are 20 a second.
    """
    strategy = Strategy()
    linear = torch.nn.Linear(4, 4)
    model, optimizer = strategy.initialize(linear, torch.optim.SGD(linear.parameters(), lr=0.1))[:2]
    in_data, in_step, looks, pause = 0.1, 0.1, 4, 0.05
    steps, flops, peak = 8, 1000.0, 2e8
    steps_now, in_this_step, phases, take = [], [], [], PhaseClock.take

    def note(label):
        step = steps_now[-1] if steps_now else None
        if step is not None and label is not None:
            in_this_step.append(label)
            if len(in_this_step) > looks:
                (tmp_path / str(step)).touch()

    def noted(clock):
        phases.append(take(clock))
        return phases[-1]

    if dist.get_rank() == 0:
        observe_results(monkeypatch, CollectiveWaits, "_waits_in", note)
        monkeypatch.setattr(PhaseClock, "take", noted)

    def batches():
        while True:
            time.sleep(in_data)
            yield torch.ones(5, 4)

    told = StringIO()
    began = time.monotonic()
    with (
        redirect_stderr(told),
        Run(
            tmp_path / "run",
            strategy,
            logging=LoggingPolicy(every=4, progress=False),
            monitoring=MonitoringPolicy(goodput=True, flops=flops, peak_flops=peak),
        ) as run,
    ):
        made = time.monotonic()
        for batch in run.steps(batches(), steps):
            time.sleep(in_step)
            in_this_step.clear()
            steps_now.append(run.step)
            if dist.get_rank() == 1:
                wait_until((tmp_path / str(run.step)).exists)
            strategy.backward(model(batch).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            steps_now.append(None)
            run.log(tokens=5000)  # of which rounded numbers a second are near enough
        least = time.monotonic() - made
        total = sum(run.monitor.clock.seconds().values())
        assert least <= total <= time.monotonic() - began
    dist.barrier()
    if dist.get_rank() == 0:
        first, last = lines_of(tmp_path / "run")
        for line in (first, last):
            shares = [value for name, value in line.items() if name.startswith("time_")]
            assert sum(shares) == pytest.approx(1.0, abs=AGREEMENT)
            rate = line["tokens_per_second"]
            assert line["flops_per_second"] == pytest.approx(flops * rate, rel=AGREEMENT)
            assert line["mfu"] == pytest.approx(flops * rate / (2 * peak), rel=AGREEMENT)
        total = sum(phases[1].values())
        assert {name: last[f"time_{name}"] for name, spent in phases[1].items() if spent} == {
            name: round(spent / total, 4) for name, spent in phases[1].items() if spent
        }
        assert phases[1]["data"] >= 4 * in_data
        assert phases[1]["step"] >= 4 * (in_step + looks * pause)
        assert last["exposed_data"] * total > 0.99 * 4 * looks * pause
        assert "waiting for data" in told.getvalue()
        assert "MFU" in told.getvalue()


def test_the_sample_job_tells_mfu_and_its_time(command):
    done = command.finish(command.train("goodput", "--goodput", "--peak_flops=1e9"))
    assert done.returncode == 0, done.stderr
    lines = lines_of(command.folder / "goodput")
    flops = model_flops(Shape(layers=1, width=16, heads=2, context=16))
    for line in lines:
        assert line["mfu"] == pytest.approx(flops * line["tokens_per_second"] / 3e9, rel=AGREEMENT)
        shares = [value for name, value in line.items() if name.startswith("time_")]
        assert sum(shares) == pytest.approx(1.0, abs=AGREEMENT)
    assert len(lines) == 12
    assert any(text.startswith("time       00:0") and "model FLOPs/s, MFU" in text for text in done.stdout.splitlines())


def test_collective_waits_use_the_axis_that_a_package_declares():
    from par_pipeline.wire.lanes import FIRST, Lane
    from par_zero._collectives import Handle

    waits, labels = CollectiveWaits(SimpleNamespace(named=dict)), []

    class Work:
        def wait(self, *_):
            labels.append(waits._waits_in(sys._getframe()))

    Work().wait()
    Handle([Work()]).wait()
    Lane(1, None, None, timedelta(seconds=1)).wait(Work(), FIRST)
    assert labels == [None, "data", "pipeline"]


def test_a_gpt_of_the_planner_has_the_flops_of_its_sizes():
    shape = Shape(layers=2, width=8, heads=2, context=16, vocabulary=32)
    matrices = 2 * (8 * (24 + 8 + 64)) + 8 * 32
    assert model_flops(shape) == 6 * matrices + 3 * 2 * 2 * 16 * 8
