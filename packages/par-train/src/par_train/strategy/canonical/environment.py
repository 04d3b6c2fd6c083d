"""What the bits of a canonical run depend on besides its data and options, as a checkpoint stores it."""

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from ..options import StrategyOptions


def environment_of(options: StrategyOptions, device: torch.device) -> dict[str, Any]:
    """Return what the bits of a canonical run depend on besides its data and options; empty for ordinary numerics.

    Args:
        options: The options of the strategy.
        device: The device of this rank.
    """
    lanes = options.canonical_lanes
    if lanes is None:
        return {}
    is_cpu = device.type == "cpu"
    hardware = torch.backends.cpu.get_cpu_capability() if is_cpu else torch.get_device_module(device).get_device_name()
    return {"lanes": asdict(lanes), "torch": str(torch.__version__), "hardware": hardware}


def warn_of_other_bits(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Warn if a canonical run goes on where its bits may differ from those of a run that was not interrupted.

    Args:
        saved: What `environment_of` returned where the checkpoint was written.
        here: What it returns here.
    """
    if not saved or saved == here:
        return
    changed = [
        f"{name} {value!r} became {here.get(name)!r}" for name, value in saved.items() if value != here.get(name)
    ]
    warnings.warn(
        f"numerics='canonical': {', '.join(changed)}, so the weights from here on may differ in their last bits from "
        "those of a run that was not interrupted",
        stacklevel=3,
    )
