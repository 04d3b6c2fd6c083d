"""The mode: how a tensor group is split into axes. It imports no torch, so that planning stays quick."""

from par_groups import Split


def new_mode(size: int, *, arg1: int, arg2: int) -> Split:
    """Nodes, and the ranks of a node, which are neighbours.

    Args:
        size: Of the tensor group.
        arg1: The number of nodes.
        arg2: Ranks in each.

    Raises:
        ValueError: There are not as many ranks.
    """
    if arg1 * arg2 != size:
        raise ValueError(
            f"mode 'new_mode': arg1={arg1} nodes of arg2={arg2} ranks are {arg1 * arg2}, but the size is {size}; "
            "change one of the three"
        )
    return Split(axes=(("node", arg1), ("local", arg2)), declare=(("node", "local"),))
