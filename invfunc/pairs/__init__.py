"""Functions with their inverses, as values: more ways to make them than `invfunc` has, and checks of them.

Steps of dynamics: `momentum`, `leapfrog`, `reversible_step` of a solver such as `runge_kutta`, `bdia`; towards a fixed
point `fixed_point`, `equilibrium`. Flows that leave at each scale: `multiscale`. Functions whose state is not their
first argument: `state_first`; modules with an inverse: `from_module`. Training that runs backwards: `reversible_sgd`,
`reversible_adam`. Steps without rounding: on a `Grid`. Errors of inverses in depth: `drift`. States that stay in
memory: `held_states`.
"""

from invfunc.blocks.held import held_states
from invfunc.invertible.chain import Equilibrium, equilibrium, multiscale
from invfunc.invertible.checks import drift
from invfunc.pairs.couplings import from_module
from invfunc.pairs.exact import Grid, reversible_adam, reversible_sgd
from invfunc.pairs.pair import state_first
from invfunc.pairs.steps import bdia, fixed_point, leapfrog, momentum, reversible_step, runge_kutta

__all__ = [
    "Equilibrium",
    "Grid",
    "bdia",
    "drift",
    "equilibrium",
    "fixed_point",
    "from_module",
    "held_states",
    "leapfrog",
    "momentum",
    "multiscale",
    "reversible_adam",
    "reversible_sgd",
    "reversible_step",
    "runge_kutta",
    "state_first",
]
