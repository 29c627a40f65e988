"""Operations that draw random numbers: seen before they do, and replayed."""

from __future__ import annotations

from typing import Any

import torch

_ALWAYS = set(
    "rand randn randint randperm rand_like randn_like randint_like bernoulli normal uniform exponential cauchy "
    "log_normal geometric random multinomial poisson binomial standard_gamma sample_dirichlet gumbel_softmax".split()
)
_IN_TRAINING = set(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout rrelu "
    "native_dropout".split()
)
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


def draws(name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers."""
    if name in _ALWAYS:
        return True
    if name in _IN_TRAINING:
        flags = [a for a in (*args, kwargs.get("training", kwargs.get("train"))) if isinstance(a, bool)]
        default = name != "rrelu" and not name.startswith(("feature", "alpha"))
        if name in ("dropout", "dropout1d", "dropout2d", "dropout3d"):
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            if rate == 0:
                return False
        return flags[0] if flags else default
    if name.startswith("fractional_max_pool"):
        return (args[5] if len(args) > 5 else kwargs.get("_random_samples")) is None
    if name == "scaled_dot_product_attention":
        rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        return bool(rate)
    if name == "multi_head_attention_forward":
        return False  # it is opened
    return name in _RECURRENT and any(isinstance(a, float) and a > 0 for a in args)


def may_draw(name: str) -> bool:
    """Whether a call draws random numbers for some of its arguments."""
    composed = ("scaled_dot_product_attention", "multi_head_attention_forward")
    return name in _ALWAYS or name in _IN_TRAINING or name in _RECURRENT or name in composed


class Drew(BaseException):
    """Raised before a run on a part of the batch draws: the numbers of the whole batch are another sequence."""


class Draws:
    """What a run does about random numbers: stop before the first one, or remember the states before it."""

    def __init__(self, stop: bool) -> None:
        self.stop = stop
        self.before_first: dict[torch.Generator, torch.Tensor] = {}

    def before(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        if not draws(name, args, kwargs):
            return
        if self.stop:
            raise Drew
        generators = [torch.default_generator]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            generators += list(torch.cuda.default_generators)
        if isinstance(kwargs.get("generator"), torch.Generator):
            generators.append(kwargs["generator"])
        for g in generators:
            if g not in self.before_first:
                self.before_first[g] = g.get_state()

    @property
    def drew(self) -> bool:
        return bool(self.before_first)

    def rewind(self) -> dict[torch.Generator, torch.Tensor]:
        """Set the generators to where they were before the run; returns where they were after it."""
        after = {g: g.get_state() for g in self.before_first}
        restore(self.before_first)
        return after


def restore(states: dict[torch.Generator, torch.Tensor]) -> None:
    for generator, state in states.items():
        generator.set_state(state)
