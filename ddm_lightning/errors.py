"""The one exception that a user's mistake raises."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: a config, shard, checkpoint, artifact or prompt that cannot be used.

    The message is one line that names the file, the key and the remedy. The command line prints it
    after ``error:`` and exits with 2; nothing is written before it is raised.
    """
