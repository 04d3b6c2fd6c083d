"""The executor as par-diagnosis and a contributor see it: its place in a pass, and the tests of its requirements."""

import re
from pathlib import Path

import pytest

from par_groups import attributes
from par_zero._shard import ENGINE

from ..helpers import batch, loss_of, mlp, sharded, train

TESTS = Path(__file__).parent.parent


@pytest.mark.ranks(2)
def test_executor_describes_the_event_of_this_rank():
    module, optimizer = sharded(mlp(), 3, bucket=1)
    executor = getattr(module, ENGINE)._gatherer.executor
    seen = []
    module[1].register_forward_pre_hook(lambda *_: seen.append(attributes.DOING.of(type(executor))(executor)))
    for step in range(2):
        train(module, optimizer, [[batch(step, width=8)]])
    loss_of(module, batch(2, width=8)).backward()
    assert seen == [
        "in the forward of '1' at stage 3, in a pass without a program",
        *["in the forward of '1' at stage 3, event 2 of 6 of the pass"] * 2,
    ]
    assert attributes.DOING.of(type(executor))(executor) == "between two passes at stage 3"


def test_table_of_requirements_names_tests_that_exist():
    named = re.findall(r"`([\w/]+\.py): (test_\w+)`", (TESTS / "README.md").read_text())
    assert len(named) > 60
    texts = {path: (TESTS / path).read_text() for path, _ in named}
    missing = [name for path, name in named if not re.search(rf"^def {name}\(", texts[path], re.MULTILINE)]
    assert not missing
