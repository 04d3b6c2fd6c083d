"""Ranks that compile find what that needs imported."""


def pytest_configure(config):
    config.addinivalue_line("ranks_preload", "par_testing.ranks.compile_once")
