"""The runnable examples in every README run in a world of one rank."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
READMES = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{path.parent.name}-{number}")
    for path in READMES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
]
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def test_the_first_readme_has_an_example_of_every_package():
    examples = "".join(each.values[0] for each in EXAMPLES if each.id.startswith(ROOT.name))
    packages = [path.name.replace("-", "_") for path in ROOT.glob("packages/*")]
    assert len(packages) >= 7
    assert [name for name in packages if f"from {name} import" not in examples] == []


@pytest.mark.ranks(1, timeout=120, init=False)
@pytest.mark.filterwarnings("default")  # a reader sees them, and the example goes on
@pytest.mark.parametrize("code", EXAMPLES)
def test_a_readme_example_runs(code, tmp_path):
    os.chdir(tmp_path)
    for name in LAUNCHED:
        os.environ.pop(name, None)  # as a reader runs it: no launcher was there
    if "runs/gpt" in code:  # what the reader has after the command above the example
        command = [sys.executable, "-m", "par_train", "run", "--train.steps", "2", "--data.patterns", "d*.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
