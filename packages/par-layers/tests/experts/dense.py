"""A mixture of experts written as one would explain it: every token, every chosen expert, one after the other.

It shares no code with the layers that are tested, and works in fp64 on whole parameters.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional


def chosen(state: Mapping[str, Tensor], tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, which add up to 1; softmax over all experts comes first."""
    scores = (tokens @ state["gate.weight"].t()).softmax(-1)
    best = scores.topk(top_k, dim=-1)
    return best.indices, best.values / best.values.sum(-1, keepdim=True)


def mixture(state: Mapping[str, Tensor], x: Tensor, top_k: int) -> Tensor:
    """The layer on one device.

    Args:
        state: Its whole parameters by name, with or without shared experts.
        x: Activations [..., h].
        top_k: Number of experts of a token.
    """
    tokens = x.reshape(-1, x.shape[-1])
    ids, gates = chosen(state, tokens, top_k)
    sums = []
    for token, row, weights in zip(tokens, ids, gates, strict=True):
        outputs = []
        for expert, weight in zip(row.tolist(), weights, strict=True):
            gate, up = (state["experts.gate_up_proj"][expert] @ token).chunk(2)
            outputs.append(weight * (state["experts.down_proj"][expert] @ (functional.silu(gate) * up)))
        sums.append(torch.stack(outputs).sum(0))
    routed = torch.stack(sums) if sums else tokens * 0.0
    if "shared_experts.gate_proj.weight" in state:
        gate, up = (tokens @ state[f"shared_experts.{name}_proj.weight"].t() for name in ("gate", "up"))
        routed = routed + (functional.silu(gate) * up) @ state["shared_experts.down_proj.weight"].t()
    return routed.view(x.shape)
