"""No rank test here."""

import os
import sys


def test_torch_is_not_imported():
    assert "torch" not in sys.modules
    assert "par_testing._plugin" in sys.modules


def test_libraries_compute_in_one_thread():
    assert os.environ["OMP_NUM_THREADS"] == "1"
