"""Router and experts as one velocity field, built from artifacts alone.

- ``routing``: which experts a row is sent to
- ``ensemble``: the velocity, each expert evaluated on its rows only
- ``bayes``: sampling without a router
- ``sampler``: pictures by any strategy and solver
- ``load``: from a run folder to an ensemble
"""

from ddm_lightning.ensemble.bayes import BayesSamples, sample_bayes
from ddm_lightning.ensemble.load import LoadedEnsemble, LoadedMember, load_ensemble, load_member, load_single
from ddm_lightning.ensemble.routing import route
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Ensemble

__all__ = [
    "BayesSamples",
    "Ensemble",
    "LoadedEnsemble",
    "LoadedMember",
    "load_ensemble",
    "load_member",
    "load_single",
    "route",
    "sample",
    "sample_bayes",
]
