"""Command line: the parser, and one thin function per command."""
