"""Command line: one thin function per command, apart by what they import.

- ``parser``: words and their help; ``run``: finds a command's function
- ``commands``, ``sampling``, ``islands``, ``status``, ``init``: commands that train, sample, plan, only look, begin
"""
