"""Reports on an inverse: its errors, leaf by leaf, and their growth with the depth."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import (
    Invertible,
    additive_coupling,
    chain,
    check_inverse,
    invertible_checkpoint,
    layers,
    repeated,
    tree,
)
from invfunc.errors import InverseError
from invfunc.pairs import Grid, drift, leapfrog
from invfunc.testing.models import moved
from tests.invertible.test_chain import AFFINE, KINDS, WIDTH, blocks, mixed
from tests.strategies import Numbers

CONTAINERS = {
    "tensor": lambda a, b: (a, {"x": a}),
    "tuple": lambda a, b: ((a, b), {"x[0]": a, "x[1]": b}),
    "nested": lambda a, b: ([a, {"b": (b, None)}], {"x[0]": a, "x[1]['b'][0]": b}),
    "with an integer": lambda a, b: ((a, torch.arange(3), "text"), {"x[0]": a, "x[1]": torch.arange(3)}),
}


def doubled(x: Any, by: float = 2.0) -> Any:
    return tree.map_tensors(lambda t: t * by if t.is_floating_point() else t + 1, x)


def halved(y: Any, by: float = 2.0) -> Any:
    return tree.map_tensors(lambda t: t / by if t.is_floating_point() else t - 1, y)


def forms_of(f: Any, f_inv: Any) -> list:
    return [(f, f_inv), Invertible(f, f_inv), invertible_checkpoint(f, f_inv)]


@pytest.mark.quick
class TestCheckInverse:
    @pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
    @given(by=st.floats(0.1, 10), off=st.sampled_from([0.0, 1e-3, 0.5]), shape=st.lists(st.integers(1, 3), max_size=3))
    def test_reports_the_error_of_each_leaf_both_ways(self, device, dtype, container, by, off, shape):
        rand = Numbers()
        x, named = moved(container(rand(*shape), rand(*shape, 2)), dtype, device)

        def inexact(y, by):
            return tree.map_tensors(lambda t: t * (1 + off) if t.is_floating_point() else t, halved(y, by))

        for pair in forms_of(doubled, inexact):
            report = check_inverse(pair, x, by, tolerance=1.0)
            assert list(report.x) == list(named)
            assert list(report.y) == [name.replace("x", "y", 1) for name in named]
            for (name, error), of_y in zip(report.x.items(), report.y.values(), strict=True):
                wanted = off if named[name].is_floating_point() else 0.0
                assert error == pytest.approx(wanted, rel=1e-5, abs=1e-6)
                assert of_y == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            assert 0.5 < report.condition < 2

    @given(data=st.data())
    def test_is_content_with_what_is_right(self, device, dtype, data):
        case = data.draw(blocks(KINDS))
        x, params = moved((Numbers(1)(3, WIDTH), case.params), dtype, device)
        for pair in (case.block, invertible_checkpoint(case.block)):
            report = check_inverse(pair, x, params)
            assert max(*report.x.values(), *report.y.values()) < torch.finfo(dtype).eps ** 0.5
            assert not any(t.requires_grad for t in tree.tensors((x, params)))

    def test_takes_pairs_that_hide_or_share_something(self, device, dtype):
        rand = Numbers()
        x = moved(rand(5, 3), dtype, device)
        for pair in (layers.batch_norm(), chain(layers.batch_norm(), layers.leaky_relu(0.5)), layers.flatten()):
            given_to = ([None, None],) if repr(pair).startswith("chain") else ()
            report = check_inverse(pair, x, *given_to)
            assert list(report.x) == ["x"] and list(report.y) == ["y"]
        report = check_inverse(leapfrog(torch.sin, 0.1), (x, x))
        assert list(report.x) == ["x[0]", "x[1]"]

    def test_replays_random_numbers(self):
        """Dropout draws the same mask on the way back, as it does for a gradient."""
        x, state = Numbers()(2, 8, 4).unbind(), torch.get_rng_state()
        pair = additive_coupling(F.dropout, F.dropout)
        assert check_inverse(pair, x).x["x[0]"] < 1e-12
        assert max(drift(pair, x, [None] * 3)) < 1e-12
        torch.set_rng_state(state)

    @given(factor=st.sampled_from([1.0, 1e4, 1e12]), kind=st.sampled_from(["float64", "float32", "complex128"]))
    def test_warns_where_rounding_takes_half_of_the_digits(self, device, factor, kind):
        """The largest entry of y tells nothing about the smallest, from which x comes as well."""
        kind = getattr(torch, kind)
        scale = torch.tensor([1, 1 / factor], dtype=kind, device=device)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            report = check_inverse((lambda x: x * scale, lambda y: y / scale), torch.ones_like(scale))
        assert factor / 4 <= report.condition <= 4 * factor
        bad = factor > torch.finfo(kind).eps ** -0.5
        assert len(seen) == bad and all("ill-conditioned" in str(w.message) for w in seen)
        assert all(w.filename == __file__ for w in seen)


def told(f: Any, f_inv: Any, x: Any, *args: Any, **options: Any) -> list[str]:
    """Messages about a wrong inverse, by each form of the pair."""
    errors = []
    for pair in forms_of(f, f_inv):
        with pytest.raises(InverseError) as error:
            check_inverse(pair, x, *args, **options)
        errors.append(str(error.value))
    return errors


class TestWrongInverse:
    X = {"a": torch.ones(2, 3), "b": torch.arange(3)}

    @pytest.mark.parametrize(
        "f_inv, said",
        [
            (lambda y: {**halved(y), "a": y["a"] / 2 + 0.25}, "x['a'] comes back with an error of 2.5e-01"),
            (lambda y: {**halved(y), "b": y["b"]}, "x['b'] comes back with an error of 5.0e-01 of its largest entry"),
            (lambda y: {**halved(y), "a": y["a"] * math.nan}, "x['a'] comes back with an error of nan"),
            (lambda y: {**halved(y), "a": y["a"] / 2 + 1e-3}, "where 3.5e-04 is tolerated (tolerance=)"),
            (lambda y: {**halved(y), "a": y["a"].mT / 2}, "x['a'] .*[3, 2] torch.float32 .*[2, 3]"),
            (lambda y: {**halved(y), "a": y["a"].half() / 2}, "x['a'] .*[2, 3] torch.float16 .*[2, 3] torch.float32"),
            (lambda y: {**halved(y), "a": None}, "dict of x['b'], where x was x['a'], x['b']"),
            (lambda y: {"a": y["a"] / 2}, "dict of x['a'], where x was x['a'], x['b']"),
            (lambda y: y["a"] / 2, "one tensor, where x was x['a'], x['b']"),
        ],
    )
    def test_is_found_by_leaf(self, f_inv, said):
        for text in told(doubled, f_inv, self.X):
            assert text.startswith("check_inverse(") and all(part in text for part in said.split(" .*"))

    def test_is_none(self):
        plain = invertible_checkpoint(torch.sin, None)
        for call in (lambda: check_inverse(plain, torch.ones(2)), lambda: drift(plain, torch.ones(2), [None])):
            with pytest.raises(InverseError, match="inverse"):
                call()
        with pytest.raises(InverseError, match="inverse"):
            drift(chain(AFFINE, torch.sin), torch.ones(2, WIDTH), [(torch.ones(2, 2),) * 2, None])


OFF = Invertible(lambda x, c=2.0, *, by=1.0: x * c * by, lambda y, c=2.0, *, by=1.0: y / c / by * 1.001, name="off")


class TestDrift:
    @pytest.mark.parametrize("form", ["one", "functions", "checkpoint", "repeated", "stacked", "chain", "chains"])
    @given(depth=st.integers(0, 6))
    def test_has_an_entry_for_each_block(self, form, depth):
        x, c = torch.ones(2).double(), [1.0 + i for i in range(depth)]
        pair, params = {
            "one": lambda: (OFF, c),
            "functions": lambda: ((OFF.forward, OFF.inverse), c),
            "checkpoint": lambda: (invertible_checkpoint(OFF), c),
            "repeated": lambda: (repeated(OFF), c),
            "stacked": lambda: (OFF, torch.tensor(c).double()),
            "chain": lambda: (chain(*[OFF] * depth), c),
            "chains": lambda: (chain(*[chain(OFF)] * depth), [[p] for p in c]),
        }[form]()
        wanted = [1.001 ** (d + 1) - 1 for d in range(depth)]
        assert drift(pair, x, params) == pytest.approx(wanted, rel=1e-6)
        assert drift(pair, x, params, by=4.0) == pytest.approx(wanted, rel=1e-6)

    def test_grows_in_float32_and_is_none_on_a_grid(self):
        """Additive couplings: 3e-8, 2e-7, 2e-6 and 4e-5 at depth 1, 10, 50 and 100."""
        rand = Numbers()
        x, w = rand(2, 8, WIDTH).float().unbind(), (1.5 * rand(100, 2, WIDTH, WIDTH) / 2).float()
        params = [tuple(p.unbind()) for p in w.unbind()]
        errors = drift(additive_coupling(mixed, mixed), x, params)
        assert 0 < errors[0] < 1e-6 and errors[0] < errors[9] < errors[99] < 1e-2
        assert errors[99] > 10 * errors[9]
        on_grid = tuple(Grid().enter(t) for t in x)
        assert drift(additive_coupling(mixed, mixed, exact=True), on_grid, params) == [0.0] * 100
        half = drift(additive_coupling(mixed, mixed), *tree.map_tensors(torch.Tensor.bfloat16, (x, params)))
        assert half[0] > 100 * errors[0]
