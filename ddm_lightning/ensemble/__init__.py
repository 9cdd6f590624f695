"""Router and experts as one velocity field, built from artifacts alone.

- ``velocity``: the weighted sum of the experts' velocities
- ``routing``: generate samples; the interface of routing strategies; ``strategies`` has one file for each
- ``load``: from a run folder to an ensemble
"""
