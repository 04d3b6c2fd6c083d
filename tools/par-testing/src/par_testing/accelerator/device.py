"""The device, made known to torch in this process."""

import sysconfig
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from . import build
from .copies import copy, copy_and_resize
from .errors import HostAccessError, fault
from .kernels import kernel
from .module import module
from .options import NAME, Accelerator
from .state import state

_libraries: list[torch.library.Library] = []  # of this process; a library's kernels end with it


def enable(rules: Accelerator) -> None:
    """Make `torch.device("strict")`, once in a process; called again, change how strict it is.

    Args:
        rules: How strict it is. The number of devices is that of the first call.

    Raises:
        RuntimeError: The part in C++ cannot be compiled.
    """
    state.rules = rules
    if state.native is None:
        state.native = build.load(build.build())
        _begin(rules.devices)
    state.native.be_strict(rules.bytes, rules.segments == "cuda", rules.costs.launch)
    # Last, for whoever enables `faulthandler` takes the signal away from us.
    state.native.install_handler()


def _begin(devices: int) -> None:
    native: Any = state.native
    not_programs = Path(torch.__file__).parent, Path(__file__).parents[1], sysconfig.get_path("stdlib")
    native.begin(devices, [f"{folder}/" for folder in not_programs], _on_fault)
    backend_registration.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, module(native, devices))
    backend_registration.generate_methods_for_privateuse1_backend(for_storage=True)
    anything = torch.library.Library("_", "IMPL")
    anything.fallback(kernel, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name, overload in direct_operators().items():
        if not has(name, "PrivateUse1"):  # the part in C++ has some
            aten.impl(name, partial(kernel, overload), "PrivateUse1")
    aten.impl("_copy_from", copy, "PrivateUse1")
    aten.impl("_copy_from_and_resize", copy_and_resize, "PrivateUse1")
    # So that `parameter.data = parameter.to(device)` and `module.to(device)` keep the parameter, as on CUDA.
    aten.impl("_has_compatible_shallow_copy_type", lambda tensor, other: True, "PrivateUse1")  # noqa: ARG005
    _libraries.extend([anything, aten])


@cache
def direct_operators() -> dict[str, Any]:
    """Return the operators that arrive at the device whole, as on a GPU, though torch could compose them of others.

    To look for them takes half of the time of `enable`, so the process that ranks are forked from does it for all.
    """
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name: _overload(name)
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and (name.startswith("aten::_foreach") or "_overrideable" in name or has(name, "CPU"))
    }


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _on_fault(writing: bool, call: Any, address: int) -> None:
    raise HostAccessError(fault(writing, call, address))
