"""The checks and figures that say most about a GPU, for a machine that is available for some minutes.

    python tools/gpu_session.py --out /tmp/gpu --minutes 12

Run it from the root of a checkout, with the packages and tools/par-testing installed or on PYTHONPATH. Each part is a
command with a time limit of its own, and writes its output to `<out>/<part>.log`. A part that has succeeded is not run
again, so another call with the same folder continues. A part that does not fit in the remaining time is skipped.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

GPU = "tests-integration/gpu"


class Part(NamedTuple):
    """A command of the session.

    Args:
        name: Name of the part, and of its files.
        command: Arguments of the Python interpreter.
        seconds: Time limit.
    """

    name: str
    command: Sequence[str]
    seconds: float


def _tests(*names: str) -> list[str]:
    return ["-P", "-m", "pytest", "-q", "-x", *(f"{GPU}/test_{name}.py" for name in names)]


def _figures(*cases: str) -> list[str]:
    return ["tools/bench/one_gpu.py", "--only", *cases]


PARTS = (
    Part("zero", _tests("zero_gpu", "precision_gpu"), 100),
    Part("offload", _figures("offload"), 100),
    Part("step", _figures("precision", "zero"), 150),
    Part("recompute", _tests("recompute_gpu", "pipeline_gpu", "groups_on_gpu", "layers_gpu"), 100),
    Part("checkpoint", _tests("checkpoint_gpu", "context_gpu"), 80),
    Part("train", _tests("train_gpu"), 90),
    Part("files", _figures("checkpoint", "pipeline"), 100),
)
"""Parts, the most telling first. Their limits add up to 12 minutes."""


def run(parts: Sequence[Part], folder: Path, minutes: float) -> dict[str, str]:
    """Run parts one after the other, and return what became of each by name.

    Args:
        parts: Parts, in order.
        folder: Folder of their output. It is created.
        minutes: Time limit of all parts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    outcomes = {}
    for part in parts:
        marker, left = folder / f"{part.name}.done", end - time.monotonic()
        if marker.exists():
            outcomes[part.name] = "done before"
            continue
        if left < part.seconds:
            outcomes[part.name] = f"skipped: {left:.0f} s are left, and it may take {part.seconds:.0f} s"
            continue
        began = time.monotonic()
        with (folder / f"{part.name}.log").open("w") as log:
            try:
                command = [sys.executable, *part.command]
                code = subprocess.run(command, stdout=log, stderr=log, timeout=part.seconds, check=False).returncode
                outcome = "done" if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                outcome = "stopped at its time limit"
        if outcome == "done":
            marker.touch()
        outcomes[part.name] = f"{outcome} after {time.monotonic() - began:.0f} s"
        print(f"{part.name}: {outcomes[part.name]}", flush=True)
    return outcomes


def main() -> int:
    """Run the session, print a line for each part, and return 1 if any part has not succeeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the output")
    parser.add_argument("--minutes", type=float, default=12, help="time limit of all parts")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", nargs="+", choices=names, default=names, help="parts to run. Default: all")
    arguments = parser.parse_args()
    chosen = [part for part in PARTS if part.name in arguments.parts]
    outcomes = run(chosen, arguments.out, arguments.minutes)
    print(*(f"{name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    return int(not all(outcome.startswith("done") for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
