"""The mathematics in pure torch; nothing here knows Lightning, files, networks or images.

Everywhere t = 0 is data and t = 1 is noise: ``x_t = (1-t)·x_0 + t·noise``, velocity ``noise - x_0``.

- ``spec``: what artifacts record, without torch
- ``condition``: conditions of a velocity field, with a learned null for rows without one
- ``path``: paths from data to noise; the velocity from any prediction; guidance and loss weights
- ``timesteps``, ``randomness``: densities of t, grids of t, reproducible noise
- ``solvers``: from noise to data, by an ODE or an ancestral chain, found by name
"""
