"""Imported by the forkserver alone, and last: does once what every rank would otherwise do again."""

import gc
import os
import pickle
import sys
import warnings
from pathlib import Path

import pytest

from par_groups import Registry

from .._examples import load_profile
from ..accelerator.device import direct_operators
from . import rank as _rank  # noqa: F401  # the code of a rank, and all that it imports
from .first_use import use_what_tests_use
from .forkserver import MODULES
from .huge_pages import collapse_into_huge_pages
from .load import import_module
from .seeds import seed_no_absent_devices

load_profile()  # before test modules, whose property tests take the settings of this moment
sys.path[:], _modules = pickle.loads(Path(os.environ.pop(MODULES)).read_bytes())  # noqa: S301  # our own
with warnings.catch_warnings(action="ignore"):  # pytest has reported them when it collected the modules
    for module in _modules:
        try:
            import_module(module)
        except (Exception, pytest.skip.Exception):  # which a rank will meet again, and report with its test
            sys.modules.pop(module.name, None)
Registry("entry", "par_testing").names()  # looks for what is installed on this path, which takes a rank 7 ms
seed_no_absent_devices()
use_what_tests_use()
direct_operators()
gc.freeze()  # a collection in a rank then leaves the shared memory pages alone
collapse_into_huge_pages()  # last: what is freed or written later would split them again
