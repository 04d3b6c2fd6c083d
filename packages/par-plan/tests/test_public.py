"""What `import par_plan` offers, and that `help` says how to use it."""

import inspect
import pydoc

import pytest

import par_plan


def test_every_public_name_is_there_once():
    late = [name for names in par_plan._LATE.values() for name in names]
    assert sorted(late) == sorted(par_plan.__all__)
    assert all(hasattr(par_plan, name) for name in par_plan.__all__)


@pytest.mark.parametrize("name", ["predict", "TrainingJob", "Machine", "Shape"])
def test_help_lists_and_explains_every_keyword(name):
    public = getattr(par_plan, name)
    text = pydoc.plain(pydoc.render_doc(public))
    for keyword, parameter in inspect.signature(public).parameters.items():
        assert f"{keyword}: " in text.split("\n\n")[0] or f"{keyword}: " in text.split("Args:")[0], keyword
        assert f"{keyword}: " in text.split("Args:")[1], keyword
        if parameter.default not in (parameter.empty, None):
            assert f" = {parameter.default}" in text.split("Args:")[0] or f" = '{parameter.default}'" in text
