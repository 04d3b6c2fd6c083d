import io
import sys

import pytest

from par_train._metrics import Metrics
from par_train._report import Bar, Lines, make_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def metrics(step, validation_loss=None):
    return Metrics(
        step=step,
        loss=2.5,
        validation_loss=validation_loss,
        learning_rate=0.1,
        tokens=10 * step,
        seconds=step,
        tokens_per_second=1234.0,
        gradient_norm=1.0,
    )


def test_a_file_gets_few_lines(capsys):
    progress = make_progress(100, 0)
    assert isinstance(progress, Lines)
    for step in range(1, 101):
        progress.show(metrics(step, 3.5 if step == 50 else None))
    progress.close()
    first, validation = capsys.readouterr().err.splitlines()
    assert first.startswith("step 1/100: loss 2.500, 1,234 tokens/s, ")
    assert validation.startswith("step 50/100: loss 2.500, validation 3.500, ")


def test_a_terminal_gets_a_bar(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress = make_progress(100, 10)
    assert isinstance(progress, Bar)
    progress.show(metrics(11, 3.5))
    progress.close()
    assert "11/100" in terminal.getvalue()
    for word in ("loss 2.500", "val 3.500", "1,234 tokens/s", "MiB"):
        assert word in terminal.getvalue(), terminal.getvalue()


@pytest.mark.parametrize("columns", ["0", "200"])
def test_a_bar_shows_on_a_terminal_of_unknown_size(monkeypatch, columns):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", columns)
    bar = Bar(100, 0)
    bar.show(metrics(1))
    bar.close()
    assert "/100" in terminal.getvalue()
