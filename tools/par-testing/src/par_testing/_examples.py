"""How property tests draw their examples, in the pytest process and on ranks alike."""

from importlib.util import find_spec


def load_profile() -> None:
    """Have property tests run as long as it takes, and with the same examples every time."""
    if find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings  # noqa: PLC0415

    settings.register_profile("par", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("par")
