"""The examples in every README, and those of every page in docs, run in a world of one rank."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]


def outputs_of(text):
    """The lines that a page shows as the output of its programs; an output that it shortens has another title."""
    return "".join(re.findall(r'```text title="Output"\n(.*?)```', text, re.DOTALL)).splitlines()


EXAMPLES = [
    pytest.param(code, id=f"{path.parent.name}-{number}")
    for path in READMES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]
TUTORIAL = ROOT / "docs" / "tutorials" / "add-your-own-parallelism.md"  # which test_own_parallelism.py runs
PAGES = [
    pytest.param("".join(blocks), outputs_of(path.read_text()), id=str(path.relative_to(ROOT / "docs")))
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if path != TUTORIAL and (blocks := re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_every_package_readme_has_an_example_of_that_package():
    packages = [path.parent.name for path in READMES[1:]]
    assert len(packages) >= 7
    for package in packages:
        examples = "".join(each.values[0] for each in EXAMPLES if each.id.startswith(f"{package}-"))
        assert re.search(rf"^(from|import) {package.replace('-', '_')}\b", examples, re.MULTILINE), package


QUICKSTART, TEN_MINUTES = ROOT / "README.md", ROOT / "docs" / "tutorials" / "ten-minutes.md"


@pytest.mark.parametrize("page", [QUICKSTART, TEN_MINUTES], ids=["readme", "ten minutes"])
@pytest.mark.parametrize("ranks", [0, 2], ids=["python", "torchrun"])
def test_tutorial_program_prints_the_shown_output(page, ranks, command, tmp_path):
    """Losses are compared to the last digit that is shown: they differ by the rounding of sums at most."""
    code, shown = program_of(page.read_text())
    (tmp_path / "train.py").write_text(code)
    printed = command(tmp_path, "train.py", ranks=ranks).splitlines()
    assert (
        list(dict.fromkeys(line for line in printed if "epoch" in line)) == shown
    )  # two ranks print a plain loop twice


def test_ten_minutes_plan_prints_the_shown_lines(command, tiny):
    plan = next(
        block
        for block in re.findall(r"```text[^\n]*\n(.*?)```", TEN_MINUTES.read_text(), re.DOTALL)
        if "world" in block
    )
    flags = ["--world=64", "--device-memory=80GB", "--model.path=tiny"]
    printed = command(tiny, "-m", "par_train", "plan", *flags).splitlines()
    assert [line for line in plan.splitlines() if line.strip() != "..." and line not in printed] == []


def program_of(text):
    """The program of a page, with the changes of a diff made, and the lines that the page says it prints."""
    diff = "".join(re.findall(r"```diff\n(.*?)```", text, re.DOTALL))
    changed = "".join(line[2:] or "\n" for line in diff.splitlines(keepends=True) if not line.startswith("-"))
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    outputs = re.findall(r"```text[^\n]*\n((?:.*epoch \d.*\n)+)```", text)
    return changed or "".join(blocks), "".join(outputs).splitlines()


def test_page_includes_files_only_by_markers_of_the_site():
    """A formatter of code has turned `--8<--` into an expression, and the site then showed that."""
    markers = [
        line for path in (ROOT / "docs").rglob("*.md") for line in path.read_text().splitlines() if "--8" in line
    ]
    assert markers
    assert [line for line in markers if not re.fullmatch(r'--8<-- "[^"]+"', line)] == []


def test_every_page_on_a_concept_has_an_example():
    concepts = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs" / "concepts").glob("*.md")}
    assert concepts - {page.id for page in PAGES} == {"concepts/matrix.md"}  # whose content is results


@pytest.mark.ranks(1, timeout=120, init=False)
@pytest.mark.filterwarnings("default")  # a reader sees them, and the example goes on
@pytest.mark.parametrize(("code", "shown"), PAGES)
@pytest.mark.usefixtures("trained")
def test_page_examples_run_and_print_the_shown_output(code, shown, tmp_path):
    as_a_reader_starts(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "page.md", "exec"), {"__name__": "__main__"})
    assert not shown or printed.getvalue().splitlines() == shown


def as_a_reader_starts(folder):
    """In a folder of its own, and with no launcher."""
    os.chdir(folder)
    for name in LAUNCHED:
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def command(warm_python):
    """Runs a command line of Python, and waits for it."""

    def run(folder, *words, ranks=0):
        done = warm_python.start(words, folder=folder, environment=os.environ, ranks=ranks)
        output, errors = done.communicate(60)
        assert done.returncode == 0, errors
        return output

    return run


@pytest.fixture(scope="session")
def tiny(command, tmp_path_factory):
    """A folder with what the reader has who made the tiny model, and has trained it."""
    folder = tmp_path_factory.mktemp("tiny")
    command(folder, str(ROOT / "tools" / "tiny_model.py"), "tiny", "--weights=0", "--corpora=texts", "--files=8")
    flags = ["--model.path=tiny", "--data.path=texts/chat.jsonl", "--train.steps=2", "--train.batch_size=4"]
    command(folder, "-m", "par_train", "run", *flags, ranks=2)
    count_as(folder / "runs" / "tiny", 200)
    return folder


def count_as(run, steps):
    """Lets the checkpoint of a short run stand for the one of a page's run, which takes longer."""
    (checkpoint,) = (run / "checkpoints").iterdir()
    checkpoint.rename(checkpoint.with_name(f"step-{steps:08d}"))


@pytest.fixture
def trained(code, command, tmp_path, request):
    """What the reader has after the command above the example."""
    if "runs/gpt" in code:
        command(tmp_path, "-m", "par_train", "run", "--train.steps=2", "--data.patterns=d*.py", ranks=2)
        count_as(tmp_path / "runs" / "gpt", 800)
    if "runs/tiny" in code:
        (tmp_path / "runs").symlink_to(request.getfixturevalue("tiny") / "runs")


@pytest.mark.ranks(1, timeout=120, init=False)
@pytest.mark.filterwarnings("default")  # a reader sees them, and the example goes on
@pytest.mark.parametrize("code", EXAMPLES)
@pytest.mark.usefixtures("trained")
def test_a_readme_example_runs(code, tmp_path):
    as_a_reader_starts(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
