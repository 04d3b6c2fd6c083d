"""The server of the benchmark of object stores: nanio, whose requests can be made as slow as those over a network.

nanio keeps objects as files, here in memory, and runs as several processes, which moto, whose objects are Python's,
cannot. Nothing of S3 is done here: a wrapper counts the bytes of a request's bodies and keeps them to a pace.
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from nanio.app import build_app

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

PROCESSES = 2


class Server:
    """nanio, in processes of its own.

    Args:
        folder: Where objects are kept.
        delay: Seconds that every request takes beside its bytes.
        pace: Bytes a second of one request's bodies; 0: as fast as they go.
    """

    def __init__(self, folder: Path, *, delay: float = 0.0, pace: float = 0.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        settings = {
            "NANIO_DATA_DIR": str(folder),
            "NANIO_ACCESS_KEY": "me",
            "NANIO_SECRET_KEY": "secret",
            "BENCH_DELAY": str(delay),
            "BENCH_PACE": str(pace),
        }
        command = [sys.executable, "-m", "uvicorn", "--factory", f"{Path(__file__).stem}:paced_app"]
        options = ["--port", str(port), "--workers", str(PROCESSES), "--no-access-log", "--log-level", "warning"]
        self._process = subprocess.Popen([*command, *options], env=os.environ | settings, cwd=Path(__file__).parent)
        self._wait()

    def _wait(self) -> None:
        """Until it answers."""
        while self._process.poll() is None:
            try:
                urlopen(self.url)
            except OSError as error:
                if hasattr(error, "code"):  # it answers, and refuses who has no key
                    return
                time.sleep(0.05)
        raise RuntimeError("the server ended before it answered")

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        self._process.wait()


def paced_app() -> App:
    """Nanio's application with the delay and the pace of the environment, for uvicorn."""
    delay, pace = float(os.environ["BENCH_DELAY"]), float(os.environ["BENCH_PACE"])
    app: App = build_app()
    return app if not delay and not pace else paced(app, delay, pace)


def paced(app: App, delay: float, pace: float) -> App:
    """An application whose requests take a while: at the end of what they receive, and for every byte."""

    async def serve(
        scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        due = asyncio.get_running_loop().time() + delay

        async def until_due(message: Message) -> None:
            nonlocal due
            due += len(message.get("body", b"")) / pace if pace else 0
            await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))

        async def receive_slowly() -> Message:
            message = await receive()
            await until_due(message)
            return message

        async def send_slowly(message: Message) -> None:
            await until_due(message)
            await send(message)

        await app(scope, receive_slowly, send_slowly)

    return serve
