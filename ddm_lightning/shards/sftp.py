"""Downloads by SFTP that end, also when the server falls silent."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from streaming.base.storage.download import SFTPDownloader


class PatientSFTPDownloader(SFTPDownloader):
    """Streaming's downloader, which waits for a silent server for ever, with a limit.

    Host keys are checked against ``~/.ssh/known_hosts`` or the file named by ``COMPOSER_SFTP_KNOWN_HOSTS_FILE``;
    the key comes from the agent, ``~/.ssh`` or the file named by ``COMPOSER_SFTP_KEY_FILE``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def _download_file_impl(self, remote: str, local: str, timeout: float) -> None:
        """Fetch ``remote``, whole or not at all.

        Raises:
            OSError: the connection broke, or nothing came for ``timeout`` seconds.
        """
        url = urlsplit(remote)
        if self._ssh_client is None:
            self._create_ssh_client(url)
        assert self._ssh_client is not None
        partial = Path(f"{local}.tmp")
        try:
            with contextlib.closing(self._ssh_client.open_sftp()) as client:
                client.get_channel().settimeout(timeout)
                client.get(remotepath=unquote(url.path), localpath=str(partial))
        except EOFError as error:  # which paramiko raises without a word
            raise ConnectionError(f"{url.hostname}: the connection was closed") from error
        except TimeoutError as error:
            raise TimeoutError(f"{url.hostname}: silent for {timeout:g} s") from error
        os.replace(partial, local)
