"""The `Kronecker` of a parameter, and what is done with those of a whole tree: `kfac(f, loss)(params, *batch)`.

`kfoc` and `kfra` are further transforms that give factors, beside `invfunc.kfac` and `invfunc.ekfac`. `solve`, `logdet`
and `eigen` are those of the block-diagonal matrix over all parameters; `merge` and `ema` join the factors of several
batches. `LowRank` is a covariance of all parameters at once, of low rank. `torch.load` takes all of these with its
default settings, once invfunc is imported.
"""

import torch

from invfunc.kronecker.batches import ema, merge
from invfunc.kronecker.matrix import Kronecker, Whole
from invfunc.kronecker.origin import Joint, Origin
from invfunc.kronecker.trees import eigen, log_evidence, logdet, solve
from invfunc.linear_algebra.low_rank import LowRank
from invfunc.statistics.kfoc import kfoc
from invfunc.statistics.kfra import kfra

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
