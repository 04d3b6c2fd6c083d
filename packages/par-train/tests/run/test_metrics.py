import math
import resource
from types import SimpleNamespace

import pytest
import torch
from matplotlib.image import imread

from par_train.run.files import RunFiles
from par_train.run.log import Records
from par_train.run.metrics import MetricsFile, draw_load, draw_loss, load_of, read_metrics, truncate_metrics
from par_train.run.progress import Lines


def metrics(step, validation_loss=None):
    return {
        "step": step,
        "loss": 5.0 / step,
        "validation_loss": validation_loss,
        "learning_rate": 0.1,
        "tokens": 10 * step,
        "seconds": step,
        "tokens_per_second": 10,
        "gradient_norm": None,
    }


def write(path, steps):
    file = MetricsFile(path)
    for step in steps:
        file.append(metrics(step))
    file.close()


def test_a_line_has_what_was_measured(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for line in (metrics(1), metrics(2, 4.0), {"step": 3, "loss": math.nan}):
        file.append(line)
    file.close()
    first, second, third = read_metrics(tmp_path / "metrics.jsonl")
    assert "validation_loss" not in first
    assert second["validation_loss"] == 4.0
    assert third == {"step": 3, "loss": None}  # JSON has no such number


def test_going_on_forgets_what_came_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    truncate_metrics(path, 3)
    write(path, [4])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]


def test_a_line_cut_off_by_a_crash_is_forgotten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    truncate_metrics(path, 9)
    write(path, [3])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "loss": 1\xff}\n', b"\0" * 9, b"[1]\n", b"3\n", b'{"loss": 1}\n', b'{"step": null}\n']
)
def test_what_a_crash_spoils_ends_the_file(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with path.open("ab") as file:
        file.write(torn)
    write(path, [4])
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    truncate_metrics(path, 9)
    write(path, [3])
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]


def test_a_full_disk_is_said_with_the_name_of_the_file(tmp_path):
    path, before = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    file = MetricsFile(path)
    file.append(metrics(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, before[1]))  # a file grows no further
    try:
        with pytest.raises(OSError, match=r"cannot write '.+/metrics\.jsonl': .+File too large"):
            file.append(metrics(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [line["step"] for line in read_metrics(path)] == [1]
    file.close()


def test_the_curve_is_a_picture(tmp_path):
    lines = [metrics(step, 4.0 if step % 2 else None) for step in range(1, 5)]
    draw_loss(tmp_path / "loss.png", lines)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    draw_loss(tmp_path / "loss.png", [])  # stopped before the first step


def test_samples_are_kept_beside_the_numbers_and_told_to_who_takes_texts(tmp_path):
    told, shown, ended = [], [], []
    tracker = SimpleNamespace(log=lambda values, step: told.append((values, step)))
    reader = SimpleNamespace(
        log=lambda *_: None, log_texts=lambda texts, step: shown.append((texts, step)), close=lambda: ended.append(1)
    )
    records = Records(RunFiles(tmp_path), Lines(9), [tracker, reader])
    samples = [{"prompt": "import ", "text": "os \u00e9"}]
    records.write({"step": 3, "loss": 2.5, "seconds": 1.0, "samples": samples})
    records.write({"step": 4, "seconds": 2.0, "samples": 32})  # a number that a loop of one's own counts
    records.close()
    lines = [{"step": 3, "loss": 2.5, "seconds": 1.0, "samples": samples}, {"step": 4, "seconds": 2.0, "samples": 32}]
    assert read_metrics(tmp_path / "metrics.jsonl") == lines
    assert told == [({"loss": 2.5, "seconds": 1.0}, 3), ({"seconds": 2.0, "samples": 32}, 4)]
    records.close()
    assert (shown, ended) == ([(samples, 3)], [1])


def test_the_load_of_experts_is_by_the_mean():
    counts = {"blocks.0.mlp.gate": torch.tensor([3, 1, 0, 4]), "blocks.1.mlp.gate": torch.zeros(2, dtype=torch.int64)}
    assert load_of(counts) == {"blocks.0.mlp.gate": [1.5, 0.5, 0.0, 2.0], "blocks.1.mlp.gate": [0.0, 0.0]}


def test_the_load_of_experts_is_kept_in_the_file_and_left_out_of_what_trackers_take(tmp_path):
    told = []
    records = Records(RunFiles(tmp_path), None, [SimpleNamespace(log=lambda values, step: told.append((values, step)))])
    line = {"step": 2, "loss": 2.5, "expert_load": {"gate": [0.5, 1.5]}}
    records.write(line)
    records.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [line]
    assert told == [({"loss": 2.5}, 2)]


def test_the_load_of_experts_is_a_picture_of_some_layers(tmp_path):
    path = tmp_path / "expert-load.png"
    draw_load(path, [metrics(1)])  # a model without experts
    assert not path.exists()
    heights = {}
    for layers in (1, 2, 40):
        lines = [
            {"step": step, "expert_load": {f"blocks.{layer}": [0.0, 1.0, 2.0 * step] for layer in range(layers)}}
            for step in (5, 10, 15)
        ]
        draw_load(path, [metrics(4), *lines, metrics(20)])
        picture = imread(path)
        heights[layers] = picture.shape[0]
        warmth = picture[..., 0] - picture[..., 2]
        assert min((warmth > 0.2).mean(), (warmth < -0.2).mean()) > 0.05  # a busy and an idle expert
    assert heights[1] < heights[2] < heights[40] < 1400
