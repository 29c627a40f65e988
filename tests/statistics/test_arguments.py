"""Options that all statistics share: each gives what the statistic of a function gives that is written for it."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import tree
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.compare import plain
from tests.rows import BOTH, FACTORS, LOSS, MODEL, ROWS
from tests.strategies import Numbers

EXACT = 1e-9
A, B = {"w": Numbers()(3, 4)}, [Numbers(1)(4, 2)]
X, Y = Numbers(2)(5, 3), Numbers(3).below(2, 5)
every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def model(a, x, b, scale=1.0):
    return (x @ a["w"] * scale).tanh() @ b[0]


def called(row, f, *args, **options):
    """A statistic of a model function with its cross entropy, in the form that says most, at arguments and a target."""
    *given, y = args
    kwargs = options.pop("kwargs", {})
    if row.form == MODEL:
        if "in_dims" in options:
            options["in_dims"] = options["in_dims"][:-1]
        return plain(row.make(f, **options)(*given, **kwargs))
    if row.form == BOTH:
        return plain(row.make(f, F.cross_entropy, **options)(*args, **kwargs))

    def loss(*args, **kwargs):
        *given, y = args
        z = f(*given, **kwargs)
        z, *aux = z if options.get("has_aux") else (z,)
        value = F.cross_entropy(z, y, reduction="none")
        return (value, *aux) if aux else value

    return plain(row.make(loss, **options)(*args, **kwargs))


@every
@pytest.mark.parametrize("argnums", [0, 2, -2, (0, 2), (2, 0), (0,)], ids=str)
def test_parameters_are_those_at_argnums(row, argnums):
    args, several = (A, X, B), isinstance(argnums, tuple)
    count = 4 if row.form == LOSS else 3
    numbers = [k % 4 for k in (argnums if several else (argnums,))]
    argnums = argnums if several or argnums >= 0 else numbers[0] - count
    fixed = [None if k == 0 or k == 2 else 0 for k in range(3) if k not in numbers]

    def written(params, x):
        own = dict(zip(numbers, params if several else (params,), strict=True))
        return model(own.get(0, A), x, own.get(2, B))

    params = tuple(args[k] for k in numbers)
    wanted = called(row, written, params if several else params[0], X, Y)
    assert_trees_close(called(row, model, *args, Y, argnums=argnums, in_dims=(*fixed, 0)), wanted, EXACT)


@every
@pytest.mark.parametrize("aux", ["a string", None, (), {"deep": [None, (1.5,)], "t": torch.arange(3)}], ids=repr)
def test_aux_is_handed_on_as_the_last_and_keywords_are_constants(row, aux):
    def f(params, x, *, scale, name):
        assert name == "constant"
        return model(params[0], x, params[1], scale), (aux, x.sum())

    kwargs = {"scale": 2.0, "name": "constant"}
    *found, (ours, total) = called(row, f, (A, B), X, Y, has_aux=True, kwargs=kwargs)
    wanted = called(row, lambda p, x: model(p[0], x, p[1], 2.0), (A, B), X, Y)
    assert_trees_close(tree.leaves(found), tree.leaves(wanted), EXACT)
    assert repr(ours) == repr(plain(aux)) and torch.equal(total, X.sum())


@every
def test_samples_are_found_along_in_dims(row):
    def moved(params, x, scale):
        return model(params[0], x.T, params[1]) * scale

    wanted = called(row, lambda p, x: model(p[0], x, p[1]) * 2, (A, B), X, Y)
    scale = torch.tensor(2.0).double()
    for dim in (1, -1):
        found = called(row, moved, (A, B), X.T, scale, Y, in_dims=(dim, None, 0))
        assert_trees_close(found, wanted, EXACT)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.gives != FACTORS], ids=lambda row: row.gives)
def test_parameters_without_influence_have_zeros(row):
    def f(p, x):
        return model(p, x, [p["v"] + p["cut"].detach() + p["rounded"].sign()])

    more = {name: Numbers(i)(4, 2) for i, name in enumerate(("cut", "rounded", "unused"), 4)}
    with_them = called(row, f, {**A, "v": B[0], **more}, X, Y)
    if isinstance(with_them, dict):
        for name in more:
            rest = tree.tensors(with_them[name])
            assert not any(part.any() for part in rest), name
