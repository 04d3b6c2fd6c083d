"""No rank test here."""

import sys


def test_torch_is_not_imported():
    assert "torch" not in sys.modules
    assert "par_testing._plugin" in sys.modules
