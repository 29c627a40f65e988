"""Random numbers, and tensors that are made anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc.operations.naming import argument
from invfunc.operations.operation import define, define_tagged
from invfunc.operations.pointwise import ENTRYWISE
from invfunc.operations.receptive_fields.step import elementwise


def _in_training(default: bool) -> Callable[[Callable, tuple, dict[str, Any]], bool]:
    """Whether a dropout draws: if its flag of training says so, or `default` where it is not given."""

    def draws(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
        flag = argument(func, args, kwargs, "training", argument(func, args, kwargs, "train", default))
        return bool(flag) and argument(func, args, kwargs, "p", 0.5) != 0

    return draws


_PIECEWISE = {"linear": "all", "piecewise": True, **ENTRYWISE}
define_tagged(torch.Tag.nondeterministic_seeded, draws=True)
define("random binomial standard_gamma sample_dirichlet gumbel_softmax", draws=True)
define("bernoulli", draws=True, **_PIECEWISE)
define("normal poisson", draws=True, receptive_field=elementwise)
define("dropout", draws=_in_training(True), **_PIECEWISE)
define("alpha_dropout", draws=_in_training(False), **_PIECEWISE)
define("dropout1d dropout2d dropout3d", draws=_in_training(True), **_PIECEWISE)
define("feature_dropout feature_alpha_dropout", draws=_in_training(False), **_PIECEWISE)
define("rrelu", draws=_in_training(False), **_PIECEWISE)
define("native_dropout", draws=True, receptive_field=elementwise)
define("rrelu_with_noise _fused_dropout", receptive_field=elementwise)
define(
    "uniform_ normal_ bernoulli_ exponential_ random_ cauchy_ geometric_ log_normal_",
    fills=True,
    receptive_field=elementwise,
)
define(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided new_zeros "
    "new_ones new_full",
    reads="none",
)
