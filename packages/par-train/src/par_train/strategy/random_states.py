"""The states of `random` and numpy's generator on all ranks, in a checkpoint and back."""

import json
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from par_groups import agree


def gather_states(replica: int) -> dict[str, Any]:
    """Where the program's generators of `random` and numpy are, on all ranks, for a checkpoint. Collective.

    torch's are not among them: `Strategy` sets these after each step.

    Args:
        replica: The replica that this rank belongs to.

    Returns:
        "states": the different states, as compressed JSON; "ranks": which of them each rank has; "replicas": the
        replica of each rank.
    """
    both = random.getstate(), np.random.get_state(legacy=False)
    packed = zlib.compress(json.dumps(both, default=np.ndarray.tolist).encode())
    said = agree(None, (packed, replica), None).values()
    numbers: dict[bytes, int] = {}
    ranks = [numbers.setdefault(packed, len(numbers)) for packed, _ in said]
    states = [torch.frombuffer(bytearray(packed), dtype=torch.uint8) for packed in numbers]
    return {"states": states, "ranks": ranks, "replicas": [replica for _, replica in said]}


def restore_states(saved: Mapping[str, Any], replica: int) -> None:
    """Sets the program's generators of `random` and numpy to where they were when `gather_states` was called.

    A rank gets its own state back. If it belongs to another replica now, it gets that of the first rank which belonged
    to that replica: ranks of one replica, which must draw alike, do so under every topology.

    Args:
        saved: What `gather_states` returned.
        replica: The replica that this rank belongs to now.

    Raises:
        ValueError: numpy's generator is of another kind than the saved one.
    """
    ranks, replicas, rank = saved["ranks"], saved["replicas"], dist.get_rank()
    if rank >= len(ranks) or replicas[rank] != replica:
        rank = replicas.index(replica % (max(replicas) + 1))
    packed = saved["states"][ranks[rank]].numpy().tobytes()
    (version, words, gauss), state = json.loads(zlib.decompress(packed))
    kind = np.random.get_state(legacy=False)["bit_generator"]
    if kind != state["bit_generator"]:
        raise ValueError(
            f"numpy's bit generator is {kind}, and the checkpoint has the state of {state['bit_generator']}; use "
            "numpy.random.set_bit_generator before you resume"
        )
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state)
