"""Makes `torch.manual_seed` quick in a process of a machine that has no GPU to seed."""

import torch


def seed_no_absent_devices() -> None:
    """Has `torch.manual_seed` pass over kinds of devices of which this machine has none.

    For such a kind torch notes the seed, in case that the device is first used later, together with the whole stack,
    whose source files a fresh process has to read: 3 ms for the first seed, 0.5 ms for each that follows.
    """
    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = _pass_over  # type: ignore[attr-defined]  # a module like any other


def _pass_over(seed: int) -> None:
    """Stands for `manual_seed_all` of devices that are not there."""
