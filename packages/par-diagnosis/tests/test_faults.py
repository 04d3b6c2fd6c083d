"""Faults on one rank of three: the line names the rank, the place and the cause.

The line comes before the timeout of the collectives, which is longer than the limit of the test.
"""

import os
from pathlib import Path

import pytest

from par_diagnosis.__main__ import main

from . import planted

SCRIPT = Path(planted.__file__)
WORLD = 3


def site(mark):
    """The place in the script that has this mark."""
    lines = SCRIPT.read_text().splitlines()
    return f"planted.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


EXPECTED = {
    "missing": [
        "rank 2 never called all_reduce",
        "which ranks [0, 1] called at",
        site("reduces"),
        "; rank 2 called all_reduce at",
        site("sums"),
    ],
    "order": ["rank 2 is in all_gather", site("gathers"), "but ranks [0, 1] called all_reduce", site("sums"), "[0..2]"],
    "shape": [
        "rank 2 was killed by a signal (Aborted)",
        site("short"),
        "gloo aborts a rank",
        "ranks [0, 1] wait in all_gather",
    ],
    "dead": ["rank 2 is gone", "has ended", "ranks [0, 1] wait in all_reduce", site("reduces")],
    "stopped": ["rank 2 is stopped", "ranks [0, 1] wait in all_reduce", site("reduces")],
    "sleeping": ["rank 2 is", site("sleeps"), "time.sleep(60)", "has not called all_reduce", site("reduces")],
    "slow_data": ["rank 2 is waiting for its data for", site("reads"), "read_slowly()", "ranks [0, 1] wait"],
    "blocked": ["rank 2 is", site("blocks"), "lock.acquire()", "has not called all_reduce", site("reduces")],
    "spins": ["rank 2 is", "in spins()", "has not called all_reduce", site("reduces")],
    "nan": [
        "rank 2 never called all_reduce",
        site("sums"),
        "; rank 2 called all_reduce at",
        site("reduces"),
        "only on rank 2 loss is nan",
    ],
    "full_disk": [
        "rank 2 failed (step 4)",
        site("writes"),
        "OSError: [Errno 28] No space left on device",
        "'/data/step-3'",
    ],
    "config": ["rank 2 ", "rank 2 has microbatches 3, ranks [0, 1] have 2"],
    "ended": ["rank 2 has ended its run (step 4)", "ranks [0, 1] wait in all_reduce", site("reduces")],
}
USUAL = ("missing", "sleeping", "full_disk")


def test_every_fault_has_expected_words():
    assert set(EXPECTED) == {fault.__name__ for fault in planted.FAULTS}


def said(warm_python, folder, fault, port):
    """Return the lines that all ranks have reported."""
    ranks = []
    for rank in range(WORLD):
        place = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}
        environment = {
            **os.environ,
            **place,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        ranks.append(
            warm_python.start([str(SCRIPT), fault, str(folder)], folder=folder, environment=environment, ranks=0)
        )
    texts = []
    for process in ranks[:-1]:
        out, err = process.communicate(timeout=240)
        assert "Traceback" not in err, err
        texts += out.splitlines()
    ranks[-1].kill()
    return texts + ranks[-1].communicate(timeout=240)[0].splitlines()


@pytest.mark.parametrize(
    "fault", [each if each in USUAL else pytest.param(each, marks=pytest.mark.storm) for each in EXPECTED]
)
def test_line_names_rank_place_and_cause(warm_python, tmp_path, fault, free_port, capsys):
    rounds, lines = zip(*(line.split(" ", 1) for line in said(warm_python, tmp_path, fault, free_port)), strict=True)
    assert len(set(rounds)) == len(rounds), lines  # on a busy machine ranks end so late that they report again
    for line in lines:
        assert all(words in line for words in EXPECTED[fault]), line
    assert main([str(tmp_path)]) == 0  # the same from the dumps
    first = capsys.readouterr().out.splitlines()[0]
    if fault not in ("dead", "stopped", "ended"):  # nothing on the disk shows these
        assert all(words in first for words in EXPECTED[fault]), first
    else:
        assert "rank 2 left no dump; ranks [0, 1] wait in all_reduce" in first
