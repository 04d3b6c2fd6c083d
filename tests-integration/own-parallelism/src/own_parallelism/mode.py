"""The mode: how a tensor group is split into axes. It imports no torch, so that planning stays quick."""

from par_groups import Split


def new_mode(size: int, *, arg1: int, arg2: int) -> Split:
    """Split the tensor group into nodes and the ranks of each node.

    Args:
        size: Number of ranks in the tensor group.
        arg1: Number of nodes.
        arg2: Number of ranks per node.

    Raises:
        ValueError: arg1 times arg2 differs from size.
    """
    if arg1 * arg2 != size:
        raise ValueError(
            f"mode 'new_mode': arg1={arg1} nodes of arg2={arg2} ranks are "
            f"{arg1 * arg2}, but the size is {size}; change one of the three"
        )
    axes = (("node", arg1), ("local", arg2))
    return Split(axes=axes, declare=(("node", "local"),))
