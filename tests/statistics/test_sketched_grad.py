"""Sketches of the shares: products of the shares between two matrices, had from their factors."""

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import chunked, sketched_grad, streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.loss.drawn import joined
from invfunc.testing import assert_trees_close
from invfunc.testing.memory import peak_memory
from tests.laws import EVERY
from tests.rows import generic, in_blocks, sketching
from tests.strategies import Numbers

EXACT = 1e-12
V, D = 7, 6


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def lookup(w, x):
    return F.embedding(x, w).sum(1)


WAYS = {
    "transposed": (lambda w, x: x @ w.T, (V, D), (5, D)),
    "entries in another order": (lambda w, x: x @ w.view(D, V).T.reshape(V, D).T, (V, D), (5, D)),
    "a part of the columns": (lambda w, x: x[:, :3] @ w[:, 2:5].T, (V, D), (5, D)),
    "a part of the rows": (lambda w, x: x @ w[1:4].T, (V, D), (5, D)),
    "in two halves": (lambda w, x: (x @ w[:3].T).sum(1) + (x @ w[3:].T).cos().sum(1), (V, D), (5, D)),
    "as several matrices": (lambda w, x: torch.einsum("nd,gde->nge", x, w.view(2, D, V)), (2 * D, V), (5, D)),
    "across rows": (lambda w, x: x @ w.reshape(6, 7), (V, D), (5, D)),
    "a vector of a row": (lambda w, x: x * w.flatten()[:D], (V, D), (5, D)),
    "a vector of two rows": (lambda w, x: x * w.flatten()[2 : D + 2], (V, D), (5, D)),
    "one row": (lambda w, x: x @ w.T, (1, D), (5, D)),
    "one column": (lambda w, x: x @ w, (D, 1), (5, D)),
    "one number": (lambda w, x: x * w, (1, 1), (5, D)),
    "a number": (lambda w, x: x * w, (), (5, D)),
    "a table": (lookup, (V, D), 5),
    "a part of a table": (lambda w, x: lookup(w[:, 1:4], x), (V, D), 5),
    "a transposed table": (lambda w, x: lookup(w.T, x), (D, V), 5),
    "a table of one row": (lambda w, x: lookup(w, 0 * x), (1, D), 5),
    "a table with padding": (lambda w, x: F.embedding(x, w, padding_idx=2).sum(1), (V, D), 5),
    "a table of one column": (lookup, (V, 1), 5),
    "a convolution in groups": (lambda w, x: F.conv1d(x.view(5, 2, 3), w, groups=2), (4, 1, 2), (5, D)),
    "a convolution with steps": (
        lambda w, x: F.conv1d(x[:, None], w, stride=2, padding=3, dilation=2),
        (V, 1, 3),
        (5, 9),
    ),
    "a convolution to the same size": (lambda w, x: F.conv1d(x[:, None], w, padding="same"), (V, 1, 5), (5, D)),
    "positions": (lambda w, x: x.view(5, 2, 3) + w, (2, 3), (5, D)),
    "squared": (lambda w, x: x @ w.square().T, (V, D), (5, D)),
    "read twice": (lambda w, x: (x @ w) @ w.T, (D, V), (5, D)),
    "a table and the head": (lambda w, x: lookup(w, x) @ w.T, (V, D), 5),
}
"""`z(w, x)`, the shapes of w and x (or how many samples there are, of two tokens each)."""


class TestFactors:
    @pytest.mark.parametrize("path", EVERY)
    @pytest.mark.parametrize("rows, columns, kind", [(2, 3, "signs"), (9, 4, "sparse"), (3, 2, "mask")])
    @pytest.mark.parametrize("way", WAYS)
    def test_equal_the_projected_loop(self, way, rows, columns, kind, path, monkeypatch):
        z, shape, x = WAYS[way]
        w = Numbers(0)(*shape)
        x = torch.tensor([[0, 2], [2, 2], [6, 1], [3, 3], [5, 4]]) if x == 5 else Numbers(1)(*x)
        x = x.clamp(max=shape[-1] - 1 if "transposed table" in way else V - 1) if x.dtype == torch.int64 else x
        row = sketching(rows, columns, kind)

        def f(w, x):
            return z(w, x).cos().reshape(5, -1).sum(1)

        wanted = row.loop(f)(w, x)
        if path == "float32":
            w, x = (y.float() if y.is_floating_point() else y for y in (w, x))
            assert_trees_close(row.make(f)(w, x), wanted.float(), 1e-5)
            return
        if path == "blocks":
            monkeypatch.setattr("invfunc.thresholds.CACHE", {"cpu": 16})
        t = {"blocks": in_blocks, "generic": generic}.get(path, lambda t: t)(row.make(f))
        assert_trees_close(t(w, x), wanted, EXACT)

    def test_are_not_formed(self):
        """Of 256 samples the shares would have 1 GiB."""
        w, x = torch.randn(1024, 1024), torch.randn(256, 1024)
        t = sketched_grad(lambda w, x: (x @ w).square().sum(1), rows=8, columns=8, generator=seeded())
        t(w, x)
        assert peak_memory(lambda: t(w, x))[1] < 64 * 2**20


class TestInnerProducts:
    @pytest.mark.parametrize(
        "rows, columns, kind", [(4, 5, "signs"), (16, 1, "signs"), (1, 16, "sparse"), (8, 30, "sparse")]
    )
    def test_are_right_on_average_with_the_stated_deviation(self, rows, columns, kind):
        """Over 120 draws: 5 standard errors, and the bound of the docstring."""

        def f(p, x, y):
            return (x @ p["w"].T + p["b"] - y).square().sum(1)

        params = {"w": Numbers(0)(12, 20), "b": Numbers(1)(12)}
        args = params, Numbers(2)(4, 20), Numbers(3)(4, 12)
        exact = invfunc.gram(f, per_parameter=True)(*args)
        g, draws = seeded(), []
        for _ in range(120):
            found = sketched_grad(f, rows=rows, columns=columns, projection=kind, generator=g)(*args)
            draws.append(tree.map_tensors(lambda s: s @ s.T, found))
        size = rows * columns
        stated = {"w": 2 / rows + 2 / columns + 4 / size, "b": 2 / size}
        for name, wanted in exact.items():
            error = torch.stack([d[name] for d in draws]) - wanted
            norms = wanted.diag().sqrt()
            scale = norms[:, None] * norms
            assert (error.square().mean(0).sqrt() <= 1.25 * stated[name] ** 0.5 * scale + 1e-10).all()
            assert (error.mean(0).abs() <= 5 * (stated[name] / 120) ** 0.5 * scale + 1e-10).all()
        if size >= 12:  # the vector is kept
            assert_trees_close(draws[0]["b"], exact["b"], 1e-10)

    def test_of_masks_are_right_on_average(self):
        """Over 400 draws, in their own standard errors."""

        def f(w, x):
            return torch.tanh(x @ w).square().sum(1)

        w, x, g, draws = Numbers(0)(6, 5), Numbers(1)(4, 6), seeded(), []
        for _ in range(400):
            found = sketched_grad(f, rows=3, columns=2, projection="mask", generator=g)(w, x)
            draws.append(found @ found.T)
        draws = torch.stack(draws)
        assert ((draws.mean(0) - invfunc.gram(f)(w, x)).abs() <= 5 * draws.std(0) / 20).all()


@pytest.mark.quick
class TestMatrices:
    def test_are_the_same_in_all_calls(self):
        def f(p, x):
            return (torch.tanh(x @ p["a"]) @ p["b"]).square().sum(1)

        params, x = {"a": Numbers(0)(9, 8), "b": Numbers(1)(8, 7)}, Numbers(2)(6, 9)
        t = sketched_grad(f, rows=3, columns=3, generator=seeded(1))
        whole, again = t(params, x), sketched_grad(f, rows=3, columns=3, generator=seeded(1))
        assert_trees_close(again(params, x), whole, 0)
        parts = [t(params, part) for part in x.split([1, 3, 2])]
        assert_trees_close(joined(parts, 0), whole, EXACT)
        assert_trees_close(streamed(t)(params, [(part,) for part in x.split(4)]), whole, EXACT)
        assert_trees_close(chunked(t, 2, over="params")(params, x), whole, EXACT)
        low = tree.map_leaves(torch.Tensor.float, params)
        assert_trees_close(t(low, x.float()), tree.map_leaves(torch.Tensor.float, whole), 1e-5)
        other = sketched_grad(f, rows=3, columns=3, generator=seeded(2))(params, x)
        assert all((other[name] - y).abs().max() > 1e-3 for name, y in whole.items())

    def test_differ_between_parameters_of_one_shape(self):
        def f(p, x):
            return (x @ p[0]).sum(1) + (x @ p[1]).sum(1)  # of which the shares are the same

        params = [torch.ones(9, 9).double()] * 2
        first, second = sketched_grad(f, rows=2, columns=2, generator=seeded())(params, Numbers()(3, 9))
        assert (first - second).abs().max() > 0.1


def test_refusals():
    f = torch.sum
    with pytest.raises(ArgumentError, match=r"sketched_grad\(rows=0\): rows has to be at least 1"):
        sketched_grad(f, rows=0, columns=2, generator=seeded())
    with pytest.raises(ArgumentTypeError, match=r"sketched_grad\(columns=2.0\): columns is of type float"):
        sketched_grad(f, rows=1, columns=2.0, generator=seeded())
    with pytest.raises(ArgumentError, match=r"projection=\['mask'\]\): projection .* 'signs', 'sparse', 'mask'"):
        sketched_grad(f, rows=1, columns=2, projection=["mask"], generator=seeded())
    with pytest.raises(ArgumentTypeError, match=r"generator is of type int, .* pass generator=torch.Generator\(\)"):
        sketched_grad(f, rows=1, columns=2, generator=3)
