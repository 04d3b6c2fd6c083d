"""The names of tensors in a module, without the parts that wrappers within the module add. Without torch."""

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and torch's activation checkpointing


def original_name(name: str) -> str:
    """Return a name of a tensor or module without the prefixes of torch.compile and activation checkpointing.

    Args:
        name: Name such as "blocks.0._orig_mod.weight", as `named_parameters()` returns it.
    """
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
