"""Accelerate on a strategy: a loop that has an Accelerator, as it is with Accelerate's own on one process."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from par_testing import once

from .alone import alone, make_model, rows

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("transformers")
ParAccelerator = pytest.importorskip("par_train.adapters.accelerate").ParAccelerator
pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")

TOLERANCE = 1e-5
NORMS = 1e-4  # AdamW divides by what is small in its first steps, and norms see it before losses do
CUT = {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}
CASES = {"stage 3": {"zero": 3}, "tensor": {**CUT, "zero": 1}}


def whole_rows(count=32):
    """Rows of which all tokens count: here every batch weighs the same."""
    return [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows(count)]


def options_of():
    return {
        "gradient_accumulation_steps": 2,
        "cpu": True,
        "dataloader_config": accelerate.DataLoaderConfiguration(split_batches=True),
    }


def script(accelerator, batch, folder=None, resume=None):
    """A script as Accelerate's examples are, which knows nothing of a strategy."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = DataLoader(whole_rows(), batch_size=batch)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    first = 0
    if resume is not None:
        accelerator.load_state(resume)
        first = 4
        data = accelerator.skip_first_batches(data, first)
    losses, norms = [], []
    for number, rows_ in enumerate(data, first):
        with accelerator.accumulate(model):
            loss = model(**rows_).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if number == 3 and folder is not None and resume is None:
            accelerator.save_state(folder)
    model.eval()
    seen = []
    with torch.no_grad():
        for rows_ in accelerator.prepare(DataLoader(whole_rows(6), batch_size=batch)):
            logits = model(input_ids=rows_["input_ids"]).logits
            chosen, labels = accelerator.gather_for_metrics((logits.argmax(-1), rows_["labels"]))
            assert len(chosen) == len(labels)
            seen.append(chosen)
    rates = scheduler.get_last_lr()
    return losses, [norm.item() for norm in norms], rates, torch.cat(seen).tolist()


def run_alone():
    with alone():
        return script(accelerate.Accelerator(**options_of()), 4)


@pytest.mark.ranks(2, timeout=120)
def test_a_script_with_one_changed_line(tmp_path):
    """Losses, norms, rates, gathered predictions of an uneven data set; saved and gone on with over other axes."""
    losses, norms, rates, seen = once(run_alone)
    before = None
    for name, strategy in CASES.items():
        accelerator = ParAccelerator(strategy=strategy, **options_of())
        found = script(accelerator, 4, tmp_path / name)
        assert found[0] == pytest.approx(losses, rel=TOLERANCE)
        assert found[1] == pytest.approx(norms, rel=NORMS)
        assert found[2] == pytest.approx(rates)
        assert found[3] == seen
        accelerator.strategy.close()
        if before is not None:
            accelerator = ParAccelerator(strategy=strategy, **options_of())
            again = script(accelerator, 4, resume=str(before))
            assert again[0] == pytest.approx(found[0][4:], rel=TOLERANCE)
            assert again[1:] == (pytest.approx(norms[2:], rel=NORMS), pytest.approx(rates), seen)
            accelerator.strategy.close()
        before = tmp_path / name


@pytest.mark.ranks(2)
def test_means_over_all_tokens():
    """With weights, passes of one step have the gradients of one mean over all their tokens."""
    data = list(rows(8))
    batch = {key: torch.stack([row[key] for row in data]) for key in data[0]}
    model = make_model()
    model(**batch).loss.backward()
    whole = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    accelerator = ParAccelerator(strategy={"zero": 2}, gradient_accumulation_steps=2, cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for part in range(2):
        mine = torch.arange(8).chunk(4)[2 * part + dist.get_rank()]  # another number of tokens in each
        own = {key: value[mine] for key, value in batch.items()}
        with accelerator.accumulate(model):
            tokens = (own["labels"][:, 1:] != -100).sum()
            accelerator.backward(model(**own).loss, weight=tokens)
            norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
            optimizer.step()
    assert norm.item() == pytest.approx(whole.item(), rel=TOLERANCE)
    accelerator.strategy.close()


@pytest.mark.ranks(2)
def test_no_dataloader_config_is_the_default():
    accelerator = ParAccelerator(cpu=True, dataloader_config=None)  # as Accelerator's own signature has it
    assert accelerator.num_processes == 2
    accelerator.strategy.close()


@pytest.mark.ranks(2)
def test_what_is_refused_and_what_does_it(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="was given fsdp_plugin; leave it out and give strategy=dict"):
        ParAccelerator(fsdp_plugin=object(), cpu=True)
    with pytest.raises(ValueError, match="find_unused_parameters needs nothing"):
        ParAccelerator(
            kwargs_handlers=[accelerate.DistributedDataParallelKwargs(find_unused_parameters=True)], cpu=True
        )
    with pytest.raises(TypeError, match="unexpected keyword argument 'sped'"):
        ParAccelerator(sped=1, cpu=True)
    with monkeypatch.context() as patch:
        patch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        with pytest.raises(ValueError, match="the environment has ACCELERATE_USE_DEEPSPEED; launch without"):
            ParAccelerator(cpu=True)
    accelerator = ParAccelerator(cpu=True, strategy=CUT)
    assert (accelerator.num_processes, accelerator.process_index) == (1, 0)
    assert accelerator.is_main_process == (dist.get_rank() == 0)
    assert accelerator.reduce(torch.ones(())) == 1  # each sample once, though two ranks have it
    for rank in range(2):
        if dist.get_rank() == rank:
            accelerator.set_trigger()
        assert accelerator.check_trigger()  # also on the rank of the replica that has not set it
        assert not accelerator.check_trigger()
    model, other = make_model(), make_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="is a parameter of no model that"):
        accelerator.prepare(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="are not all that a prepared optimizer trains"):
        accelerator.clip_grad_norm_([next(model.parameters())], 1.0)
    with pytest.raises(ValueError, match="norm_type=1"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1)
    with pytest.raises(ValueError, match=r"strategy=dict\(precision=dict\(clip_value=0.1\)\)"):
        accelerator.clip_grad_value_(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=r"give save_model\(\) a folder"):
        accelerator.get_state_dict(model)
    with pytest.raises(ValueError, match=r"\['retain_graph'\]; it takes a loss"):
        accelerator.backward(torch.ones(()), retain_graph=True)
    accelerator.save_model(accelerator.unwrap_model(model), tmp_path / "saved")
    accelerator.strategy.close()
    pipeline = ParAccelerator(cpu=True, strategy={"parallel": {"pipeline": 2}})
    with pytest.raises(ValueError, match="whose stages no loop calls as a model"):
        pipeline.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
    pipeline.strategy.close()


@pytest.mark.parametrize("zero", [2, pytest.param(1, marks=pytest.mark.storm)])
@pytest.mark.ranks(2, timeout=120)
def test_what_accelerate_ships_to_test_itself(monkeypatch, zero):
    """Accelerate's own script, in which one name is another: training equals a baseline, in fp32 and under autocast."""
    script = pytest.importorskip("accelerate.test_utils.scripts.test_script")
    made = []

    def accelerator_of(*arguments, **keywords):
        assert not arguments
        made.append(ParAccelerator(strategy={"zero": zero}, cpu=True, **keywords))
        return made[-1]

    monkeypatch.setattr(script, "Accelerator", accelerator_of)
    script.Accelerator()  # they expect one
    for check in (script.process_execution_check, script.check_seedable_sampler, script.test_trigger):
        check()
    script.training_check(use_seedable_sampler=False)  # the other seeds a sampler by torch's seed after training
    assert len(made) > 6  # of which four train
