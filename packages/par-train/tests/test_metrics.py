import json

from par_train._metrics import Metrics, MetricsFile, draw_loss, read_metrics, truncate_metrics


def metrics(step, validation_loss=None):
    return Metrics(
        step=step,
        loss=5.0 / step,
        validation_loss=validation_loss,
        learning_rate=0.1,
        tokens=10 * step,
        seconds=step,
        tokens_per_second=10,
        gradient_norm=None,
    )


def write(path, steps):
    file = MetricsFile(path)
    for step in steps:
        file.append(metrics(step))
    file.close()


def test_a_line_holds_what_was_measured():
    assert "validation_loss" not in json.loads(metrics(1).to_json())
    assert json.loads(metrics(2, 4.0).to_json())["validation_loss"] == 4.0


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


def test_the_curve_is_a_picture(tmp_path):
    lines = [json.loads(metrics(step, 4.0 if step % 2 else None).to_json()) for step in range(1, 5)]
    draw_loss(tmp_path / "loss.png", lines)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    draw_loss(tmp_path / "loss.png", [])  # stopped before the first step
