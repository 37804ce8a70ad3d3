"""A bucket of a local S3 server, whose requests a test counts, delays and refuses."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from dpgcl_core.object_store import _store, can_write

Answer = Callable[[str, str], str | None]


@dataclass
class Requests:
    """The requests since the last `clear`.

    Attributes:
      lines: method, path with query, and range of each.
      most_in_flight: the most at one moment.
      delay_seconds: how long each waits.
      answer: returns the status to refuse a request with, by method and path.
      lost: returns the status to answer with after the request was carried out.
    """

    lines: list[tuple[str, str, str]] = field(default_factory=list)
    most_in_flight: int = 0
    delay_seconds: float = 0.0
    answer: Answer = lambda method, path: None
    lost: Answer = lambda method, path: None
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reading(self) -> list[tuple[str, str, str]]:
        """Return those that read objects' contents."""
        return [line for line in self.lines if line[0] == "GET" and "list-type" not in line[1]]

    def num_bytes(self) -> int:
        """Return the bytes that ranges of objects asked for."""
        ranges = (line[2].removeprefix("bytes=").split("-") for line in self.reading())
        return sum(int(last) - int(first) + 1 for first, last in ranges)

    def clear(self) -> None:
        self.lines, self.most_in_flight = [], 0

    def serve(self, application: Any, environ: dict[str, Any], start: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self.lines.append((method, f"{path}?{environ['QUERY_STRING']}", environ.get("HTTP_RANGE", "")))
        try:
            time.sleep(self.delay_seconds)
            status = self.answer(method, path)
            if status is not None:
                start(status, [("Content-Length", "0")])
                return [b""]
            if (status := self.lost(method, path)) is None:
                return list(application(environ, start))
            list(application(environ, lambda *_: None))
            start(status, [("Content-Length", "0")])
            return [b""]
        finally:
            with self._lock:
                self._in_flight -= 1


@dataclass(frozen=True)
class Bucket:
    """A new, empty bucket: its address, a client of it, and the server's requests."""

    name: str
    client: Any
    requests: Requests

    @property
    def address(self) -> str:
        return f"s3://{self.name}"

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def get(self, key: str) -> bytes:
        content: bytes = self.client.get_object(Bucket=self.name, Key=key)["Body"].read()
        return content

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def list_keys(self) -> list[str]:
        listed = self.client.list_objects_v2(Bucket=self.name)
        return [entry["Key"] for entry in listed.get("Contents", ())]

    def upload(self, folder: Path, key: str = "data") -> str:
        """Put all files below a folder, and return the address of the copy."""
        for file in folder.rglob("*"):
            if file.is_file():
                self.put(f"{key}/{file.relative_to(folder)}", file.read_bytes())
        return f"{self.address}/{key}"


@cache
def _server() -> tuple[str, Requests]:
    """Start the server, which lives as long as the process."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    requests, application = Requests(), DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, lambda e, s: requests.serve(application, e, s), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}", requests


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty bucket, found by the environment; the server answers again when the test is over."""
    url, requests = _server()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-key")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    made = Bucket(f"team-{secrets.token_hex(6)}", boto3.client("s3", region_name="us-east-1"), requests)
    made.client.create_bucket(Bucket=made.name)
    requests.clear()
    yield made
    requests.answer = requests.lost = lambda method, path: None
    requests.delay_seconds = 0.0
    _store.cache_clear()
    can_write.cache_clear()
