"""File systems of fsspec for S3 and SFTP that survive a fork and give up on a silent server; see ``core.remote``."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import boto3
import paramiko
from boto3.s3.transfer import TransferConfig
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError
from fsspec import AbstractFileSystem
from fsspec.implementations import sftp

_BLOCK_BYTES = 1 << 18
_MAX_CONNECTIONS = 32


class S3FileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no annotations
    """Objects of S3, and of stores with its protocol, by boto3: s3fs excludes releases of it that Streaming may bring.

    boto3 finds credentials, region and endpoint; ``S3_ENDPOINT_URL`` can name an endpoint. Without
    credentials, requests are not signed.

    Args:
        timeout: seconds without data after which a request fails.
    """

    protocol = "s3"

    def __init__(self, timeout: float) -> None:
        super().__init__(timeout=timeout)
        self._client = _client(os.getpid(), timeout, os.environ.get("S3_ENDPOINT_URL"))

    @classmethod
    def clear_instance_cache(cls) -> None:
        super().clear_instance_cache()
        _client.cache_clear()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        bucket, key = _split(path)
        if key:
            with suppress(FileNotFoundError), _missing(path):
                found = self._client.head_object(Bucket=bucket, Key=key)
                return _file(path, found["ContentLength"], found)

        self.ls(path)
        return _folder(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        bucket, slash, key = path.partition("/")
        pages = self._client.get_paginator("list_objects_v2")
        found: list[dict[str, Any]] = []
        with _missing(path):
            for page in pages.paginate(Bucket=bucket, Prefix=key + slash, Delimiter="/"):
                for folder in page.get("CommonPrefixes", ()):
                    found.append(_folder(f"{bucket}/{folder['Prefix'][:-1]}"))

                for entry in page.get("Contents", ()):
                    found.append(_file(f"{bucket}/{entry['Key']}", entry["Size"], entry))

        if not found:
            raise FileNotFoundError(path)
        if detail:
            return found

        return [entry["name"] for entry in found]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        bucket, key = _split(path)
        part = {}
        if start is not None:
            assert end is not None  # a file of fsspec gives both
            part["Range"] = f"bytes={start}-{end - 1}"

        with _missing(path):
            return self._client.get_object(Bucket=bucket, Key=key, **part)["Body"].read()

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        # In one request: boto3's own asks for the size first, and its parts of 8 MB would follow one another.
        bucket, key = _split(rpath)
        with _missing(rpath):
            body = self._client.get_object(Bucket=bucket, Key=key)["Body"]

        with closing(body), Path(lpath).open("wb") as file:
            file.writelines(body.iter_chunks(_BLOCK_BYTES))

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self._client.upload_file(lpath, *_split(rpath), Config=TransferConfig(use_threads=False))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        bucket, key = _split(path)
        condition = {"IfNoneMatch": "*"} if mode == "create" else {}
        try:
            self._client.put_object(Bucket=bucket, Key=key, Body=value, **condition)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("PreconditionFailed", "ConditionalRequestConflict"):
                raise FileExistsError(path) from error

            raise

    def rm_file(self, path: str) -> None:
        bucket, key = _split(path)
        self._client.delete_object(Bucket=bucket, Key=key)


@lru_cache(maxsize=1)
def _client(_process: int, timeout: float, endpoint: str | None) -> Any:
    """Make the client of all threads of a process: one costs a tenth of a second of CPU time."""
    session = boto3.Session()
    config = Config(
        connect_timeout=timeout,
        read_timeout=timeout,
        retries={"mode": "adaptive"},
        max_pool_connections=_MAX_CONNECTIONS,
    )
    if session.get_credentials() is None:
        config = config.merge(Config(signature_version=UNSIGNED))

    return session.client("s3", config=config, endpoint_url=endpoint)


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = path.partition("/")
    return bucket, key


def _folder(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _file(path: str, size: int, found: dict[str, Any]) -> dict[str, Any]:
    return {"name": path, "size": size, "type": "file", "ETag": found.get("ETag")}


@contextmanager
def _missing(path: str) -> Iterator[None]:
    """Turn the error for a missing object into ``FileNotFoundError``."""
    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NoSuchBucket"):
            raise FileNotFoundError(path) from error

        raise


class SFTPFileSystem(sftp.SFTPFileSystem):  # type: ignore[misc]
    """SFTP with known hosts and a time limit; fsspec's own trusts any host and waits for ever.

    Host keys are those of ``~/.ssh/known_hosts`` or of the file named by ``COMPOSER_SFTP_KNOWN_HOSTS_FILE``; the login
    key is the agent's, one in ``~/.ssh``, or in the file named by ``COMPOSER_SFTP_KEY_FILE``. ``~/.ssh/config`` may
    give the host's address, port, user and key.

    Args:
        host: name, address or alias.
        timeout: seconds without data after which a transfer fails.
        login: port, user name and password; None where they are not given.
    """

    protocol = "sftp"

    def __init__(self, host: str, timeout: float, **login: Any) -> None:
        AbstractFileSystem.__init__(self, host=host, timeout=timeout, **login)  # not fsspec's own, which connects
        known: Mapping[str, Any] = {}
        with suppress(OSError, ImportError, paramiko.SSHException):  # no file, or more than paramiko reads
            known = paramiko.SSHConfig.from_path(Path("~/.ssh/config").expanduser()).lookup(host)

        keys = [*filter(os.path.exists, known.get("identityfile", ()))]
        self.client = paramiko.SSHClient()
        try:
            self.client.load_system_host_keys(os.environ.get("COMPOSER_SFTP_KNOWN_HOSTS_FILE"))
            self.client.connect(
                known.get("hostname", host),
                login["port"] or int(known.get("port", 22)),
                login["username"] or known.get("user"),
                login["password"],
                key_filename=os.environ.get("COMPOSER_SFTP_KEY_FILE") or keys or None,
                timeout=timeout,
            )
        except FileNotFoundError as error:  # not of the file that is wanted
            raise ValueError(f"cannot log in: {error}") from error

        watch = threading.Timer(timeout, self.client.close)  # paramiko waits for ever for an answer to this request
        watch.start()
        try:
            self.ftp = self.client.open_sftp()
        finally:
            watch.cancel()

        self.ftp.get_channel().settimeout(timeout)

    def pipe_file(self, path: str, value: bytes, mode: str = "create", **_: Any) -> None:
        """Write a file unless it exists, whatever the ``mode``."""
        self.makedirs(self._parent(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.partial"
        with self.ftp.open(temporary, "wb") as file:
            file.write(value)

        try:
            self.ftp.rename(temporary, path)  # fails if the path exists
        except OSError as error:
            self.ftp.remove(temporary)
            if self.exists(path):
                raise FileExistsError(path) from error

            raise
