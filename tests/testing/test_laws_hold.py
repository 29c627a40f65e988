"""The laws that users are given hold for drawn models and losses: for all statistics at once, in every form."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc.testing import laws, strategies
from invfunc.testing.laws.rows import FACTORS, ROWS
from invfunc.testing.models import FAMILIES

OF_FUNCTIONS = [name for name, law in laws.LAWS.items() if "a function" in law.subjects]
FORMS = {
    "a model and its loss": lambda of: (of.args, of.options),
    "a loss function": lambda of: ((of.f, of.model.params, *of.batch), {"in_dims": of.in_dims}),
    "a model": lambda of: (of.args[:-1], {"in_dims": of.in_dims[0]}),
}
COMPUTED = ["derived", "recurrent"]
"""Families that have no K-factors: weights are computed from parameters."""
OF_FACTORS = "K-factors of one sample are its block"


def quick(names):
    """The cheap and telling ones come first."""
    return [pytest.param(name, marks=pytest.mark.quick) for name in names]


def some(model):
    """A loss that the outputs of the model take."""
    losses = strategies.losses(["mse_loss", "bce", "log cosh of outputs"] if model.family == "sequence" else None)
    return st.builds(strategies.Problem, st.just(model), losses)


def may_be_refused(of, problem):
    """Not every model has K-factors."""
    row = ROWS.get(of.split(" over ")[0].split(", ")[0].removesuffix(" of the model"))
    factors = of.startswith(("K-factors", "kfac of params")) if row is None else row.gives == FACTORS
    return of.startswith("kfra") or (factors and problem.model.family in COMPUTED)


@pytest.mark.parametrize("law", [*quick(OF_FUNCTIONS[:6]), *OF_FUNCTIONS[6:]])
@given(st.data())
@settings(max_examples=4)
def test_of_functions(law, dtype, device, data):
    families = [name for name in FAMILIES if law != OF_FACTORS or name not in COMPUTED]
    problems = strategies.models(families, in_dims=(0, 1), dtype=dtype, device=str(device)).flatmap(some)
    problem, form = data.draw(problems), data.draw(st.sampled_from([*FORMS]))
    args, options = FORMS[form](problem)
    table = laws.check(*args, **options, only=law, seconds=300)
    (outcome,) = table.outcomes
    assert outcome.tried or outcome.why_not or outcome.inapplicable, table
    assert not outcome.left and all(may_be_refused(of, problem) for of in outcome.refused), table


@pytest.mark.parametrize("law", [name for name, law in laws.LAWS.items() if "a pair" in law.subjects])
@given(st.data())
@settings(max_examples=5)
def test_of_pairs(law, dtype, device, data):
    of = data.draw(strategies.pairs(dtype=dtype, device=str(device)))
    table = laws.check_pair(of.pair, of.x, *of.args, only=law, seconds=300)
    assert table.outcomes[0].state in ("holds", "does not apply") and not table.refused, table
