"""Collection of the objects of an epoch that has ended."""

import gc
import threading


def collect_garbage(patience: float = 1.0) -> None:
    """Free the objects of old epochs, which refer to each other and keep the threads and sockets of their groups.

    The destructor of a gloo group waits for the group's calls. Now and then a call that a lost rank has left ends only
    with its timeout, so another thread waits for it.

    Args:
        patience: Seconds after which this returns although the collection still runs.
    """
    collector = threading.Thread(target=gc.collect, daemon=True, name="par_train-garbage")
    collector.start()
    collector.join(patience)
