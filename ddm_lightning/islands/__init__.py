"""Train members on this machine and show their progress."""
