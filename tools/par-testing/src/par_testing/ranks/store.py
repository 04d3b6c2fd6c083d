"""The store by which the ranks of a world find each other, hosted by the pytest process."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from .job import HOST


def host_store(timeout: float) -> TCPStore:
    """A new TCPStore on a port that the kernel chooses; it ends with the returned object.

    Each world gets its own, which takes 1 ms: no races for ports, and no keys of an earlier test, also not for code
    that finds the store by MASTER_PORT and so cannot be told of a prefix.

    It listens on IPv4 alone. Left to itself a TCPStore listens on IPv6 too, sees a rank as ::ffff:127.0.0.1, and asks
    the name server who that is, which takes 5 s whenever an answer is lost.

    Args:
        timeout: Seconds that the pytest process itself would wait for a key.
    """
    listener = socket.create_server((HOST, 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),  # the store closes it
    )
