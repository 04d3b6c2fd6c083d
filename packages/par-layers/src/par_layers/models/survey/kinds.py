"""Kinds of modules: linears and embeddings that can be sharded, and modules that compute each token separately."""

import ast
import inspect
import sys
import textwrap
from typing import Any

from torch import nn
from torch.nn.modules import activation

from ..cutting import is_packed_4bit

BY_TOKEN = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)
"""Modules of torch that treat each token by itself, beside its activations."""


NOT_BY_TOKEN = frozenset(
    {
        "self",
        "hidden_states",
        "attention_mask",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "position_embeddings",
        "position_ids",
        "cache_position",
        "past_key_values",
        "layer_past",
        "use_cache",
        "output_attentions",
        "kwargs",
    }
)
"""Arguments of layers that are activations, that attention alone reads, or that are no tensors."""


def is_by_token(module: nn.Module) -> bool:
    """Return whether a module is known to process each token separately, like a linear, norm, activation or dropout."""
    kind = type(module)
    if next(module.children(), None) is not None:
        return False
    if kind.__module__.startswith("torch."):
        return kind.__module__ == activation.__name__ or isinstance(module, BY_TOKEN)
    if isinstance(module, nn.Linear) or is_conv1d(module) or kind.__module__ == "transformers.activations":
        return True
    # A norm in a model's own code is recognized by its name, and by parameters that are one value for each feature.
    return "Norm" in kind.__name__ and all(each.dim() <= 1 for each in module.parameters())


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm of single tokens, or of their heads, with parameters."""
    return is_by_token(module) and "Norm" in type(module).__name__ and next(module.parameters(), None) is not None


def computed_arguments(kind: type[nn.Module]) -> set[str]:
    """Return the arguments that a layer's own code computes with, beside its activations and what is not per token.

    To pass an argument on to a module inside, by name or position, or to compare it to None, is no computation.
    """
    _, _, *others = [*inspect.signature(kind.forward).parameters, "", ""]  # after the module and its activations
    taken = set(others) - NOT_BY_TOKEN
    if not taken:
        return set()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(kind.forward))))
    except (OSError, TypeError, SyntaxError):  # it was not read from a file
        return set()
    passed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self."):
            passed.update(id(each) for each in (*node.args, *(keyword.value for keyword in node.keywords)))
        elif isinstance(node, ast.Compare) and all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops):
            passed.add(id(node.left))
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in passed} & taken


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a supported linear: torch's own, transformers' Conv1D, or bitsandbytes' in 4 bits."""
    if not isinstance(module, nn.Linear):
        return is_conv1d(module)
    return type(module).forward is nn.Linear.forward or (
        type(module).__module__.startswith("bitsandbytes.") and is_packed_4bit(module.weight)
    )


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module's weight is [in, out]: transformers' Conv1D, which GPT-2 has, also after its adoption."""
    conv1d = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return (conv1d is not None and type(module) is conv1d) or getattr(module, "transposed", False) is True


def features_of(module: nn.Module, name: str = "") -> tuple[int, int]:
    """Return the output and input features of a linear.

    Args:
        module: Module.
        name: Name of the module, for the message. Default: "".

    Raises:
        TypeError: The module is not a linear, or its class has a matmul of its own.
    """
    if not is_linear(module):
        what = (
            f"{type(module).__name__} multiplies in its own way, as quantised linears do, and cannot be cut"
            if isinstance(module, nn.Linear)
            else f"the rules Column and Row are for an nn.Linear, and this is a {type(module).__name__}"
        )
        raise TypeError(f"{name!r}: {what}; give it the rule 'replicate', or load the model without that")
    _check_own_weight(module, name)
    weight: Any = module.weight
    out, inner = weight.quant_state.shape if is_packed_4bit(weight) else weight.shape
    return (inner, out) if is_conv1d(module) else (out, inner)


def check_embedding(module: nn.Module, name: str) -> None:
    """Check that the rule Vocabulary is on an embedding whose table can be cut.

    Raises:
        TypeError: The module is no nn.Embedding, or computes its table.
    """
    if isinstance(getattr(module, "token_adapter", None), nn.Module):
        raise TypeError(
            f"{name!r} has an adapter of peft that trains some rows of the embedding, which cannot be cut; remove "
            "trainable_token_indices"
        )
    if not isinstance(module, nn.Embedding):
        raise TypeError(
            f"{name!r}: the rule Vocabulary is for an nn.Embedding, but a {type(module).__name__} has it; use "
            "'replicate' there"
        )
    _check_own_weight(module, name)


def _check_own_weight(module: nn.Module, name: str) -> None:
    """Check that a module's weight is a parameter of its own, which can be cut.

    A parametrization, such as weight norm or spectral norm, and pruning compute the weight of others, and torch's
    properties and hooks that do so end when the module becomes a Column or a Row.

    Raises:
        TypeError: The weight is computed, or is a tensor subclass, such as of quantised numbers.
    """
    weight = module._parameters.get("weight")
    others = module._parameters.keys() - {"weight", "bias"}
    if weight is None or others:
        raise TypeError(
            f"{name!r}: its weight is computed, as by weight_norm, spectral_norm, a parametrization or pruning, and "
            "cannot be sharded; use 'replicate' there, or remove the parametrization before the model is sharded"
        )
    if type(weight) is not nn.Parameter and not is_packed_4bit(weight):
        raise TypeError(
            f"{name!r}: its weight is a {type(weight).__name__}, and only a plain nn.Parameter can be cut; use "
            "'replicate' there"
        )


def join(path: str, name: str) -> str:
    """Return the name of a child of the module at `path`; the path of the model itself is empty."""
    return f"{path}.{name}" if path else name


def parent(name: str) -> str:
    """Return the name of the module that holds a child."""
    return name.rpartition(".")[0]
