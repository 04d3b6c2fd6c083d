"""The atlas of model types: trains a tiny model of each type in every way, and writes docs/models.md.

    python tools/atlas.py                       # what no result is there for, then the page
    python tools/atlas.py llama qwen3_next      # these types, again
    python tools/atlas.py --jobs 4              # on as many processors
    python tools/atlas.py --check 20            # as many types, drawn at random, against the page

Results are kept in runs/atlas, a file for each type, and are valid for one state of our sources and one release of
transformers and torch: a run that was interrupted continues.
"""

import argparse
import json
import os
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

from _state import ROOT, state_of

RESULTS = ROOT / "runs/atlas"
FOLDER = ROOT / "tests-integration/atlas"
PAGE = ROOT / "docs/models.md"


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="run these, although results may be there")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="types at once (default: %(default)s)")
    parser.add_argument("--page", action="store_true", help="write the page of results that are there, and run none")
    parser.add_argument("--check", type=int, metavar="N", help="draw types, or take those named; compare with the page")
    parser.add_argument("--ways", metavar="WAY,WAY", help="with --check: some columns of the page")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests-integration")]
    # A rank is a fork of a process that has computed, and threads of OpenMP do not survive a fork.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Slow to import, and `--help` does without them.
    models, pages = import_module("atlas._models"), import_module("atlas._page")

    RESULTS.mkdir(parents=True, exist_ok=True)
    every, key = models.types(), state()
    unknown = sorted(set(given.types) - set(every))
    if unknown:
        parser.error(f"{unknown[0]!r}: transformers {version('transformers')} has no such type with a plan")
    missing = given.types or [name for name in every if read(name).get("state") != key]
    if given.check is not None:
        drawn = given.types or random.sample(every, given.check)
        tried = list(results_of(drawn, given.jobs, given.ways and given.ways.split(",")))
        wrong = list(pages.differences(PAGE.read_text(), tried))
        sys.stdout.writelines(f"{each}\n" for each in wrong or [f"as on the page: {', '.join(drawn)}"])
        sys.exit(bool(wrong))
    for count, result in enumerate(results_of([] if given.page else missing, given.jobs), 1):
        (RESULTS / f"{result['type']}.json").write_text(json.dumps({**result, "state": key}, indent=1))
        sys.stdout.write(f"{count}/{len(missing)} {pages.line(result)}\n")
        sys.stdout.flush()
    results = [found for name in every if (found := read(name))]
    PAGE.write_text(pages.page(results))
    sys.stdout.write(f"wrote {PAGE.relative_to(ROOT)}: {len(results)} of {len(every)} types\n")


def results_of(names: list[str], jobs: int, ways: list[str] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the results of types, as each is done.

    Args:
        names: The types.
        jobs: Number of types at once.
        ways: Names of the ways. Default: all.
    """
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run, name, ways) for name in names]):
            yield done.result()


def state() -> str:
    """Return a hash of everything that a result depends on."""
    files = [file for file in FOLDER.glob("*.py") if file.name not in ("_page.py", "test_atlas.py")]
    return state_of(f"{version('torch')} {version('transformers')}", files)


def read(name: str) -> dict[str, Any]:
    """Return the kept result of a type; empty if none is kept."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def run(name: str, ways: list[str] | None) -> dict[str, Any]:
    """Return all cells of a type; in a process of the pool."""
    sys.path[:0] = [str(ROOT / "tests-integration")]
    found: dict[str, Any] = import_module("atlas._cells").try_type(name, ways)
    return found


if __name__ == "__main__":
    main()
