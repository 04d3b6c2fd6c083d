"""S3 and compatible stores, through s3fs: objects that several ranks write together, in parts.

One rank begins an upload and sends its id to the other ranks. Each rank sends its own parts, in any order. Then one
rank joins the parts, and only then the object exists. An upload that is never joined is no object, but it takes space
until the next save or `prune` aborts it.
"""

import contextlib
import errno
import io
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from fsspec.asyn import sync  # type: ignore[import-untyped]
from fsspec.config import conf  # type: ignore[import-untyped]

from ..._errors import CheckpointError, StoreError
from ..files import IN_FLIGHT
from .requests import PAGE
from .store import ObjectInfo, ObjectSource, StreamWriter, missing, passes, persist

PART = 8 << 20
"""Bytes of a part, and of the blocks of a file that is written in parts; the first part has the header, too."""

MOST_PARTS = 10_000
"""Parts of one object at most, on S3."""

_CHUNK = 1 << 20
_OF_PARTS = ("begin", "create_multipart_upload", "upload_part", "list_parts", "complete_multipart_upload")
_UNKNOWN = ("NotImplemented", "MethodNotAllowed")  # what S3 calls requests that a store does not know


@dataclass(frozen=True, kw_only=True)
class UploadParts:
    """Division of an object into parts.

    Args:
        size: Bytes of the object.
        head: Size of the file's header, which belongs to the first part in addition to its data, in bytes.
        part: Size of a part, in bytes; the last part may be shorter.
    """

    size: int
    head: int
    part: int

    @property
    def count(self) -> int:
        """The number of parts."""
        return max(1, -(-(self.size - self.head) // self.part))

    def place(self, begin: int) -> tuple[int, int, int]:
        """Return the part that contains a byte: number from 0, first byte, and last byte plus one."""
        number = max(begin - self.head, 0) // self.part
        first = self.head + number * self.part if number else 0
        return number, first, min(self.head + (number + 1) * self.part, self.size)


class UnknownRequestError(StoreError):
    """The store does not know a kind of request."""


class S3Store:
    """A bucket.

    Args:
        fs: The file system of s3fs.
        url: The user's URL, for messages.
    """

    joins = True

    def __init__(self, fs: Any, url: str) -> None:
        self.fs, self._url = fs, url

    def objects(self, folder: str) -> dict[str, ObjectInfo]:
        """Return every object below a folder."""
        bucket, prefix = _split(f"{folder}/")
        pages = self._pages("list_objects_v2", Bucket=bucket, Prefix=prefix)
        return {
            str(each["Key"]).removeprefix(prefix): ObjectInfo(int(each["Size"]), str(each.get("ETag", "")))
            for page in pages
            for each in page.get("Contents", ())
        }

    def folders(self, folder: str) -> list[str]:
        """Return the names of the folders in a folder."""
        bucket, prefix = _split(f"{folder}/")
        pages = self._pages("list_objects_v2", Bucket=bucket, Prefix=prefix, Delimiter="/")
        found = (str(each["Prefix"]) for page in pages for each in page.get("CommonPrefixes", ()))
        return sorted(name.removeprefix(prefix).rstrip("/") for name in found)

    def get(self, path: str) -> bytes:
        """Return all bytes of an object."""
        return self.get_tagged(path)[0]

    def get_tagged(self, path: str) -> tuple[bytes, str]:
        """Return all bytes of an object, and its tag."""

        def fetch() -> tuple[bytes, str]:
            answer = self._ask(path)
            data = sync(self.fs.loop, _read_all, answer["Body"], int(answer["ContentLength"]))
            return data, str(answer.get("ETag", ""))

        return persist(fetch)

    def put(self, path: str, data: bytes) -> None:
        """Write an object in one request."""
        bucket, key = _split(path)
        self.call("put_object", Bucket=bucket, Key=key, Body=data)

    def replace(self, path: str, data: bytes, beside: str) -> None:
        """Write an object in one request, as it appears whole."""
        del beside
        self.put(path, data)

    def delete(self, folder: str, names: Iterable[str]) -> None:
        """Remove objects, in this order as far as it takes several requests."""
        bucket, prefix = _split(f"{folder}/")
        keys = [{"Key": prefix + name} for name in names]
        for first in range(0, len(keys), PAGE):
            some = keys[first : first + PAGE]
            try:
                # A quiet answer lists failures only.
                failed = self.call("delete_objects", Bucket=bucket, Delete={"Objects": some, "Quiet": True}).get(
                    "Errors", ()
                )
            except UnknownRequestError:
                # Some stores remove only single objects, with a request for each.
                for each in some:
                    self.call("delete_object", Bucket=bucket, **each)
                continue
            if failed:
                raise StoreError(
                    f"{self._url}: {failed[0]['Key']} cannot be removed ({failed[0].get('Message', 'no reason')}); "
                    "allow s3:DeleteObject there"
                )

    def open(self, path: str, size: int | None) -> ObjectSource:
        """Open an object to read."""
        if size is None:
            bucket, key = _split(path)
            try:
                size = int(self.call("head_object", Bucket=bucket, Key=key)["ContentLength"])
            except FileNotFoundError as error:
                raise missing(path) from error
        return ObjectSource(path, size, lambda begin, end: S3Range(self.fs.loop, self._ask(path, begin, end)["Body"]))

    def stream(self, path: str) -> StreamWriter:
        """Open an object to write from beginning to end, by one rank."""
        with self.told():
            return StreamWriter(self.fs, path, partial(self.told, "begin"))

    def begin(self, path: str) -> str:
        """Begin to upload an object in parts, and return the id of the upload."""
        bucket, key = _split(path)
        with self.told("begin"):
            return str(self.call("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"])

    def send(self, path: str, upload: str, number: int, data: bytes) -> None:
        """Send one part of an upload, counted from 0 on."""
        bucket, key = _split(path)
        try:
            self.call("upload_part", Bucket=bucket, Key=key, UploadId=upload, PartNumber=number + 1, Body=data)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path} is no longer being written: another save to the same place has given it up; save to another "
                "path, or one after the other"
            ) from error

    def join(self, path: str, upload: str, parts: UploadParts) -> None:
        """Make an object of the parts of an upload.

        Raises:
            CheckpointError: A part is not there, or not as long as it was sent.
        """
        bucket, key = _split(path)
        # The store lists the parts, because other ranks have sent most of them and this rank does not have their tags.
        found: dict[int, tuple[int, str]] = {}
        marker: dict[str, int] = {}
        while True:
            page = self.call("list_parts", Bucket=bucket, Key=key, UploadId=upload, **marker)
            found |= {int(each["PartNumber"]): (int(each["Size"]), str(each["ETag"])) for each in page.get("Parts", ())}
            if not page.get("IsTruncated"):
                break
            marker = {"PartNumberMarker": int(page["NextPartNumberMarker"])}
        first = 0
        for number in range(parts.count):
            _, _, end = parts.place(first)
            size = found[number + 1][0] if number + 1 in found else 0
            # The store joins parts of any size, so a part that arrived cut short would shorten the object.
            if size != end - first:
                raise CheckpointError(
                    f"{path}: part {number + 1} has {size} bytes in the store, not {end - first}: save again"
                )
            first = end
        joined = [{"PartNumber": number, "ETag": found[number][1]} for number in range(1, parts.count + 1)]
        order = {"Parts": joined}
        self.call("complete_multipart_upload", Bucket=bucket, Key=key, UploadId=upload, MultipartUpload=order)

    def uploads(self, prefix: str) -> Iterator[tuple[str, str]]:
        """Uploads that were begun and never joined: path and name of each whose path begins like this.

        None where the store cannot list them: they only take room, until a rule of the bucket ends them.
        """
        bucket, key = _split(prefix)
        marker: dict[str, str] = {}
        while True:
            try:
                page = self.call("list_multipart_uploads", Bucket=bucket, Prefix=key, **marker)
            except UnknownRequestError:
                return
            for each in page.get("Uploads", ()):
                if str(each["Key"]).startswith(key):
                    yield f"{bucket}/{each['Key']}", str(each["UploadId"])
            if not page.get("IsTruncated"):
                return
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def give_up(self, path: str, upload: str) -> None:
        """End an upload whose parts are of no use."""
        bucket, key = _split(path)
        with contextlib.suppress(FileNotFoundError):
            self.call("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)

    def call(self, method: str, **arguments: Any) -> Any:
        """Send one request, and repeat it after temporary failures.

        Raises:
            StoreError: The store refuses.
            FileNotFoundError: There is no such object, or upload.
        """
        with self.told(method):
            return persist(lambda: self.fs.call_s3(method, **arguments))

    @contextlib.contextmanager
    def told(self, doing: str = "") -> Iterator[None]:
        """Translate errors of the store into errors that name the cause and the fix, inside the context.

        Args:
            doing: The request, as botocore calls it, or "begin" where an object is uploaded in parts.

        Raises:
            StoreError: The store refuses, or fails.
            FileNotFoundError: There is no such object, or upload.
        """
        try:
            yield
        except CheckpointError:
            raise
        except FileNotFoundError as error:
            if _code(error) == "NoSuchBucket":
                raise StoreError(
                    f"{self._url}: there is no such bucket; create it, or check its name and the endpoint"
                ) from error
            raise
        except PermissionError as error:
            if _code(error) in _UNKNOWN:
                raise self._unknown(doing, error) from error
            raise StoreError(
                f"{self._url}: the store refuses access ({_code(error)}: {error}); check the credentials, and that "
                "they may list, read, write and delete there"
            ) from error
        except Exception as error:
            # Known by their names, so that botocore is imported only by s3fs.
            if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"):
                raise StoreError(
                    f"{self._url}: there are no credentials ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,"
                    " a profile, or a role"
                ) from error
            if passes(error):
                raise  # it is asked again
            if _code(error) in _UNKNOWN or (isinstance(error, OSError) and error.errno == errno.ENOSYS):
                raise self._unknown(doing, error) from error
            raise StoreError(
                f"{self._url}: the store fails in {doing or 'get_object'} ({_code(error)}: {error}); set what it asks "
                "for, or use another store"
            ) from error

    def _unknown(self, doing: str, error: Exception) -> StoreError:
        """Return the error for a kind of request that the store does not support."""
        if doing in _OF_PARTS:
            return StoreError(
                f"{self._url}: the store cannot put files together from parts ({_code(error)}: {error}); allow "
                "multipart uploads there, or save with writer='owner' and max_shard_size='40MB', which writes each "
                "file in one request"
            )
        return UnknownRequestError(
            f"{self._url}: the store does not know the request {doing or 'get_object'} ({_code(error)}: {error}); "
            "use a store that does"
        )

    def _ask(self, path: str, begin: int | None = None, end: int | None = None) -> Mapping[str, Any]:
        """Request an object or a range of it; return the answer, whose body is not read yet."""
        bucket, key = _split(path)
        # The callers repeat this request, because reading its body can fail as well.
        asked = {} if begin is None or end is None else {"Range": f"bytes={begin}-{end - 1}"}
        with self.told():
            return cast("Mapping[str, Any]", self.fs.call_s3("get_object", Bucket=bucket, Key=key, **asked))

    def _pages(self, method: str, **arguments: Any) -> Iterator[Mapping[str, Any]]:
        """Yield all pages of the answer to a list request."""
        marker: dict[str, str] = {}
        while True:
            page = self.call(method, **arguments, **marker)
            yield page
            if not page.get("IsTruncated"):
                return
            marker = {"ContinuationToken": page["NextContinuationToken"]}


class S3Range:
    """Range of an object that is being received, see `ByteRange`.

    Args:
        loop: Event loop of s3fs.
        body: Body of the store's answer; the return value of `fill` shows whether it ended early.
    """

    def __init__(self, loop: Any, body: Any) -> None:
        self._loop, self._body = loop, body

    def fill(self, view: memoryview) -> int:
        """Receive as many bytes as the view has, or fewer at the end."""
        return cast("int", sync(self._loop, _fill, self._body, view))

    def close(self) -> None:
        """Drop the connection, unless all data has arrived."""
        # The body belongs to the event loop of s3fs, which runs in another thread.
        self._loop.call_soon_threadsafe(self._body.close)


class S3PartsWriter:
    """Object of which this rank sends some parts, see `Writer`. Threads may write concurrently, each a part of its own.

    Args:
        store: Bucket.
        path: Path of the object.
        upload: Name of the upload; None: the object has one part, and is sent in one request.
        parts: Division of the object into parts.
    """

    def __init__(self, store: S3Store, path: str, upload: str | None, parts: UploadParts) -> None:
        self._store, self._path, self._upload, self._parts = store, path, upload, parts
        self._begun: dict[int, io.BytesIO] = {}
        self._lock = threading.Lock()

    def write_at(self, begin: int, view: memoryview) -> None:
        """Append data to a part, and send the part when it is complete."""
        number, first, end = self._parts.place(begin)
        with self._lock:
            data = self._begun.setdefault(number, io.BytesIO())
        if begin != first + data.tell() or begin + len(view) > end:
            raise ValueError(f"{self._path} is written part by part: bytes {begin} to {begin + len(view)} leave a gap")
        # Only one thread writes a part, so its buffer needs no lock, and threads send their parts concurrently.
        data.write(view)
        if begin + len(view) < end:
            return
        with self._lock:
            del self._begun[number]
        if self._upload is None:
            self._store.put(self._path, data.getvalue())  # which copies nothing
        else:
            self._store.send(self._path, self._upload, number, data.getvalue())

    def finish(self) -> None:
        """Check that no part is incomplete."""
        if self._begun:
            raise RuntimeError(f"{self._path}: parts {sorted(self._begun)} are half written; a bug of par-checkpoint")

    def abort(self) -> None:
        """Drop unsent data."""
        self._begun.clear()


def client_options(scheme: str) -> dict[str, Any]:
    """Return the options of s3fs in addition to the user's fsspec configuration: as many connections as are used.

    botocore keeps 10 connections by default, and further requests wait.

    Args:
        scheme: Scheme of a URL.
    """
    if scheme not in ("s3", "s3a"):
        return {}
    wanted = conf.get(scheme, {}).get("config_kwargs", {})
    return {"config_kwargs": {"max_pool_connections": IN_FLIGHT, **wanted}}


async def _read_all(body: Any, size: int) -> bytes:
    data = bytearray(size)
    came = await _fill(body, memoryview(data))
    # A store may end an answer early without an error. `persist` repeats the request after this one.
    if came < size:
        raise ConnectionError(f"{came} of {size} bytes came")
    return bytes(data)


async def _fill(body: Any, view: memoryview) -> int:
    """Fill a view with the next bytes, and return their number."""
    done = 0
    while done < len(view):
        chunk = await body.read(min(len(view) - done, _CHUNK))
        if not chunk:
            break
        view[done : done + len(chunk)] = chunk
        done += len(chunk)
    return done


def _split(path: str) -> tuple[str, str]:
    """Split a path into bucket and key."""
    bucket, _, key = path.partition("/")
    return bucket, key


def _code(error: BaseException) -> str:
    """Return the code of an S3 error."""
    # s3fs translates the errors of botocore, and keeps those as their causes.
    response = getattr(error.__cause__, "response", None) or getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", type(error).__name__))
