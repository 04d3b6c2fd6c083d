"""The programs in README.md and in examples/, with the output that README.md shows."""

import contextlib
import io
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
README = (PACKAGE / "README.md").read_text()
PROGRAMS = re.findall(r'```python\n(.*?)```\n\n```text title="Output"\n(.*?)```', README, re.DOTALL)


@pytest.mark.parametrize(("code", "shown"), PROGRAMS, ids=["fsdp2", "search"])
def test_readme_program_prints_the_shown_output(code, shown):
    if "transformers" in code:
        pytest.importorskip("transformers", minversion="5.4")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == shown


def test_example_is_the_program_of_the_readme():
    path = PACKAGE / "examples" / "fsdp2_on_64_gpus.py"
    if not path.exists():
        pytest.skip("examples/ is not part of this source distribution")
    assert path.read_text().partition('"""\n\n')[2] == PROGRAMS[0][0]
