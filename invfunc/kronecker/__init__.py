"""The `Kronecker` of a parameter, and what is done with those of a whole tree: `kfac(f, loss)(params, *batch)`.

`solve`, `logdet` and `eigen` are those of the block-diagonal matrix over all parameters; `merge` and `ema` join the
factors of several batches. `torch.load` takes them with its default settings, once invfunc is imported.
"""

import torch

from invfunc.kronecker.batches import ema, merge
from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.origin import Joint, Origin
from invfunc.kronecker.trees import eigen, logdet, solve
from invfunc.kronecker.whole import Whole
from invfunc.linear_algebra.low_rank import LowRank

torch.serialization.add_safe_globals([Joint, Kronecker, LowRank, Origin])  # they hold tensors, numbers and names only

__all__ = ["Joint", "Kronecker", "Origin", "Whole", "eigen", "ema", "logdet", "merge", "solve"]
