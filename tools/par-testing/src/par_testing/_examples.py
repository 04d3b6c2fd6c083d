"""How property tests draw their examples, in the pytest process and on ranks alike."""

from importlib.util import find_spec
from typing import Any


def load_profile() -> None:
    """Have property tests run as long as it takes: with the same examples every time, or drawn among the storms."""
    if find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings  # noqa: PLC0415

    patient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    # The same 50 say as much every day as the same 100 would; only other ones say more.
    settings.register_profile("par", derandomize=True, max_examples=50, **patient)
    settings.register_profile("par-storms", derandomize=False, max_examples=300, **patient)
    settings.load_profile("par")
