"""The arithmetic of an operator, by torch's registry."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_COUNTED_AS = {  # torch's counter knows neither these forms of attention nor products that are added in place
    _aten.addmm_: _aten.addmm,
    _aten.baddbmm_: _aten.baddbmm,
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_fused_attention_overrideable: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_fused_attention_overrideable_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}


def flops_of(operator: Any, args: Sequence[Any], named: Mapping[str, Any], result: Any) -> int:
    """Return the floating-point operations of an operator; 0 for one that torch does not count.

    Args:
        operator: Operator that ran.
        args: Its arguments.
        named: Its arguments by name.
        result: What it returned.
    """
    packet = operator._overloadpacket
    count = flop_registry.get(_COUNTED_AS.get(packet, packet))
    return count(*args, **named, out_val=result) if count is not None else 0
