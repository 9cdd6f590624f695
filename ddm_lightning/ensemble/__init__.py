"""Router and experts as one velocity field, built from artifacts alone.

- ``manifest``: which artifacts make an ensemble; ``changes``: how its experts change
- ``velocity``: the weighted sum of the experts' velocities; ``load``: the networks of a manifest
- ``routing``: the interface of routing strategies, which are in ``strategies``; ``sampler``: generate samples
"""
