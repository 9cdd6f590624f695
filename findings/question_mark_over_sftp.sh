#!/usr/bin/env bash
# fsspec over SFTP: a name with a question mark is cut there, and another file is written.
#
# One would expect  a path of a file system to be a path: "?" and "#" are ordinary characters in names on a server, and the
#                   local, memory and S3 file systems of fsspec keep them.
# What happens      the SFTP file system parses its paths as URLs and drops the query: "why?.txt" becomes "why", so two files
#                   "why?.txt" and "why?.json" are one, and an existing "why" is overwritten. A "#" is kept.
# Seen              2026-11-27, fsspec 2026.6.0, paramiko 3.5.1, an asyncssh 2.24.1 server on loopback, Python 3.11:
#                     written: why?.txt a#b.txt
#                     on the server: a#b.txt why
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet fsspec==2026.6.0 paramiko==3.5.1 asyncssh==2.24.1
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
import asyncio
import os
import pathlib
import threading

import asyncssh
import fsspec

root = pathlib.Path("served")
root.mkdir()


class Server(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return False  # on loopback, for this script: no password


async def serve() -> None:
    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.listen(
        "127.0.0.1",
        0,
        server_factory=Server,
        server_host_keys=[key],
        sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=str(root)),
    )
    ports.append(server.sockets[0].getsockname()[1])
    ready.set()
    await server.wait_closed()


ports: list[int] = []
ready = threading.Event()
threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
ready.wait(30)

written = ["why?.txt", "a#b.txt"]
files = fsspec.filesystem("sftp", host="127.0.0.1", port=ports[0], username="me", password="unused")
for name in written:
    with files.open(f"sftp://127.0.0.1/{name}", "wb") as file:
        file.write(b"bytes")
there = sorted(os.listdir(root))
print("written:", *written)
print("on the server:", *there, flush=True)
assert there == ["a#b.txt", "why"]
os._exit(0)  # paramiko's and the server's threads would wait for each other
PY
