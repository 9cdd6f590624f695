"""Where members train: on this machine, a process each, and how far they are."""
