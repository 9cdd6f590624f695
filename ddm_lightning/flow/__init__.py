"""The mathematics, in pure torch: nothing here knows Lightning, files, networks or images.

Everywhere t = 0 is data and t = 1 is noise: ``x_t = (1-t)·x_0 + t·noise``, velocity ``noise - x_0``.

- ``condition``: what a field is conditioned on, with a learned null for rows without one
- ``path``, ``prediction``: the linear path; any prediction turned into its velocity
- ``timesteps``, ``randomness``: densities of t, grids of t, reproducible streams of noise
- ``field``, ``guidance``, ``solvers``: velocity fields and ways from noise to data
- ``oracle``: closed-form velocity and cluster posterior of a finite data set
"""
