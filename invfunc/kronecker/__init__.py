"""The `Kronecker` of a parameter, and what is done with those of a whole tree: `kfac(f, loss)(params, *batch)`.

`kfoc` and `kfra` are further transforms that give factors, beside `invfunc.kfac` and `invfunc.ekfac`. `solve`, `logdet`
and `eigen` are those of the block-diagonal matrix over all parameters; `merge` and `ema` join the factors of several
batches. `LowRank` is a covariance of all parameters at once, of low rank. `torch.load` takes all of these with its
default settings, once invfunc is imported.
"""

import torch

from invfunc.kronecker.matrix import Joint, Kronecker, LowRank, Origin, Whole
from invfunc.kronecker.trees import eigen, ema, log_evidence, logdet, merge, solve
from invfunc.statistics.factors import kfoc, kfra

torch.serialization.add_safe_globals([Joint, Kronecker, LowRank, Origin])  # they hold tensors, numbers and names only

__all__ = [
    "Joint",
    "Kronecker",
    "LowRank",
    "Origin",
    "Whole",
    "eigen",
    "ema",
    "kfoc",
    "kfra",
    "log_evidence",
    "logdet",
    "merge",
    "solve",
]
