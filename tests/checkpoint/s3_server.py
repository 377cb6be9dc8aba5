"""An S3 server for tests: SeaweedFS in a process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

from obstore.exceptions import BaseError
from obstore.store import S3Store

from forged.checkpoint.storage.objects import ObjectStorage
from forged.demo.parent_death import command

ACCESS_KEY, SECRET_KEY = "AKIAFORGED", "not-a-secret"
STARTS_WITHIN_S = 60.0
LOOK_S = 0.05
READY = "ready"
SOCKETS = Path("/tmp")
"""The server makes some sockets here, against its options."""
PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)


class S3Server:
    """`weed server -s3` in a directory; killed at the end of the block, or with the process that has started it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._buckets = self._folders = 0
        self.ports: dict[str, int] = {}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports['s3.port']}"

    def start(self) -> None:
        """Start it on free ports; try again if another process takes one of them meanwhile."""
        ends_at = time.monotonic() + STARTS_WITHIN_S
        self.ports = self.ports or _free_ports()
        while not self._has_started(ends_at):
            assert time.monotonic() < ends_at, self._log.read_text()[-2_000:]
            self.ports = _free_ports()

    def kill(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
        for name, port in self.ports.items():
            if name.endswith(".grpc"):
                (SOCKETS / f"seaweedfs-{name.removesuffix('.port.grpc')}-grpc-{port}.sock").unlink(missing_ok=True)

    def bucket(self) -> str:
        """Make a bucket."""
        self._buckets += 1
        name = f"bucket-{self._buckets}"
        self._make(name)
        return name

    def folder(self) -> ObjectStorage:
        """A storage in a new folder of an existing bucket."""
        self._folders += 1
        prefix = f"folders/{self._folders}"
        return ObjectStorage(self.store(READY, prefix=prefix), f"s3://{READY}/{prefix}")

    def unfinished_uploads(self, bucket: str) -> list[str]:
        """The multipart uploads that are neither complete nor aborted."""
        try:
            output_log = json.loads(self._ask_filer(f"/buckets/{bucket}/.uploads/?limit=1000", "GET"))
        except urllib.error.HTTPError as error:
            error.close()
            return []
        return [entry["FullPath"] for entry in output_log["Entries"] or []]

    def store(
        self, bucket: str, *, prefix: str = "", endpoint: str = "", secret: str = SECRET_KEY, retries: int = 2
    ) -> S3Store:
        """Obstore's store for a bucket."""
        return S3Store(
            bucket,
            prefix=prefix or None,
            endpoint=endpoint or self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=secret,
            client_options={"allow_http": True, "timeout": "60s"},
            retry_config={"max_retries": retries},
        )

    def storage(
        self, bucket: str = "", *, endpoint: str = "", secret: str = SECRET_KEY, retries: int = 2
    ) -> ObjectStorage:
        """A storage in a bucket, by default in a new one."""
        bucket = bucket or self.bucket()
        return ObjectStorage(self.store(bucket, endpoint=endpoint, secret=secret, retries=retries), f"s3://{bucket}")

    def settings(self, bucket: str) -> dict[str, str]:
        """The connection settings of a bucket."""
        return {
            "bucket": bucket,
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }

    def environment(self) -> dict[str, str]:
        """Environment variables for this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    @property
    def _log(self) -> Path:
        return self._directory / "log"

    def _has_started(self, ends_at: float) -> bool:
        (self._directory / "data").mkdir(exist_ok=True)
        credentials = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        (self._directory / "s3.json").write_text(
            json.dumps({"identities": [{"name": "forged", "credentials": [credentials], "actions": rights}]})
        )
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command(os.getpid(), self._arguments()), stdout=log, stderr=log, cwd=self._directory
            )
        while self.process.poll() is None and time.monotonic() < ends_at:
            if self._answers():
                return True
            time.sleep(LOOK_S)
        self.kill()
        return False

    def _arguments(self) -> list[str]:
        here = self._directory
        return [
            str(Path(sys.executable).parent / "weed"),
            f"-logdir={here}",
            "server",
            "-s3",
            "-filer",
            f"-dir={here}/data",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{name}={port}" for name, port in self.ports.items()),
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={here}/s3.json",
            "-s3.autoCreateBucket=false",
            f"-s3.localSocket={here}/s3.sock",
            f"-filer.localSocket={here}/filer.sock",
            "-master.telemetry=false",
            "-master.electionTimeout=1s",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=1000",
        ]

    def _answers(self) -> bool:
        """Whether a bucket can be made and written to."""
        try:
            self._make(READY)
            self.store(READY, retries=0).put("is", b"yes")
        except (OSError, BaseError):
            return False
        return True

    def _make(self, bucket: str) -> None:
        try:
            self._ask_filer(f"/buckets/{bucket}/", "POST")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != HTTPStatus.CONFLICT:
                raise

    def _ask_filer(self, path: str, method: str) -> bytes:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports['filer.port']}{path}",
            method=method,
            headers={"Accept": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            output_log: bytes = answer.read()
            return output_log


def _free_ports() -> dict[str, int]:
    """Different ones, by holding all of them until each is known."""
    held = [socket.socket() for _ in PORTS]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return {name: one.getsockname()[1] for name, one in zip(PORTS, held, strict=True)}
    finally:
        for one in held:
            one.close()
