"""The connection between a keeper and one of its ranks, and the progress that a rank reports over it."""

import os
import socket
from contextlib import suppress
from typing import NamedTuple

LINE = "PAR_KEEPER_LINE"
"""The environment variable with the descriptor of the rank's end."""


class RankProgress(NamedTuple):
    """How far a rank has come; a larger one is further.

    Args:
        epoch: The latest epoch at which the rank has arrived, from 0; -1 before the first one.
        reports: The number of times that the rank has reported progress in this epoch.
    """

    epoch: int = -1
    reports: int = 0


class KeeperLink:
    """One end of a connection that carries short texts, in order.

    Args:
        end: A Unix socket that keeps messages apart.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    @staticmethod
    def pair() -> tuple["KeeperLink", "KeeperLink"]:
        """Return two connected ends."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return KeeperLink(one), KeeperLink(other)

    @staticmethod
    def inherited(descriptor: int) -> "KeeperLink":
        """Return the end that a parent process has left open for this process."""
        os.set_inheritable(descriptor, False)  # the rank's own children must not hold it open
        return KeeperLink(socket.socket(fileno=descriptor))

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._end.fileno()

    def send(self, text: str) -> None:
        """Send a text; a peer that has ended misses it."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._end.send(text.encode())

    def receive(self, timeout: float) -> str | None:
        """Return the next text; "" if the peer has ended, None if no text arrives within the timeout in seconds."""
        self._end.settimeout(timeout)
        try:
            return self._end.recv(256).decode()
        except (TimeoutError, BlockingIOError):
            return None
        except ConnectionResetError:
            return ""

    def close(self) -> None:
        """Close this end."""
        self._end.close()
