"""Property tests take their time, and are the same on every run of CI; ranks that compile find its modules imported."""

import os

from hypothesis import settings

settings.register_profile("par", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("par")


def pytest_configure(config):
    config.addinivalue_line("ranks_preload", "par_testing.ranks.compile_once")
