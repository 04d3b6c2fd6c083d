"""The interface of object stores that a checkpoint needs, implemented with fsspec's file systems.

An object is written once, appears complete, and is never changed. `s3` uses the S3 protocol directly, and several ranks
can write one object. This module serves all other stores of fsspec, where one rank writes an object from its beginning
to its end.
"""

import contextlib
import errno
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from ..._errors import CheckpointError, CorruptError, StoreError
from ..files import FileSource, Writer

Value = TypeVar("Value")

TRIES = 6
"""Times that something is asked for before its failure counts; in between, a rank waits longer and longer."""

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0  # seconds
_PASSING = (errno.EIO, errno.EBUSY, errno.EAGAIN, getattr(errno, "EREMOTEIO", errno.EIO))

_PASSING_NAMES = ("HTTPClientError", "IncompleteReadError", "ResponseStreamingError", "FlexibleChecksumError")
"""Errors of botocore: a connection in trouble, and bodies that are too short or not what the store says of them."""

_NOT_THERE = ("ResourceNotFoundError", "NoSuchBucket", "NotFound")
"""Errors of clients that are no FileNotFoundError, where one lists what is in no bucket."""

_OF_BUCKETS = frozenset({"abfs", "abfss", "az", "gcs", "gs", "oci", "oss", "r2", "s3", "s3a", "tos", "wasb", "wasbs"})
"""Protocols of stores whose paths begin with a bucket or a container."""


class ObjectInfo(NamedTuple):
    """Entry of an object in a list.

    Args:
        size: Size, in bytes.
        tag: Text that identifies the content; "" if the store has none.
    """

    size: int
    tag: str


class Store(Protocol):
    """Objects by path. A rejected request raises `StoreError`, and a missing object raises FileNotFoundError."""

    joins: bool
    """Whether ranks can write one object together, in parts."""

    def objects(self, folder: str) -> dict[str, ObjectInfo]:
        """Return every object below a folder, by its name relative to the folder."""

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""

    def get(self, path: str) -> bytes:
        """Return all bytes of an object."""

    def get_tagged(self, path: str) -> tuple[bytes, str]:
        """Return all bytes of an object, and the tag that a list shows for this content.

        "" if the store has no tags.
        """

    def put(self, path: str, data: bytes) -> None:
        """Write an object in one request."""

    def replace(self, path: str, data: bytes, beside: str) -> None:
        """Replace an object; a reader gets all of the old or all of the new bytes, even after a kill.

        Args:
            path: Path of the object.
            data: New bytes.
            beside: Folder that no other process writes to, for the incomplete object.
        """

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Remove objects below a folder, in this order; missing objects are ignored."""

    def open(self, path: str, size: int | None) -> FileSource:
        """Open an object to read; `size` is its size, if it is known."""

    def stream(self, path: str) -> Writer:
        """Open an object to write from beginning to end, by one rank."""


class FsspecStore:
    """A file system of fsspec.

    Args:
        fs: The file system.
    """

    joins = False

    def __init__(self, fs: Any, url: str) -> None:
        self.fs, self._url = fs, url

    def objects(self, folder: str) -> dict[str, ObjectInfo]:
        """Return every object below a folder, without a tag."""
        # fsspec caches lists, and other ranks and savers change the store in the meantime.
        self.fs.invalidate_cache()
        with self.told():
            try:
                listed = self.fs.find(folder, detail=True)
            except FileNotFoundError as error:  # of a folder that is not there, fsspec finds nothing
                raise self._no_bucket(error) from error
        return {
            path.removeprefix(folder).lstrip("/"): ObjectInfo(int(info["size"]), "") for path, info in listed.items()
        }

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""
        self.fs.invalidate_cache()
        with self.told():
            try:
                entries = self.fs.ls(folder, detail=True)
            except NotADirectoryError:
                return []
            except FileNotFoundError:
                self._check_bucket(folder)
                return []
        names = (entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory")
        return sorted(name.rpartition("/")[2] for name in names)

    def get(self, path: str) -> bytes:
        """Return all bytes of an object."""
        self.fs.invalidate_cache()
        with self.told():
            return bytes(persist(lambda: self.fs.cat_file(path)))

    def get_tagged(self, path: str) -> tuple[bytes, str]:
        """Return all bytes of an object, and no tag: tags differ between file systems, and some have none."""
        return self.get(path), ""

    def put(self, path: str, data: bytes) -> None:
        """Write an object."""
        with self.told(writes=True):
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self.fs.pipe_file(path, data)

    def replace(self, path: str, data: bytes, beside: str) -> None:
        """Write an object; on a local disk, where it would be empty for a moment, beside it and renamed."""
        # A write to a local file first empties it, and a reader could see that. A rename replaces it in one step.
        if not isinstance(self.fs, LocalFileSystem):
            self.put(path, data)
            return
        whole = f"{beside}/{path.rpartition('/')[2]}"
        self.put(whole, data)
        Path(whole).replace(path)

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Remove objects, and empty folders on stores that have folders."""
        parents = {folder}
        for name in names:
            with self.told(), contextlib.suppress(FileNotFoundError):
                self.fs.rm_file(f"{folder}/{name}")
            # Stores without real folders ignore the removal of a folder. On others an empty folder would remain.
            parents.update(f"{folder}/{name[:end]}" for end in range(len(name)) if name[end] == "/")
        self.fs.invalidate_cache()
        # The deepest folders go first, because a folder must be empty to be removed.
        for path in sorted(parents, key=len, reverse=True):
            with contextlib.suppress(OSError):  # it is not empty, or no such thing
                if not self.fs.ls(path, detail=False):
                    self.fs.rmdir(path)

    def open(self, path: str, size: int | None) -> "ObjectSource":
        """Open an object to read."""
        if size is None:
            try:
                with self.told():
                    size = int(self.fs.size(path))
            except FileNotFoundError as error:
                raise missing(path) from error
        return ObjectSource(path, size, lambda begin, end: FsspecRange(self, path, begin, end))

    def stream(self, path: str) -> "StreamWriter":
        """Open an object to write from beginning to end."""
        told = partial(self.told, writes=True)
        with told():
            self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            return StreamWriter(self.fs, path, told)

    @contextlib.contextmanager
    def told(self, *, writes: bool = False) -> Iterator[None]:
        """Translate errors of the file system into errors that name the cause and the fix, inside the context.

        Args:
            writes: Whether an object is written, so that what is not there can only be the bucket.

        Raises:
            StoreError: The store refuses, or fails.
            FileNotFoundError: There is no such object.
        """
        try:
            yield
        except (CheckpointError, FileExistsError, NotADirectoryError, MemoryError):
            raise
        except FileNotFoundError as error:
            # A write creates the object, so only its bucket can be missing.
            if writes and not isinstance(self.fs, LocalFileSystem):
                raise self._no_bucket(error) from error
            raise
        except IsADirectoryError as error:
            raise FileNotFoundError(str(error)) from error
        except PermissionError as error:
            raise StoreError(
                f"{self._url}: the store refuses access ({error}); set the credentials, and allow to list, read, write "
                "and delete there"
            ) from error
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ELOOP:
                raise FileNotFoundError(str(error)) from error
            # A temporary error is retried by the caller. An error of the local disk, such as a full disk, has a clear
            # message.
            if passes(error) or (isinstance(error, OSError) and isinstance(self.fs, LocalFileSystem)):
                raise
            if type(error).__name__ in _NOT_THERE:
                raise self._no_bucket(error) from error
            raise StoreError(
                f"{self._url}: the store fails ({type(error).__name__}: {error}); see what it asks for, or use another"
            ) from error

    def _check_bucket(self, folder: str) -> None:
        """Raise StoreError if the bucket, container or share of a folder is missing, instead of the folder.

        A folder that does not exist yet is listed as empty at any depth; a path in a missing bucket is not. Object
        stores have no folders, so the first name of a path there is the bucket.
        """
        try:
            self.fs.find(folder, maxdepth=1)
            protocol: str | tuple[str, ...] = getattr(self.fs, "protocol", ())
            if not _OF_BUCKETS.isdisjoint((protocol,) if isinstance(protocol, str) else protocol):
                self.fs.ls(folder.lstrip("/").partition("/")[0], detail=False)
        except FileNotFoundError as error:
            raise self._no_bucket(error) from error

    def _no_bucket(self, error: Exception) -> StoreError:
        return StoreError(
            f"{self._url}: there is no such bucket, container or share ({error}); create it, or use the name and the "
            "endpoint of one that exists"
        )


class ByteRange(Protocol):
    """A range of an object that is being received."""

    def fill(self, view: memoryview) -> int:
        """Fill the view with the next bytes.

        Return their number, which is smaller than the view if the range ended early.
        """

    def close(self) -> None:
        """Drop data that has not arrived yet; a second call does nothing."""


class FsspecRange:
    """A range of an object on a file system of fsspec, which is asked for piece by piece, as it is wanted."""

    def __init__(self, store: FsspecStore, path: str, begin: int, end: int) -> None:
        self._store, self._path, self._at, self._end = store, path, begin, end

    def fill(self, view: memoryview) -> int:
        """Asks for as many bytes as the view has."""
        with self._store.told():
            data = self._store.fs.cat_file(self._path, start=self._at, end=self._at + len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class ObjectSource:
    """Object that is being read, see `FileSource`. Several threads may read it; each sends its own requests.

    If a request fails or ends too early, it is sent again from the first byte of the view that is being filled. The
    caller therefore compares checksums only after the view is complete.

    Args:
        path: Path of the object.
        size: Size, in bytes.
        ask: Function of first byte and last byte plus one that requests a range.
    """

    stride = 1 << 30  # a view is filled as a whole, or anew

    def __init__(self, path: str, size: int, ask: Callable[[int, int], ByteRange]) -> None:
        self.path, self.size, self.ask = path, size, ask

    def ranged(self, begin: int, end: int) -> "RangedSource":
        """Open the object once more, to read its bytes begin .. end - 1 by one request; for one thread."""
        return RangedSource(self, begin, end)

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fill the view with the object's bytes `begin` .. `begin + len(view) - 1`."""
        with contextlib.closing(self.ranged(begin, begin + len(view))) as source:
            source.read_into(begin, view)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class RangedSource:
    """A range of an object, which is read in order from one request as long as that does not break, see `FileSource`.

    Args:
        whole: The object.
        begin: First byte of the range.
        end: One past its last byte.
    """

    stride = ObjectSource.stride

    def __init__(self, whole: ObjectSource, begin: int, end: int) -> None:
        self._whole, self._at, self._end = whole, begin, end
        self._range: ByteRange | None = None
        self.size = whole.size

    def ranged(self, begin: int, end: int) -> "RangedSource":
        """Return a range of the same object."""
        return self._whole.ranged(begin, end)

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fill the view with the bytes from `begin` on."""
        path, end = self._whole.path, begin + len(view)
        if end > self.size:
            raise CorruptError(f"{path} ends at byte {self.size}, but bytes to {end} are asked for: truncated?")
        if not len(view):
            return

        def fill() -> None:
            # A broken request, or a jump to another byte, needs a new request up to the end of the range.
            if self._range is None or self._at != begin:
                self.close()
                self._range, self._at = self._whole.ask(begin, max(self._end, end)), begin
            came = self._range.fill(view)
            if came < len(view):
                raise ConnectionError(f"{path}: {came} of {len(view)} bytes came from byte {begin} on")

        try:
            persist(fill, self.close)
        except FileNotFoundError as error:
            raise missing(path) from error
        self._at = end

    def close(self) -> None:
        """Drop a request that is under way; a second call does nothing."""
        if self._range is not None:
            self._range.close()
            self._range = None


class StreamWriter:
    """An object that one rank streams from beginning to end, see `Writer`.

    Args:
        fs: The file system.
        path: The object.
        told: A context that says in words what the store refuses.
    """

    def __init__(self, fs: Any, path: str, told: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._path, self._end, self._told = path, 0, told
        self._file: Any = fs.open(path, "wb")

    def write_at(self, begin: int, view: memoryview) -> None:
        """Write the view at byte `begin`, which must be the current end."""
        # A stream cannot go back, so each write must continue at the end of the last one.
        if begin != self._end:
            raise ValueError(f"{self._path} is written from beginning to end: byte {begin} cannot follow {self._end}")
        with self._told():
            self._file.write(view)
        self._end += len(view)

    def finish(self) -> None:
        """Close the file, which uploads what is left."""
        file, self._file = self._file, None
        with self._told():
            file.close()

    def abort(self) -> None:
        """Close the file and ignore errors; after `finish` it does nothing."""
        # fsspec can only close the file, which uploads the rest. No manifest names this object, so a sweep removes it.
        if self._file is not None:
            with contextlib.suppress(Exception):  # what made the caller give up is the error to tell
                self.finish()


class UnderWay:
    """Requests in flight, which are waited for together.

    Args:
        most: Maximum number of requests in flight; 0: each request runs when it is begun.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool: ThreadPoolExecutor | None = None
        self._begun: list[Future[object]] = []

    def begin(self, act: Callable[[], object]) -> None:
        """Run a request in a thread as soon as fewer requests are in flight; its data is held until then."""
        if not self._most:
            act()
            return
        while len(under_way := [each for each in self._begun if not each.done()]) >= self._most:
            wait(under_way, return_when=FIRST_COMPLETED)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="par-checkpoint-store")
        self._begun.append(self._pool.submit(act))

    def wait(self) -> None:
        """Wait for all that has begun; raise the first error, when nothing is under way any more."""
        begun, self._begun = self._begun, []
        wait(begun)
        for each in begun:
            each.result()

    def close(self) -> None:
        """End the threads, after what is under way; a second call does nothing."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None


def persist(act: Callable[[], Value], again: Callable[[], None] = lambda: None) -> Value:
    """Run a function that may fail temporarily, a few times.

    Args:
        act: Function to run.
        again: Function that runs before each repetition. Default: nothing.

    Raises:
        StoreError: It failed every time.
    """
    for number in range(TRIES):
        try:
            return act()
        except Exception as error:
            if not passes(error):
                raise
            if number == TRIES - 1:
                raise StoreError(
                    f"the store failed {TRIES} times one after the other, at last with: {error}; look whether it can "
                    "be reached, and try again: nothing is lost"
                ) from error
            again()
            wait = min(_FIRST_WAIT * 2**number, _LONGEST_WAIT)
            time.sleep(wait * (0.5 + random.random() / 2))  # ranks that failed together do not come back together
    raise AssertionError


def passes(error: Exception) -> bool:
    """Return whether a failure may be temporary: a broken connection, or a server that failed or is busy."""
    if isinstance(error, ConnectionError | TimeoutError | EOFError):
        return True
    if isinstance(error, OSError):
        return error.errno in _PASSING
    # What the libraries of HTTP raise of their own is no OSError, and none of them need be installed.
    names = {base.__name__ for base in type(error).__mro__}
    return type(error).__module__.partition(".")[0] == "aiohttp" or not names.isdisjoint(_PASSING_NAMES)


def missing(path: str) -> CorruptError:
    """Return the error for an object that does not exist."""
    return CorruptError(f"{path} is missing: restore it, or load another checkpoint")
