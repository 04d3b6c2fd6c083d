import inspect
import subprocess
import sys

import pytest

import par_groups


def test_every_public_name_is_there():
    for name in par_groups.__all__:
        assert getattr(par_groups, name) is not None
    assert dir(par_groups) == sorted(par_groups.__all__)
    for name in ("no_such_name", "gre", ""):  # none is a name, though two are a part of one
        assert not hasattr(par_groups, name)


def test_what_is_imported_late_is_listed_and_nothing_else():
    eager = subprocess.run(
        [sys.executable, "-c", "import par_groups, sys; print('torch' in sys.modules, *sorted(vars(par_groups)))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert eager[0] == "False"
    assert set(par_groups._MODULE_OF) == set(par_groups.__all__) - set(eager)


@pytest.mark.parametrize(
    "call",
    [
        par_groups.launch,
        par_groups.ProcessGroups,
        par_groups.Topology,
        par_groups.Topology.from_config,
        par_groups.Topology.from_order,
        par_groups.read_environment,
        par_groups.get_logger,
        par_groups.agree,
        par_groups.check_alike,
        par_groups.together,
        par_groups.cut,
        par_groups.to_dtensor,
    ],
    ids=lambda call: call.__qualname__,
)
def test_help_lists_every_keyword(call):
    for name, parameter in inspect.signature(call).parameters.items():
        assert parameter.kind is not parameter.VAR_KEYWORD
        assert f"{name}: " in inspect.getdoc(call), name
