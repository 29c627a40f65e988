"""Trees of every kind in every place: None among the parameters, mappings and dataclasses as batches and outputs."""

from collections import ChainMap, UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import diag_ggn, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing import assert_trees_close, dense_diag_ggn
from tests.laws import assert_every_path_equals_the_loop
from tests.modules import MODELS
from tests.rows import BOTH, CASES, WHOLE, made_of
from tests.strategies import SIZES, Numbers, seeded

EXACT = 1e-12


def model(params, x):
    return (x @ params["w"] + params["b"]).tanh()


def squares(z, y):
    return F.mse_loss(z, y, reduction="none").sum(1)


def losses(f):
    return lambda params, x, y: squares(f(params, x), y)


STATISTICS = {
    **{
        case: lambda f, row=row, form=form: made_of(row, f, F.mse_loss if form == BOTH else squares, form)
        for case, (row, form) in CASES.items()
    },
    "over params": lambda f: invfunc.chunked(invfunc.diag_ggn(f, F.mse_loss), 2, over="params"),
    "over samples": lambda f: invfunc.chunked(invfunc.variance(losses(f)), 2),
    "together": lambda f: (lambda g: invfunc.together(invfunc.batch_grad(g), invfunc.variance(g)))(losses(f)),
    "reduced": lambda f: invfunc.reduced(invfunc.batch_grad(losses(f)), torch.sum),
    "reduced gram": lambda f: invfunc.reduced(invfunc.gram(losses(f)), torch.sum),
}
LIKE_PARAMS = STATISTICS.keys() - {case for case, (row, _) in CASES.items() if row.gives == WHOLE}
PRODUCTS = {
    "hvp": lambda f: invfunc.hvp(losses(f)),
    "ggnvp": lambda f: invfunc.ggnvp(f, F.mse_loss),
    "ggnvp empirical": lambda f: invfunc.ggnvp(losses(f), fisher="empirical"),
    "linearize": lambda f: lambda p, v, x, y: invfunc.linearize(losses(f))(p, x, y)[2](torch.ones_like(y[:, 0])),
    "jvp": lambda f: lambda p, v, x, y: invfunc.linearize(losses(f))(p, x, y)[1](v),
    "estimate_diagonal": lambda f: (
        lambda p, v, x, y: invfunc.estimate_diagonal(invfunc.hvp(losses(f)), probes=2, generator=seeded())(p, x, y)
    ),
}


def arguments():
    params = {"w": Numbers()(3, 2), "b": Numbers(1)(2)}
    return params, Numbers(2)(4, 3), Numbers(3)(4, 2)


def with_nothing(params):
    """The same among None and empty subtrees."""
    return {"first": None, "own": params, "more": [None, {}, (None, ())]}


def without(f):
    def inner(params, x):
        assert params["first"] is None and params["more"] == [None, {}, (None, ())]
        return f(params["own"], x)

    return inner


@pytest.mark.quick
class TestNoneIsNoParameter:
    @pytest.mark.parametrize("statistic", STATISTICS)
    def test_statistics(self, statistic):
        make, (params, x, y) = STATISTICS[statistic], arguments()
        expected, found = make(model)(params, x, y), make(without(model))(with_nothing(params), x, y)
        assert tree.tensors(found)
        for a, b in zip(tree.tensors(found), tree.tensors(expected), strict=True):
            assert torch.equal(a, b)
        several = found if isinstance(found, tuple) else (found,)
        for part in several if statistic in LIKE_PARAMS else ():
            if isinstance(part, dict) and "own" in part:  # norms are none, and groups have names of their own
                assert part["first"] is None and part["more"] == [None, {}, (None, ())]

    @pytest.mark.parametrize("product", PRODUCTS)
    def test_products(self, product):
        make, (params, x, y) = PRODUCTS[product], arguments()
        v = {"w": Numbers(4)(3, 2), "b": Numbers(5)(2)}
        expected = make(model)(params, v, x, y)
        found = make(without(model))(with_nothing(params), with_nothing(v), x, y)
        for a, b in zip(tree.tensors(found), tree.tensors(expected), strict=True):
            assert torch.equal(a, b)

    def test_a_vector_has_none_where_the_parameters_have(self):
        params, x, y = arguments()
        with pytest.raises(ArgumentError, match=r"v has an entry v\['first'\]"):
            invfunc.hvp(losses(without(model)))(with_nothing(params), {**with_nothing(params), "first": y}, x, y)

    def test_nothing_else_is_an_error(self):
        _, x, y = arguments()
        with pytest.raises(ArgumentError, match="params has no tensors in it"):
            invfunc.batch_grad(lambda params, x, y: (x.sum(1) - y.sum(1)).square())({"w": None, "b": {}}, x, y)


class Frozen(Mapping):
    def __init__(self, values):
        self._values = dict(values)

    def __getitem__(self, key):
        return self._values[key]

    def __iter__(self):
        return iter(self._values)

    def __len__(self):
        return len(self._values)


@dataclass(frozen=True)
class Given:
    x: Any
    y: Any
    note: str = "a constant"
    more: list = field(default_factory=list)

    def __getitem__(self, key):
        return getattr(self, key)


@dataclass
class Pair:
    x: Any
    y: Any

    def __getitem__(self, key):
        return getattr(self, key)


KINDS = {
    "UserDict": UserDict,
    "ChainMap": lambda d: ChainMap({"x": d["x"]}, {"y": d["y"]}),
    "proxy": MappingProxyType,
    "Frozen": Frozen,
    "dataclass": lambda d: Given(**d),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.mark.quick
@kinds
class TestMappingsAndDataclasses:
    def test_as_batches(self, kind):
        params, x, y = arguments()
        batch = kind({"x": x, "y": y})
        kept = batch["x"], batch["y"]

        def loss(params, batch):
            assert type(batch) is type(kept_batch)
            return F.mse_loss(model(params, batch["x"]), batch["y"])

        kept_batch = batch

        def apart(params, x, y):
            return F.mse_loss(model(params, x), y)

        transforms = {
            "batch_grad": invfunc.batch_grad,
            "chunked": lambda f: invfunc.chunked(invfunc.variance(f), 2),
            "diag_ggn": invfunc.diag_ggn,
            "diag_hessian": invfunc.diag_hessian,
        }
        for transform in transforms.values():
            assert_trees_close(transform(loss)(params, batch), transform(apart)(params, x, y), EXACT)
        v = {"w": Numbers(4)(3, 2), "b": Numbers(5)(2)}
        assert_trees_close(invfunc.hvp(loss)(params, v, batch), invfunc.hvp(apart)(params, v, x, y), EXACT)
        assert batch["x"] is kept[0] and batch["y"] is kept[1]

    def test_as_parameters(self, kind):
        params, x, y = arguments()
        given = kind({"x": params["w"], "y": params["b"]})
        if isinstance(given, Given):  # which has constants too, and parameters are tensors
            with pytest.raises(ArgumentTypeError, match=r"given\.note is of type str, but parameters are tensors"):
                invfunc.batch_grad(lambda given, x: x @ given.x)(given, x)
            given = Pair(params["w"], params["b"])

        def f(given, x):
            return model({"w": given["x"], "b": given["y"]}, x)

        found = invfunc.diag_ggn(f, F.mse_loss)(given, x, y)
        assert type(found) is type(given)
        expected = invfunc.diag_ggn(model, F.mse_loss)(params, x, y)
        assert_trees_close({"w": found["x"], "b": found["y"]}, expected, EXACT)

    def test_as_outputs(self, kind):
        params, x, y = arguments()

        def f(params, x):
            return kind({"x": model(params, x), "y": None})

        expected = invfunc.diag_ggn(model, F.mse_loss)(params, x, y)
        assert_trees_close(invfunc.diag_ggn(f, lambda out, y: F.mse_loss(out["x"], y))(params, x, y), expected, EXACT)
        v = {"w": Numbers(4)(3, 2), "b": Numbers(5)(2)}
        found = invfunc.ggnvp(f, lambda out, y: F.mse_loss(out["x"], y))(params, v, x, y)
        assert_trees_close(found, invfunc.ggnvp(model, F.mse_loss)(params, v, x, y), EXACT)


class Cache:
    """A cache that a language model returns with its logits: an opaque object."""

    def __init__(self):
        self.keys = [torch.ones(2, 2)]


@dataclass
class Output:
    logits: Any
    cache: Any = None
    count: Any = None


@pytest.mark.quick
class TestWhatIsNoOutput:
    def f(self, params, x):
        return Output(model(params, x), Cache(), len(x))

    @pytest.mark.parametrize("over", [None, "samples", "outputs"])
    def test_may_be_returned(self, over):
        params, x, y = arguments()
        t = invfunc.diag_ggn(self.f, lambda out, y: F.mse_loss(out.logits, y))
        t = t if over is None else invfunc.chunked(t, 2, over=over)
        assert_trees_close(t(params, x, y), invfunc.diag_ggn(model, F.mse_loss)(params, x, y), EXACT)

    USES = {
        "attribute": lambda out: out.cache.keys[0].sum(),
        "item": lambda out: out.cache[0],
        "length": lambda out: len(out.cache),
        "condition": lambda out: 1.0 if out.cache else 2.0,
        "product": lambda out: out.count * 2.0,
        "torch function": lambda out: torch.add(torch.ones(()), out.count),
        "number": lambda out: float(out.count),
        "comparison": lambda out: out.count == 4,
    }

    @pytest.mark.parametrize("use", USES.values(), ids=USES)
    def test_cannot_be_used(self, use):
        params, x, y = arguments()

        def loss(out, y):
            return F.mse_loss(out.logits, y) * use(out)

        for t in invfunc.diag_ggn(self.f, loss), invfunc.chunked(invfunc.diag_ggn(self.f, loss), 2, over="samples"):
            with pytest.raises(ArgumentTypeError, match=r"the part \.(cache|count) of type .*, which f returned, is"):
                t(params, x, y)
        with pytest.raises(ArgumentTypeError, match=r"the part \.(cache|count)"):
            invfunc.ggnvp(self.f, loss)(params, params, x, y)


@pytest.mark.quick
def test_a_mapping_that_cannot_be_copied_is_an_error():
    class Odd(Frozen):
        def __init__(self, one, two):
            super().__init__({"x": one, "y": two})

    params, x, y = arguments()
    with pytest.raises(ArgumentTypeError, match=r"a mapping of type Odd cannot be copied .* pass dict"):
        invfunc.batch_grad(lambda params, batch: F.mse_loss(model(params, batch["x"]), batch["y"]))(params, Odd(x, y))


# Whole models against the plain loop; where the samples lie in them; what mixes samples; what is left behind

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")
TIGHT = 1e-10


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=4)
@given(data=st.data())
def test_every_path_equals_the_loop(model, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(MODELS[model]), device, dtype, drawn=True)


class TestSampleAxis:
    """It is found wherever it is, and an axis that happens to be as long is not taken for it."""

    @given(n=SIZES, steps=SIZES)
    def test_time_first(self, n, steps, device, dtype):
        rand = Numbers()

        def f(params, x):  # [T, N, 3] -> [T, N, 2]
            return torch.cumsum(x, 0).tanh() @ params["w"] + params["b"]

        params = {"w": rand(3, 2), "b": rand(2)}
        args = [x.to(device) for x in (rand(steps, n, 3), rand(steps, n, 2))]
        params = {name: p.to(device) for name, p in params.items()}
        expected = dense_diag_ggn(f, F.mse_loss)(params, *args)
        assert_trees_close(diag_ggn(f, F.mse_loss, in_dims=1, out_dims=1)(params, *args), expected, TIGHT)
        assert_trees_close(diag_ggn(f, F.mse_loss, in_dims=-2, out_dims=-2)(params, *args), expected, TIGHT)

    def test_an_axis_of_the_same_length_is_not_taken_for_it(self):
        w, x, y = torch.ones(3, 2), torch.ones(4, 4, 3), torch.ones(4, 4, 2)
        with pytest.raises(ArgumentError, match="samples along axis 1, not 0; pass out_dims"):
            diag_ggn(lambda w, x: x @ w, F.mse_loss, in_dims=1)(w, x, y)
