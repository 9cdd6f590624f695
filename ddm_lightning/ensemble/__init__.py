"""Router and experts as one velocity field, built from artifacts alone.

- ``manifest``: which artifacts make an ensemble; ``changes``: how its experts change
- ``velocity``: loads them; the weighted sum of the experts' velocities
- ``routing``: generate samples; the interface of routing strategies, which are in ``strategies``
"""
