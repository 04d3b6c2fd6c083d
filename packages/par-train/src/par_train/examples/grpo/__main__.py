"""Train a tiny model to add digits, with GRPO and with generators that run concurrently.

    python -m par_train.examples.grpo runs/grpo
    python -m par_train.examples.grpo runs/grpo --steps 600     # resumes

The first command starts a trainer of four ranks (ZeRO 3, tensor parallelism over two) and two generators of one rank,
all on the CPU. Ranks that die are started again: the trainer resumes from its last checkpoint, and generators take the
newest version. Ctrl-C saves and ends the run. The folder then has curve.svg: rewards and versions over time.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from .curve import draw_curve
from .roles import generate, open_store, train
from .task import DIGITS, HEADS, write_model

MISTAKE = 2  # exit code of a rank that found a wrong argument; a restart would find it again


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Exit with a message if sizes do not fit together."""
    parser = argparse.ArgumentParser(
        "python -m par_train.examples.grpo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the run; a run that it has is resumed")
    parser.add_argument("--steps", type=int, default=300, help="step at which training ends (%(default)s)")
    parser.add_argument("--base", type=int, default=10, help="base of the numbers (%(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts in a step (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers to each prompt, a group (%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument("--clip", type=float, default=0.2, help="range of importance ratios around 1 (%(default)s)")
    parser.add_argument("--lag", type=int, default=4, help="steps by which a sample may be old (%(default)s)")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints (%(default)s)")
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the trainer (%(default)s)")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a layer of the trainer (%(default)s)")
    parser.add_argument("--zero", type=int, default=3, choices=range(4), help="ZeRO stage (%(default)s)")
    parser.add_argument("--generators", type=int, default=2, help="number of generators (%(default)s)")
    parser.add_argument("--generator-ranks", type=int, default=1, help="tensor ranks of a generator (%(default)s)")
    parser.add_argument("--restarts", type=int, default=3, help="how often a job is started again (%(default)s)")
    one = parser.add_argument_group("one job only, such as a further generator, which torchrun may start")
    one.add_argument("--role", choices=["train", "generate"], help="the job; default: start all of them")
    one.add_argument("--at", metavar="HOST:PORT", help="address of the store, which the first lines of a run show")
    one.add_argument("--number", type=int, default=0, help="number of the generator (%(default)s)")
    one.add_argument("--model", type=Path, help="folder with the model's config; default: model, in the run's folder")
    options = parser.parse_args(arguments)
    options.model = options.model or options.folder / "model"
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in ("steps", "prompts", "samples", "ranks", "tensor", "generators", "generator_ranks", "save_every"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: pass 1 or more")
    if not 2 <= options.base <= len(DIGITS):
        parser.error(f"--base {options.base}: pass 2 to {len(DIGITS)}")
    if options.lag < 0:
        parser.error(f"--lag {options.lag}: every sample would be too old; pass 0 or more")
    if options.samples < 2:
        parser.error("--samples 1: a group of one answer has no advantages; pass 2 or more")
    if options.ranks % options.tensor:
        parser.error(f"--ranks {options.ranks}: --tensor {options.tensor} must divide it")
    for name in ("tensor", "generator_ranks"):
        if HEADS % getattr(options, name):
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: pass a divisor of {HEADS} heads")
    if options.prompts % (options.ranks // options.tensor):
        parser.error(f"--prompts {options.prompts}: the {options.ranks // options.tensor} replicas must divide it")
    if options.role and not options.at:
        parser.error(f"--role {options.role}: it needs the address of the store; pass --at")
    return options


class RankProcesses:
    """The ranks of the trainer or of a generator. If one of them dies, all of them start again.

    Args:
        name: Name of the job.
        arguments: Arguments of this program.
        ranks: Number of ranks.
        restarts: How often they may start again.
    """

    def __init__(self, name: str, arguments: Sequence[str], ranks: int, restarts: int) -> None:
        self._command = [sys.executable, "-m", "par_train.examples.grpo", *arguments]
        self._name, self._ranks, self._restarts = name, ranks, restarts
        self._start()

    def _start(self) -> None:
        # As under torchrun, the ranks meet in a store of the process that starts them. If rank 0 hosted it, another
        # process could take the port before rank 0 has imported torch. Ranks that start again need an empty store.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(self._ranks),
        }
        # Sessions of their own keep Ctrl-C from the ranks: the trainer leaves after a step, for which it needs samples.
        self._processes = [
            subprocess.Popen(self._command, env={**environment, "RANK": str(rank)}, start_new_session=True)
            for rank in range(self._ranks)
        ]

    def poll(self) -> int | None:
        """Return the exit code of the job, or None while it runs. Restart it if a rank has died."""
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        if not failed:
            return None if None in codes else 0
        self.stop()  # the other ranks would wait for the dead one
        # A rank that a signal has killed leaves errors of any kind on the others, which then are no mistakes.
        if self._restarts == 0 or (MISTAKE in failed and min(failed) > 0):
            return max(failed, key=abs)
        print(f"grpo: the {self._name} starts again: a rank has ended with exit code {min(failed)}", file=sys.stderr)
        self._restarts -= 1
        self._start()
        return None

    def stop(self) -> None:
        """Kill the ranks that still run."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()


def start_all(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Start the store and all jobs, and wait for the trainer."""
    write_model(options.model, options.base)
    # The store outlives trainer and generators, which both may start again.
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    at = f"127.0.0.1:{server.port}"
    store = open_store(at)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: store.set("leave", ""))
    print(f"grpo: further generators can join with --role generate --at {at}", file=sys.stderr)

    def start(name: str, ranks: int, *role: str) -> RankProcesses:
        return RankProcesses(name, [*arguments, *role, f"--at={at}"], ranks, options.restarts)

    trainer = start("trainer", options.ranks, "--role=train")
    generators = [
        start(f"generator {number}", options.generator_ranks, "--role=generate", f"--number={number}")
        for number in range(options.generators)
    ]
    try:
        while (code := trainer.poll()) is None:
            if lost := next((code for each in generators if (code := each.poll())), None):
                return lost
            time.sleep(0.1)
        store.set("done", "")
        while any(each.poll() is None for each in generators):
            time.sleep(0.1)
    finally:
        for job in (trainer, *generators):
            job.stop()
    if code == 0:
        draw_curve(options.folder / "events.jsonl", options.folder / "curve.svg")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Start all jobs, or run one rank of a job, and return the exit code of the process."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = read_options(arguments)
    try:
        match options.role:
            case "train":
                return train(options)
            case "generate":
                return generate(options)
        return start_all(options, arguments)
    except (ValueError, ImportError) as error:  # on every rank, and one of them says it
        if os.environ.get("RANK", "0") == "0":
            print(f"grpo: {error}", file=sys.stderr)
        return MISTAKE


if __name__ == "__main__":
    sys.exit(main())
