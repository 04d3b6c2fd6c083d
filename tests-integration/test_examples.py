"""The runnable example in every README runs."""

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


@pytest.mark.parametrize("code", EXAMPLES)
def test_a_readme_example_runs(code, tmp_path):
    if "runs/gpt" in code:  # what the reader has after the command above the example
        run(tmp_path, "-m", "par_train", "run", "--train.steps", "2", "--data.patterns", "d*.py")
    run(tmp_path, "-c", code)


def run(folder, *arguments):
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
