"""par-train on a GPU: the main job, whole, and a strategy whose batches come from the CPU."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from par_checkpoint import verify
from par_testing import accelerator_type
from par_train import Strategy, load_model

DEVICE = accelerator_type()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator here")]
COMMAND = [sys.executable, "-m"] if DEVICE != "strict" else [sys.executable, "-m", "par_testing.accelerator"]

ON_CPU = ["--device", "cpu"]
SMALL = ["--model.width=64", "--model.layers=2", "--model.context=64", "--train.batch_size=8", "--train.warmup_steps=2"]
SMALL += ["--train.steps=12", "--train.validate_every=6", "--data.validation_windows=16", "--ranks=1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = [f"line {number} of {number * number % 97} says {number * 31 % 89}\n" for number in range(4000)]
    (folder / "a.txt").write_text("".join(lines))
    return folder


def newest(folder):
    """The newest checkpoint of a run."""
    return max((folder / "checkpoints").iterdir())


def train(text, folder, *options):
    """Runs the command; the lines of its metrics."""
    command = [*COMMAND, "par_train", "run", "--output", folder, "--data.folder", text, *SMALL, *options]
    done = subprocess.run(list(map(str, command)), check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert verify(newest(folder)) == []
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(lines):
    return torch.tensor([line["loss"] for line in lines], dtype=torch.float64)


@pytest.fixture(scope="module")
def expected(text, tmp_path_factory):
    """The losses of the same run on the CPU."""
    return losses(train(text, tmp_path_factory.mktemp("cpu") / "run", *ON_CPU))


@pytest.mark.parametrize("zero", [0, 3])
def test_the_main_job_is_that_of_the_cpu(text, tmp_path, expected, zero):
    """Products are summed up in another order, and twelve steps add to that; measured on one GPU: 1e-6."""
    found = train(text, tmp_path / "run", "--zero", zero)
    torch.testing.assert_close(losses(found), expected, rtol=1e-4, atol=0)
    assert found[-1]["tokens"] == 12 * 8 * 64
    model = load_model(newest(tmp_path / "run"))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("precision", ["tf32", "bf16", "bf16-amp", "fp16", "fp16-amp", "bf16-sr", "fp8"])
def test_every_precision_trains_near_fp32(text, tmp_path, expected, precision):
    """Losses are means over 512 bytes; 5 % is far above what rounding changes, and far below what is learned.

    Of fp16 only that it learns: the first steps are skipped, until the loss scale fits.
    """
    if precision in ("tf32", "fp8") and DEVICE != "cuda":
        pytest.skip("TF32 and float8 products are of NVIDIA GPUs")
    if precision == "fp8" and torch.get_device_module(DEVICE).get_device_capability() < (8, 9):
        pytest.skip("this GPU has no float8 products")
    found = losses(train(text, tmp_path / "run", "--zero", 1, "--precision", precision))
    assert found[-1] < 0.8 * found[0]
    if not precision.startswith("fp16"):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0)


def test_a_run_of_a_gpu_goes_on_there_and_on_the_cpu(text, tmp_path):
    train(text, tmp_path / "gpu")
    shutil.copytree(tmp_path / "gpu", tmp_path / "cpu")
    on_gpu, on_cpu = (
        losses(train(text, tmp_path / name, "--train.steps=16", "--resume=auto", *options))
        for name, options in (("gpu", []), ("cpu", ON_CPU))
    )
    assert torch.equal(on_gpu[:12], on_cpu[:12])
    torch.testing.assert_close(on_gpu[12:], on_cpu[12:], rtol=1e-4, atol=0)


def linear(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(15, 123), nn.GELU(), nn.Linear(123, 7))


def batches():
    x = torch.randn(24, 15, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :7].square()), batch_size=8, pin_memory=True)


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_strategy_brings_batches_to_its_gpu(pipelined):
    """The loop of the README; the same loop in plain torch, on the CPU."""
    mse = nn.functional.mse_loss
    plain, module = linear(0), linear(0)
    its = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with Strategy(clip_norm=1e9) as strategy:
        model, optimizer, loader = strategy.initialize(
            module, torch.optim.AdamW(module.parameters(), lr=1e-2), batches()
        )
        assert strategy.device.type == DEVICE
        for inputs, targets in batches():
            if pipelined:
                found = strategy.execute_pipeline(loader, model, mse, optimizer)
            else:
                mine, wanted = next(iter(loader))
                found = mse(model(mine), wanted)
                strategy.backward(found, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            loss = mse(plain(inputs), targets)
            loss.backward()
            its.step()
            its.zero_grad()
            assert found.item() == pytest.approx(loss.item(), rel=1e-5)
