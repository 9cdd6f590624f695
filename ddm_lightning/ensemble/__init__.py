"""Router and experts as one velocity field, built from artifacts alone.

- ``velocity``: the weighted sum of the experts' velocities
- ``routing``: generate samples; the interface of routing strategies; ``strategies`` has one file for each
- ``load``: from a run folder to an ensemble
"""

from ddm_lightning.ensemble.load import LoadedEnsemble, load_ensemble, load_single
from ddm_lightning.ensemble.routing import Batch, Strategy, sample
from ddm_lightning.ensemble.velocity import Ensemble

__all__ = ["Batch", "Ensemble", "LoadedEnsemble", "Strategy", "load_ensemble", "load_single", "sample"]
