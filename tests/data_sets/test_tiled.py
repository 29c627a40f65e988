"""streamed(gram): the products of all pairs of samples, tile by tile."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import invfunc
from invfunc import distributed, gram, streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.loss.drawn import joined
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import EXACT, FLOOR, batches, data, in_one_memory, linear, losses  # noqa: F401
from tests.meter import Meter, nothing_collected
from tests.networks import CLASSES, LOSSES, network, networks, samples_loss
from tests.rows import LOSS, MODEL
from tests.strategies import Numbers

EDGES = st.lists(st.integers(0, 5), max_size=3)
FORMS = st.sampled_from([LOSS, MODEL])


def parts(edges, n, args):
    return batches([min(e, n) for e in edges], *args)


def drawn(net, loss, form):
    """A function of a network, its parameters and all samples; those of a loss have targets."""
    if form == MODEL:
        return net.f, net.params, (net.x,)
    return samples_loss(net, loss), net.params, (net.x, loss.target(Numbers(1), net.n))


def like(result, fill=torch.nan):
    return tree.map_tensors(lambda x: torch.full_like(x, fill), result)


@pytest.mark.quick
@settings(max_examples=8)
@given(networks(), st.integers(1, 4), st.sampled_from(LOSSES), FORMS, st.booleans(), EDGES, EDGES, st.booleans())
def test_two_loaders_give_what_two_batches_do(net, m, loss, form, per_parameter, edges, others, known):
    f, params, args = drawn(net, loss, form)
    other = drawn(network(net.called, m, seed=1), loss, form)[2] if net.called != "module" else args
    m = len(tree.tensors(other)[0])
    wanted = gram(f, others=other, per_parameter=per_parameter)(params, *args)
    loader, columns = parts(edges, net.n, args), parts(others, m, other)
    if known:  # one batch, which meets each of the loader's
        t = streamed(gram(f, others=other, per_parameter=per_parameter))
        assert_trees_close(t(params, iter(loader)), wanted, EXACT, FLOOR)
    t = gram(f, per_parameter=per_parameter)
    assert_trees_close(streamed(t)(params, loader, columns), wanted, EXACT, FLOOR)
    told = []
    assert streamed(t, out=lambda *what: told.append(what))(params, loader, columns) is None
    assert_trees_close(_rows(told), wanted, EXACT, FLOOR)


def _rows(told):
    """The rows that a function was told, in one; they come in the order of the samples."""
    sizes = [len(tree.tensors((rows,))[0]) for _, rows in told]
    assert [start for start, _ in told] == [sum(sizes[:k]) for k in range(len(sizes))]
    return joined([rows for _, rows in told], 0)


@pytest.mark.quick
class TestOut:
    @given(networks(low=2), FORMS, st.booleans(), EDGES)
    def test_of_tensors_or_a_function_is_the_result(self, net, form, per_parameter, edges):
        f, params, args = drawn(net, LOSSES[0], form)
        t, loader = gram(f, per_parameter=per_parameter), parts(edges, net.n, args)
        wanted = t(params, *args)
        out = like(wanted)
        found = streamed(t, out=out)(params, loader)
        assert all(x is y for x, y in zip(tree.tensors((found,)), tree.tensors((out,)), strict=True))
        assert_trees_close(out, wanted, EXACT, FLOOR)
        told = []
        streamed(t, out=lambda *what: told.append(what))(params, loader)
        assert_trees_close(_rows(told), wanted, EXACT, FLOOR)

    @pytest.mark.parametrize(
        ("out", "text"),
        [
            (torch.zeros(9, 8), r"out is torch.float32 \(9, 8\), but has to be torch.float\d\d \(9, 9\)"),
            (torch.zeros(1).expand(9, 9), "out has no memory of its own"),
            (np.zeros((9, 9)), "out is of type ndarray"),
            ({"w": torch.zeros(9, 9)}, "out has other parts than the result, which are out"),
        ],
        ids=["shape", "memory", "type", "tree"],
    )
    def test_that_does_not_fit_is_refused(self, data, out, text):  # noqa: F811
        with pytest.raises((ArgumentError, ArgumentTypeError), match=text):
            streamed(gram(losses), out=out)(data[0], batches([2], *data[1:]))


@pytest.mark.quick
class TestComposes:
    def test_axes_of_samples_and_what_they_share(self):
        w, x = Numbers()(3, 2), Numbers(1)(3, 7)
        t = gram(lambda w, x, s: ((x.T @ w) * s).T, in_dims=(1, None), out_dims=1)
        loader = [(part, 2.0) for part in x.split([2, 1, 4], 1)]
        assert_trees_close(streamed(t)(w, loader), t(w, x, 2.0), EXACT)
        of_one = gram(t.f, others=(x[:, :2],), in_dims=(1, None), out_dims=1)
        assert_trees_close(streamed(of_one)(w, loader), of_one(w, x, 2.0), EXACT)

    def test_keywords_and_parameters_that_a_batch_does_not_reach(self, data):  # noqa: F811
        def f(params, x, y, by):
            held = params if len(x) > 2 else {**params, "w": params["w"].detach()}
            return by * losses(held, x, y)

        shares = invfunc.batch_grad(losses)(*data)
        shares["w"][:2] = 0
        wanted = tree.map_tensors(lambda g: 4 * g.flatten(1) @ g.flatten(1).T, shares)
        for edges in ([2], [2, 5]):
            found = streamed(gram(f, per_parameter=True))(data[0], batches(edges, *data[1:]), by=2)
            assert_trees_close(found, wanted, EXACT)

    def test_operations_that_read_a_parameter_in_another_way_in_another_batch(self):
        """Its shares have terms of another layout then, or of its entries in another order."""
        w, x, index = Numbers()(4, 4), Numbers(1)(7, 4), torch.tensor([0, 3, 1, 1, 2, 3, 0])
        one_hot = partial(F.one_hot, num_classes=4)
        for data, ways in (  # noqa: F402
            (
                x,
                [
                    lambda w, x: x @ w,
                    lambda w, x: F.linear(x, w.T),
                    lambda w, x: torch.einsum("ab,bc->ac", x, w),
                    lambda w, x: (x[:, :, None] * w).sum(1),
                    lambda w, x: x @ (2 * w) / 2,
                    lambda w, x: torch.cat([x @ w[:, :2], x @ w[:, 2:]], 1),
                    lambda w, x: torch.cat([x @ w[:, 2:], x @ w[:, :2]], 1).roll(2, 1),
                ],
            ),
            (index, [lambda w, x: F.embedding(x, w), lambda w, x: one_hot(x).to(w) @ w, lambda w, x: w[x]]),
        ):
            wanted = gram(ways[0])(w, data)
            for one, other in product(ways, ways):
                f = lambda w, x, one=one, other=other: (one if len(x) > 3 else other)(w, x)  # noqa: E731
                assert_trees_close(streamed(gram(f))(w, data.split(4)), wanted, EXACT)


@pytest.mark.quick
class TestLoaders:
    def test_that_give_batches_once_are_refused_before_the_first(self, data):  # noqa: F811
        params, *rest = data
        seen, parts = [], batches([2], *rest)
        once = (seen.append(part) or part for part in parts)
        for loaders in ([once], [parts, once], [once, parts]):
            with pytest.raises(ArgumentTypeError, match="once, but each of its batches is to meet all others"):
                streamed(gram(losses))(params, *loaders)
        assert not seen
        assert_trees_close(streamed(gram(losses))(params, lambda: iter(parts)), gram(losses)(*data), EXACT)

    def test_that_give_others_the_second_time_are_an_error(self, data):  # noqa: F811
        params, *rest = data
        shuffled = DataLoader(TensorDataset(*rest), batch_size=2, shuffle=True)
        orders = [0, 1, 2, 3], [0, 2, 1, 3]
        within = ([tuple(x[order] for x in part) for part in batches([4], *rest)] for order in orders)
        kinds = {
            "order": shuffled,
            "order within a batch": lambda: next(within),
            "fewer": partial(next, iter([batches([2, 4], *rest), batches([2], *rest)])),
            "more": partial(next, iter([batches([2], *rest), batches([2, 4], *rest)])),
        }
        for loader in kinds.values():
            with pytest.raises(ArgumentError, match="gave other batches than the first time.*shuffle=False"):
                streamed(gram(losses))(params, loader)
        with pytest.raises(ArgumentError, match="gave other batches"):
            streamed(gram(losses))(params, batches([2, 4], *rest), shuffled)

    def test_may_write_a_batch_in_the_memory_of_the_last_one(self, data):  # noqa: F811
        params, *rest = data
        loader = in_one_memory(batches([3, 6], *rest))
        for loaders in ([loader], [loader, loader]):
            assert_trees_close(streamed(gram(losses))(params, *loaders), gram(losses)(*data), EXACT)

    def test_without_samples(self, data):  # noqa: F811
        params, x, y = data
        some, none = [(x, y)], [(x[:0], y[:0])]
        for loaders in ([none], [some, none], [none, some], [[]]):
            for out in (None, print):
                with pytest.raises(ArgumentError, match="no samples"):
                    streamed(gram(losses), out=out)(params, *loaders)


@pytest.mark.quick
class TestRefused:
    @pytest.mark.parametrize("scalar", [torch.sum, torch.mean])
    def test_one_number_for_all(self, data, scalar):  # noqa: F811
        with pytest.raises(ArgumentError, match=r"Return the \[N\] losses"):
            streamed(gram(lambda *args: scalar(losses(*args))))(data[0], batches([2], *data[1:]))

    @pytest.mark.parametrize("by", [lambda n: torch.full((n,), n), torch.arange], ids=["number", "place"])
    def test_what_depends_on_the_other_samples(self, data, by):  # noqa: F811
        t = gram(lambda *args: losses(*args) * (1 + by(len(args[1])).to(args[1])))
        parts = batches([2, 5], *data[1:])
        for loaders in ([parts], [parts, [data[1:]]]):
            with pytest.raises(ArgumentError, match="where both batches are joined"):
                streamed(t)(data[0], *loaders)

    def test_what_mixes_samples_or_draws(self, data):  # noqa: F811
        parts = batches([4], *data[1:])
        with pytest.raises(invfunc.errors.SampleAxisError):
            streamed(gram(lambda p, x, y: losses(p, x - (x @ p["w"]).mean(), y)))(data[0], parts)
        draws = streamed(gram(lambda p, x, y: losses(p, F.dropout(x), y)))
        with pytest.raises(invfunc.errors.RandomnessError, match="each time it meets another.*eval mode"):
            draws(data[0], parts)
        assert draws(data[0], [data[1:]]).shape == (9, 9)

    def test_outputs_of_other_shapes(self):
        f = lambda w, x: x * w  # noqa: E731
        with pytest.raises(ArgumentError, match="but for the number of samples they have to agree"):
            streamed(gram(f))(Numbers()(1), [Numbers(1)(2, 3), Numbers(2)(2, 4)])
        wide = lambda w, x: (x * w).repeat(1, 1 if len(x) == 1 else 2)  # noqa: E731
        with pytest.raises(ArgumentError, match=r"shape \(6,\) in one batch, and \(3,\)|are joined"):
            streamed(gram(wide))(Numbers()(1), Numbers(1)(3, 3).split(2))

    def test_options(self, tmp_path):
        for t, text in (
            (gram(losses, samples=[0]), "samples="),
            (gram(lambda x, w: x @ w, argnums=1), "argnums=1"),
            (invfunc.together(gram(losses), gram(losses, per_parameter=True)), "gram is of pairs.*alone"),
        ):
            with pytest.raises(ArgumentError, match=text):
                streamed(t)
        for t in (gram(losses), streamed(gram(losses)), invfunc.reduced(gram(losses), torch.sum)):
            with pytest.raises(ArgumentError, match="all pairs of samples.*to one process.*others="):
                distributed(t)
        with pytest.raises(ArgumentError, match="a matrix of all pairs has none"):
            streamed(gram(losses), checkpoint=tmp_path / "state")
        with pytest.raises(ArgumentError, match="after the last batch"):
            streamed(invfunc.reduced(gram(losses), torch.sum), out=torch.zeros(9, 9))


@pytest.mark.quick
class TestWork:
    def test_half_of_the_tiles_and_a_look(self, data):  # noqa: F811
        """Each tile evaluates one batch; beside them, two are looked at joined and alone."""
        sizes, parts = [], batches([2, 5], *data[1:])
        t = gram(lambda *args: sizes.append(len(args[1])) or losses(*args))
        streamed(t)(data[0], parts)
        assert sorted(sizes) == sorted([2, 3, 4, 3, 4, 4] + [2 + 3, 2, 3])
        sizes.clear()
        streamed(t)(data[0], parts, [data[1:]])
        assert sorted(sizes) == sorted([9, 2, 3, 4] + [9 + 2, 9, 2])

    @pytest.mark.parametrize("form", ["one", "two", "others", "out"])
    def test_memory_is_that_of_two_batches(self, form, tmp_path):
        rand, n = Numbers(0), 24
        model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, CLASSES))
        f, params = invfunc.functional(model.to(rand(1)))
        loss = lambda params, x, y: F.cross_entropy(f(params, x), y, reduction="none")  # noqa: E731

        def batch(seed):
            return Numbers(seed)(n, 40), LOSSES[0].target(Numbers(seed), n)

        def peak(count):
            loader = partial(map, batch, range(count))
            loaders = {"two": [loader, loader]}.get(form, [loader])
            t = gram(loss, others=batch(0) if form == "others" else None)
            out = (lambda start, rows: None) if form == "out" else None
            with nothing_collected(), Meter() as meter:
                result = streamed(t, out=out)(params, *loaders)
            return meter.peak(result)

        peak(1)
        few, many = peak(3), peak(9)
        rows = 6 * n * n * params["0.bias"].itemsize if form in ("out", "others") else 0  # whole rows, or those before
        assert many <= 1.1 * few + rows
        assert few < 0.5 * 3 * n * sum(p.nbytes for p in tree.tensors((params,)))
