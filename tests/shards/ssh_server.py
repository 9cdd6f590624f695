"""An SSH server on loopback for one user and key: files over SFTP, and commands.

python ssh_server.py PORT HOST_KEY AUTHORIZED_KEYS
"""

import asyncio
import sys
from pathlib import Path

import asyncssh


async def run(process):
    shell = await asyncio.create_subprocess_shell(
        process.command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=Path.home(),
    )
    out, err = await shell.communicate()
    process.stdout.write(b"Welcome\n" + out)  # as many a shell's start-up does
    process.stderr.write(err)
    process.exit(shell.returncode)


async def serve(port, host_key, authorized_keys):
    await asyncssh.listen(
        "127.0.0.1",
        int(port),
        server_host_keys=[host_key],
        authorized_client_keys=authorized_keys,
        process_factory=run,
        sftp_factory=True,
        encoding=None,
    )
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
