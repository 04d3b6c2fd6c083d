"""Imported by the forkserver alone, and last: does once what every rank would otherwise do again."""

import gc

from . import _rank  # noqa: F401  # the code of a rank, and all that it imports
from ._load import pytest_config

pytest_config()  # 14 ms
gc.freeze()  # a collection in a rank then leaves the shared memory pages alone
