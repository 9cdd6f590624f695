"""The command line: parser and one thin function per command."""
