"""Transforms of normflows, FrEIA and zuko as pairs: inverses, log-determinants and gradients as the library's own."""

import torch

from invfunc import chain, functional, invert
from invfunc import with_log_det as carrying
from invfunc.pairs import from_module
from tests.clients.client import Outcome, assert_near
from tests.strategies import Numbers


def twice(row, pair):
    return pair(pair(row[None]))[0]


def check(library: str) -> Outcome:
    """Modules of a library that the tests of `from_module` know, alone and as a chain of two."""
    from tests.pairs.test_from_module import MODULES, made

    outcome = Outcome()
    for name in MODULES:
        if not name.startswith(library):
            continue
        module, x = made(name), Numbers()(3, 4)
        pair, params = from_module(module), functional(module)[1]
        y, total = carrying(chain(pair, pair))((x, torch.zeros(3).double()), [params, params])
        jacobians = [torch.func.jacrev(twice)(row, pair) for row in x]
        assert_near({"log_det": total}, {"log_det": torch.stack(jacobians).slogdet().logabsdet})
        assert_near({"x": invert(chain(pair, pair))(y, [params, params])}, {"x": x})
        outcome.works.append(name.removeprefix(library).strip())
    return outcome
