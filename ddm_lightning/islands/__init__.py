"""Train members on this machine, show their progress, and assemble the ensemble."""
