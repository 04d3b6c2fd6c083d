"""The files of one rank in the folder of the dumps, and the line that is printed."""

import faulthandler
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ._dump import Dump, read_death
from ._exchange import Answers
from ._explain import explain


class Journal:
    """Files of one rank: its dump, its stacks if a signal kills it, and the lines that it has reported.

    Args:
        folder: Folder of the dumps.
        rank: Global rank.
        world: Number of ranks.
        report: Function that prints a line. Default: print to the standard error.

    Attributes:
        last: The latest line that this rank has reported; "" before the first.
    """

    def __init__(self, folder: Path, rank: int, world: int, report: Callable[[str], None] | None) -> None:
        self.rank, self.world, self.last = rank, world, ""
        self._folder = folder
        self._report = report or (lambda line: print(line, file=sys.stderr, flush=True))
        self._problem = ""
        self._fatal: TextIO | None = None

    def catch_fatal_signals(self) -> None:
        """Make Python write the stacks of this process if a signal kills it, as gloo's abort does.

        Nothing changes if the program has enabled `faulthandler` itself.
        """
        if faulthandler.is_enabled():
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._fatal = self._fatal_path(self.rank).open("w", encoding="utf-8")
        except OSError as problem:
            self._report(f"par-diagnosis: cannot write to {self._folder}: {problem.strerror}")
            return
        faulthandler.enable(self._fatal, all_threads=True)

    def close(self) -> None:
        """Remove the file for fatal signals, and the folder if it is empty."""
        if self._fatal is not None:
            faulthandler.disable()
            self._fatal.close()
            self._fatal_path(self.rank).unlink(missing_ok=True)
            self._fatal = None
            with suppress(OSError):  # the folder has other files
                self._folder.rmdir()

    def write(self, dump: Dump) -> None:
        """Write this rank's dump. If the disk is full, the line says so, and the job continues."""
        path = self._folder / f"rank-{self.rank}.json"
        self._problem = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(dump.to_json(), encoding="utf-8")
            new.replace(path)  # a reader never finds half a dump
        except OSError as problem:
            self._problem = f" (the dump of rank {self.rank} is missing: {problem.strerror})"

    def report(self, answers: Answers) -> None:
        """Explain the dumps of all ranks, report the line, and append it to `diagnosis.txt`.

        Args:
            answers: Dumps of the ranks that have answered.
        """
        # The file of `faulthandler` names the signal and the line; the state of the process only says that it is gone.
        absent = {rank: self._death_of(rank) or words for rank, words in answers.absent.items()}
        explanation = explain(answers.dumps, self.world, absent)
        self.last = f"par-diagnosis: {answers.reason}: {explanation.line}; dumps are in {self._folder}{self._problem}"
        self._report(self.last)
        path = self._folder / "diagnosis.txt"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write("\n".join([self.last, *(f"    {line}" for line in explanation.details), ""]))
        except OSError as problem:
            self._report(f"par-diagnosis: cannot write {path}: {problem.strerror}")

    def _fatal_path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.fatal"

    def _death_of(self, rank: int) -> str:
        try:
            return read_death(self._fatal_path(rank).read_text(encoding="utf-8", errors="replace"))
        except OSError:
            return ""
