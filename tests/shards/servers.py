"""Real servers on loopback, and a connection to them that can be cut or fall silent."""

import asyncio
import getpass
import logging
import socket
import struct
import threading
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

_RESET = struct.pack("ii", 1, 0)


class Line:
    """A TCP port that passes all on to another one, until it is told otherwise.

    ``fail(num_bytes, times, silent, answer)``: the next ``times`` connections (None: all) end with a reset, or fall
    silent, once the server has sent ``num_bytes`` on them. With an ``answer``, what the client sends next gets these
    bytes and never reaches the server.
    """

    def __init__(self, port, address="127.0.0.1"):
        self._target = port
        self._listener = socket.create_server((address, 0))
        self.port = self._listener.getsockname()[1]
        self.num_failed = 0
        self.fail(0, times=0)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def fail(self, num_bytes, times=None, *, silent=False, answer=None):
        self._num_bytes = num_bytes
        self._silent = silent
        self._answer = answer
        self._left = float("inf") if times is None else times

    def close(self):
        self._closed.set()
        self._listener.close()

    def _accept(self):
        while not self._closed.is_set():
            with suppress(OSError), ExitStack() as closes:
                client, _ = self._listener.accept()
                closes.enter_context(client)  # if the target is down
                server = socket.create_connection(("127.0.0.1", self._target))
                closes.pop_all()
                threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source, sink, is_answer):
        num_sent = 0
        with suppress(OSError):
            while block := source.recv(1 << 12):
                num_sent += len(block)
                fails_here = is_answer == (self._answer is None)
                if fails_here and num_sent > self._num_bytes and self._takes_one():
                    if self._answer is not None:
                        source.sendall(self._answer)
                        source.shutdown(socket.SHUT_WR)
                        while source.recv(1 << 16):  # a reset would destroy the answer
                            pass
                        break
                    if self._silent:
                        self._closed.wait()
                    sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                    break
                sink.sendall(block)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _takes_one(self):
        with self._lock:
            if self._left <= 0:
                return False
            self._left -= 1
            self.num_failed += 1
            return True


@cache
def _moto():
    """Start moto in a thread of this process; its port."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or the server tells of each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    return server.get_host_and_port()[1]


@contextmanager
def s3(shards, tmp_path, monkeypatch):
    """moto's S3 with the folder ``shards`` in a bucket: its URL, and the line to it."""
    import boto3

    port = _moto()
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")).close()
    line = Line(port)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "anything",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # the package's own attempts are what is tested
        "S3_ENDPOINT_URL": f"http://127.0.0.1:{line.port}",
    }.items():
        monkeypatch.setenv(name, value)

    try:
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        client.create_bucket(Bucket="images")
        for path in shards.rglob("*.*"):
            client.upload_file(str(path), "images", f"run/{path.relative_to(shards)}")

        client.close()
        yield "s3://images/run", line
    finally:
        line.close()


async def _run(process):
    """Run a command of an SSH client, as a shell with a start-up that prints a line."""
    shell = await asyncio.create_subprocess_shell(
        process.command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path.home(),
    )
    out, err = await shell.communicate()
    process.stdout.write(b"Welcome\n" + out)
    process.stderr.write(err)
    process.exit(shell.returncode)


@cache
def _ssh():
    """Start an SSH server, for one key, in a thread of this process; its port, its key and the user's."""
    import asyncssh

    host, user = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))

    async def serve():
        server = await asyncssh.listen(
            "127.0.0.1",
            port=0,
            server_host_keys=[host],
            authorized_client_keys=asyncssh.import_authorized_keys(user.export_public_key().decode()),
            process_factory=_run,
            sftp_factory=True,
            encoding=None,
        )
        return server.get_port()

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(serve(), loop).result(), host, user


@contextmanager
def sftp(shards, tmp_path, monkeypatch):
    """An SSH server for the user who runs the tests: the URL of ``shards``, and the line to it."""
    port, host, user = _ssh()
    line = Line(port)
    user.write_private_key(tmp_path / "user")
    (tmp_path / "user").chmod(0o600)
    (tmp_path / "known").write_text(f"[127.0.0.1]:{line.port} {host.export_public_key().decode()}")
    monkeypatch.setenv("COMPOSER_SFTP_KEY_FILE", str(tmp_path / "user"))
    monkeypatch.setenv("COMPOSER_SFTP_KNOWN_HOSTS_FILE", str(tmp_path / "known"))
    yield f"sftp://{getpass.getuser()}@127.0.0.1:{line.port}{shards}", line
    line.close()
