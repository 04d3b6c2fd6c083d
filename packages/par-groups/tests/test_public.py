import subprocess
import sys

import par_groups


def test_every_public_name_is_there():
    for name in par_groups.__all__:
        assert getattr(par_groups, name) is not None
    assert dir(par_groups) == par_groups.__all__ == sorted(par_groups.__all__)
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
