"""The tables of cases in README.md."""

import re
from pathlib import Path

TABLES = Path(__file__).parents[1] / "README.md"


def test_tables_of_cases_name_tests_that_exist():
    root, text = TABLES.parents[3], TABLES.read_text()
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == [*range(1, 19)] * 2
    named = re.findall(r"`([\w/-]+\.py): (test_\w+)`", text)
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    assert all(".py: test_" in row for row in rows)
    missing = [
        f"{path}: {name}"
        for path, name in named
        if not re.search(rf"^def {name}\(", (root / path).read_text(), re.MULTILINE)
    ]
    assert not missing
