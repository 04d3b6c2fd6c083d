"""Lightning Fabric on a strategy: a loop of Fabric's, as it is with Fabric's own on one process."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from par_testing import once

from .alone import LAUNCHED, make_model, rows

fabric_of = pytest.importorskip("lightning.fabric")
pytest.importorskip("transformers")
ParStrategy = pytest.importorskip("par_train.adapters.fabric").ParStrategy
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")

TOLERANCE = 1e-5
NORMS = 1e-4  # AdamW divides by what is small in its first steps, and norms see it before losses do
CUT = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}


def loop(fabric, batch, folder=None, resume=None):
    """A loop that knows nothing of a strategy."""
    fabric.launch()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    data = fabric.setup_dataloaders(DataLoader(list(rows()), batch_size=batch))
    state = {"model": model, "optimizer": optimizer, "batches": 0}
    if resume is not None:
        fabric.load(resume, state)
    losses, norms = [], []
    for number, rows_ in enumerate(data):
        if number < state["batches"]:
            continue
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = model(**rows_).loss
            fabric.backward(loss / 2)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if number % 2 == 1:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            norms.append(norm.item())
        if number == 3 and folder is not None:
            fabric.save(folder, {**state, "batches": 4})
    return losses, norms


def run_alone(folder):
    with pytest.MonkeyPatch.context() as patch:
        for name in (*LAUNCHED, "GROUP_RANK", "TORCHELASTIC_RUN_ID"):
            patch.delenv(name, raising=False)
        return loop(fabric_of.Fabric(accelerator="cpu", devices=1), 4, folder)


@pytest.mark.ranks(2, timeout=120)
def test_a_loop_with_one_changed_line(tmp_path):
    losses, norms = once(run_alone, tmp_path / "alone.ckpt")
    for name, strategy, batch in (("tensor", {**CUT, "zero": 1}, 4), ("again", CUT, 4)):
        fabric = fabric_of.Fabric(accelerator="cpu", devices=2, strategy=ParStrategy(**strategy))
        resume = None if name == "tensor" else tmp_path / "tensor"
        found = loop(fabric, batch, None if resume else tmp_path / name, resume)
        skipped = len(losses) - len(found[0])
        assert skipped == (0 if resume is None else 4)
        assert found[0] == pytest.approx(losses[skipped:], rel=TOLERANCE)
        assert found[1] == pytest.approx(norms[skipped // 2 :], rel=NORMS)
        fabric.strategy.strategy.close()


@pytest.mark.ranks(2, timeout=120)
def test_stage_3_over_data_ranks(tmp_path):
    """Ranks weigh alike, as under DDP; so rows that have the same number of tokens have the losses of one process."""

    def even():
        return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for start in range(0, 32, 4):
        batch = torch.stack([row["input_ids"] for row in even()[start : start + 4]])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    fabric = fabric_of.Fabric(accelerator="cpu", devices=2, strategy=ParStrategy(zero=3))
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    found = []
    for batch in fabric.setup_dataloaders(DataLoader(even(), batch_size=2)):
        loss = model(**batch).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(fabric.all_reduce(loss.detach()).item())
    assert found == pytest.approx(expected, rel=TOLERANCE)
    assert len(fabric.all_gather(torch.ones(()))) == 2
    assert fabric.strategy.reduce_boolean_decision(dist.get_rank() == 0) is False
    fabric.strategy.strategy.close()


@pytest.mark.ranks(2)
def test_reductions_count_a_replica_once():
    """Fabric passes the group of all ranks where its user names none."""
    fabric = fabric_of.Fabric(accelerator="cpu", devices=2, strategy=ParStrategy(**CUT))
    fabric.launch()
    assert fabric.all_reduce(torch.tensor(10.0), reduce_op="sum") == 10
    assert fabric.all_reduce({"loss": torch.tensor(4.0)}) == {"loss": 4}
    assert fabric.all_gather(torch.tensor([1.0])).shape == (1, 1)
    tensor_ranks = dist.new_group([0, 1])  # a group of the user's own
    assert fabric.all_reduce(torch.tensor(10.0), group=tensor_ranks, reduce_op="sum") == 20
    assert len(fabric.all_gather(torch.tensor([1.0]), group=tensor_ranks)) == 2
    fabric.strategy.strategy.close()


@pytest.mark.ranks(2)
def test_precisions_and_what_is_refused(tmp_path):
    fabric = fabric_of.Fabric(accelerator="cpu", devices=2, precision="bf16-true", strategy=ParStrategy(zero=1))
    fabric.launch()
    model = make_model()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert fabric.strategy.strategy.options.precision == "bf16"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match=r"precision=dict\(clip_value=1.0\)"):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)
    with pytest.raises(ValueError, match=r"fabric.setup\(model, optimizer\) takes both"):
        fabric.setup_optimizers(torch.optim.SGD(make_model().parameters(), lr=0.1))
    fabric.strategy.strategy.close()
    for options, precision, words in (
        ({}, "64-true", "with a strategy it can be one of 32-true"),
        ({"precision": "fp8"}, "bf16-true", "both say how to compute; give one"),
        ({"zero": 3}, "bf16-mixed", "use precision='bf16'"),
    ):
        refused = fabric_of.Fabric(accelerator="cpu", devices=2, precision=precision, strategy=ParStrategy(**options))
        with pytest.raises(ValueError, match=words):
            refused.launch()
    staged = fabric_of.Fabric(accelerator="cpu", devices=2, strategy=ParStrategy(parallel={"pipeline": 2}))
    staged.launch()
    model = make_model()
    with pytest.raises(ValueError, match="whose stages no loop calls as a model"):
        staged.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    staged.strategy.strategy.close()
