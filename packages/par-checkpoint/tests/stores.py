"""A store of objects for tests: moto's S3 server in a process of its own, and before it a proxy that counts and breaks.

As a program (`python stores.py`) it is the server. A test asks the proxy for counts, and tells it what to break.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BUCKET = "bucket"


@dataclass
class Request:
    """What a client has asked for: S3's name of it, the path, bytes of the two bodies, and the answer's status."""

    kind: str
    path: str
    sent: int = 0
    received: int = 0
    status: int = 0


@dataclass
class Faults:
    """What the proxy does beside passing requests on.

    Args:
        fail: Of each kind of request: how many of the next ones are answered with 500, without being passed on.
        cut: How many of the next ranges that are asked for break off in the middle.
        short: How many of the next ranges are answered with fewer bytes than were asked for, as if that were all.
        slow: Seconds that every body takes.
        refuse: Kinds of requests that the store does not know: answered with 501.
        die_before: Number of the request, from 1 on, whose client is killed in place of an answer; it is not passed on.
        die_after: The same, but it is passed on.
        pace: Bytes a second that one request's body takes; 0: as fast as it goes.
        forbid: Whether all requests are answered with 403.
        seen: Called with each request before it is passed on.
    """

    fail: dict = field(default_factory=dict)
    cut: int = 0
    short: int = 0
    slow: float = 0.0
    refuse: tuple = ()
    die_before: int = 0
    die_after: int = 0
    pace: float = 0.0
    forbid: bool = False
    seen: object = None


def kind_of(method, path, headers):
    """S3's name of a request."""
    url = urllib.parse.urlsplit(path)
    query = urllib.parse.parse_qs(url.query, keep_blank_values=True)
    is_key = "/" in url.path.strip("/")
    if method == "POST":
        if "uploads" in query:
            return "CreateMultipartUpload"
        return "CompleteMultipartUpload" if "uploadId" in query else "DeleteObjects"
    if method == "PUT":
        if "x-amz-copy-source" in headers:
            return "CopyObject"
        return "UploadPart" if "partNumber" in query else "PutObject" if is_key else "CreateBucket"
    if method == "DELETE":
        return "AbortMultipartUpload" if "uploadId" in query else "DeleteObject"
    if method == "HEAD":
        return "HeadObject" if is_key else "HeadBucket"
    if "uploads" in query:
        return "ListMultipartUploads"
    if "uploadId" in query:
        return "ListParts"
    return "GetObject" if is_key else "ListObjectsV2"


class Proxy:
    """Passes requests on to the server. Thread-safe; `requests` has them all, in the order in which they came."""

    def __init__(self, port):
        self.requests, self.faults, self.lock = [], Faults(), threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_one(self):
                proxy.serve(self, port)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.dead = False

    def serve(self, handler, port):
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        if handler.headers.get("Transfer-Encoding") == "chunked":
            body = unchunked(handler.rfile)
        request = Request(kind_of(handler.command, handler.path, handler.headers), handler.path, sent=len(body))
        with self.lock:
            self.requests.append(request)
            number, faults = len(self.requests), self.faults
            dies = self.dead or number in (faults.die_before, faults.die_after)
            passed_on = not self.dead and number != faults.die_before
            self.dead = dies
            failed = faults.fail.get(request.kind, 0) > 0
            if failed:
                faults.fail[request.kind] -= 1
            is_range = request.kind == "GetObject" and "Range" in handler.headers
            cut = is_range and faults.cut > 0
            short = is_range and not cut and faults.short > 0
            faults.cut -= cut
            faults.short -= short
        if passed_on and not dies and failed:
            request.status = 500
            answer(handler, 500, error_body("InternalError", "injected"))
            return
        if faults.forbid and not dies:
            request.status = 403
            answer(handler, 403, error_body("InvalidAccessKeyId", "The key does not exist"))
            return
        if faults.seen is not None:
            faults.seen(request)
        if request.kind in faults.refuse:
            request.status = 501
            answer(handler, 501, error_body("NotImplemented", "A header implies what is not implemented"))
            return
        if passed_on:
            connection = HTTPConnection("127.0.0.1", port, timeout=240)
            headers = {name: value for name, value in handler.headers.items() if name.lower() != "transfer-encoding"}
            connection.request(handler.command, handler.path, body, headers)
            response = connection.getresponse()
            data = response.read()
            connection.close()
        if dies:
            handler.close_connection = True
            handler.connection.close()
            return
        time.sleep(faults.slow + ((len(body) + len(data)) / faults.pace if faults.pace else 0))
        if short:
            data = data[: len(data) // 2]
        request.status, request.received = response.status, len(data)
        handler.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                handler.send_header(name, value)
        size = response.getheader("Content-Length") if handler.command == "HEAD" else len(data)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
        if handler.command != "HEAD":
            with contextlib.suppress(ConnectionError):
                handler.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)

    def start(self, **faults):
        """Forgets what was counted, and breaks what is told from now on."""
        with self.lock:
            self.requests, self.faults, self.dead = [], Faults(**faults), False

    def count(self):
        """The number of requests of each kind."""
        counts = {}
        for request in self.requests:
            counts[request.kind] = counts.get(request.kind, 0) + 1
        return counts

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def unchunked(stream):
    """A body that came in chunks, as it is."""
    data = b""
    while size := int(stream.readline().split(b";")[0], 16):
        data += stream.read(size)
        stream.readline()
    while stream.readline().strip():
        pass
    return data


def error_body(code, message):
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()


def answer(handler, status, body):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.send_header("Content-Type", "application/xml")
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


class Server:
    """moto in a process of its own."""

    def __init__(self):
        # S3 refuses parts under 5 MiB, which are the same to the code under test, and slow to send.
        small = {"S3_UPLOAD_PART_MIN_SIZE": "1", "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(1 << 24)}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | small,
        )
        self.port = json.loads(self.process.stdout.readline())["port"]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def settings(url):
    """What a client's environment must say so that s3:// means this store."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "me",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@functools.cache  # making one takes a tenth of a second
def client(url):
    """A client that goes past the proxy."""
    import boto3

    keys = {"aws_access_key_id": "me", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=url, **keys)


def make_bucket(url):
    """Makes the bucket, empty."""
    made = client(url)
    made.create_bucket(Bucket=BUCKET)
    for upload in made.list_multipart_uploads(Bucket=BUCKET).get("Uploads", []):
        made.abort_multipart_upload(Bucket=BUCKET, Key=upload["Key"], UploadId=upload["UploadId"])
    while listed := made.list_objects_v2(Bucket=BUCKET).get("Contents"):
        made.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": each["Key"]} for each in listed]})


def has(url, path):
    """Whether there is an object of this name."""
    key = path.removeprefix(f"s3://{BUCKET}/")
    return any(
        each["Key"] == key for each in client(url).list_objects_v2(Bucket=BUCKET, Prefix=key).get("Contents", [])
    )


def serve():
    """The server: says its port when it listens, and ends with the process that started it."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    while not (port := server.get_host_and_port()[1]):
        time.sleep(0.01)
    parent = os.getppid()
    print(json.dumps({"port": port}), flush=True)
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    serve()
