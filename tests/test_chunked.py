"""chunked: the same result in exactly n passes, over every axis; folds of plain functions."""

from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import chunked, diag_ggn, tree
from invfunc.core.run import Run
from invfunc.testing.oracles import assert_trees_close, dense_diag_ggn
from tests.criteria import cross_entropies, model
from tests.networks import LOSSES, network, networks
from tests.strategies import Numbers

EXACT = 1e-10
numbers_of_passes = st.integers(1, 9)
OF_THE_WHOLE_BATCH = {
    "its length": lambda x: x / len(x),
    "a constant of its length": lambda x: x * torch.arange(1.0, 6)[:, None].double(),
    "its mean": lambda x: x - x.mean(0),
    "its largest entry": lambda x: x / x.abs().max(),
    "its order": lambda x: x[torch.tensor([4, 2, 0, 1, 3])],
    "sums along it": lambda x: x.cumsum(0),
}
MASKED = {
    "ignored": lambda p, x, y: F.cross_entropy(logits(p, x), y),
    "a mask": lambda p, x, y: (F.cross_entropy(logits(p, x), y, reduction="none") * (y >= 0)).sum() / (y >= 0).sum(),
    "weights": lambda p, x, y: F.cross_entropy(logits(p, x), y, weight=torch.tensor([1.0, 2.0, 3.0]).double()),
    "weights of the samples": lambda p, x, y: (
        F.cross_entropy(logits(p, x), y, reduction="none") * (y + 2.0).clamp(min=0) / (y + 2.0).clamp(min=0).sum()
    ),
}
"""Losses that divide by what is in the data of the batch."""
FIRST_ORDER = [invfunc.batch_grad, invfunc.sum_grad_squared, invfunc.variance]


def divided(draw, t, axes):
    """t over one to three of its axes, in n chunks or in chunks of a size."""
    for over in draw(st.lists(st.sampled_from(axes), min_size=1, max_size=3)):
        n = draw(numbers_of_passes)
        t = chunked(t, n, over=over) if draw(st.booleans()) else chunked(t, chunk_size=n, over=over)
    return t


class TestStatistics:
    @given(st.data(), networks(sequences=True), st.sampled_from(LOSSES[:2]), st.booleans())
    def test_diag_ggn_of_any_network_does_not_depend_on_n(self, data, net, loss, alone):
        target = loss.target(Numbers(1), net.n)
        target = torch.stack([target, target], 1) if net.called == "sequence" else target

        def criterion(z, y):
            return loss(z.flatten(0, -2), y.flatten(0, z.ndim - 2))

        t = diag_ggn(lambda p, x, y: criterion(net.f(p, x), y)) if alone else diag_ggn(net.f, criterion)
        args = (net.params, net.x, target)
        wanted = dense_diag_ggn(net.f, criterion)(*args)
        assert_trees_close(divided(data.draw, t, ["outputs", "samples", "params"])(*args), wanted, EXACT)

    @given(st.data(), cross_entropies(), st.sampled_from(FIRST_ORDER), st.booleans())
    def test_first_order_statistics_keep_the_scale_of_the_loss(self, data, criterion, transform, mark):
        """Weights, ignore_index and label smoothing: no chunk sees a loss of its own."""
        f, params = model(criterion.one)
        args = (params, Numbers(1)(len(criterion.target), 2), criterion.target)
        z = invfunc.outputs if mark else lambda z: z
        t = transform(lambda p, x, y: criterion.loss(z(f(p, x)), y))
        with suppress(invfunc.errors.SampleAxisError):  # a mean that divides by weights
            assert_trees_close(divided(data.draw, t, ["samples", "params"])(*args), t(*args), EXACT)

    @pytest.mark.parametrize("alone", [True, False], ids=["f", "f, loss"])
    @pytest.mark.parametrize("prepare", OF_THE_WHOLE_BATCH.values(), ids=OF_THE_WHOLE_BATCH)
    def test_models_that_need_the_whole_batch_are_refused(self, alone, prepare):
        args = (Numbers()(3, 2), Numbers(1)(5, 3), Numbers(2)(5, 2))

        def f(w, x):
            return prepare(x) @ w

        t = diag_ggn(lambda w, x, y: F.mse_loss(f(w, x), y)) if alone else diag_ggn(f, F.mse_loss)
        for size in (1, 2, 3):
            with pytest.raises((invfunc.errors.SampleAxisError, invfunc.errors.ArgumentError)):
                chunked(t, chunk_size=size, over="samples")(*args)

    @pytest.mark.parametrize("over", ["samples", "params", "outputs"])
    @pytest.mark.parametrize("alone", [True, False], ids=["f", "f, loss"])
    def test_options_stay_with_the_statistic(self, over, alone):
        rand = Numbers()
        w, b, x, y = rand(3, 2), rand(2), rand(3, 5), rand(2, 5)

        def f(b, w, x):
            return w.T @ x + b[:, None], "aux"

        options = {"argnums": (1, 0), "in_dims": (1, 1), "has_aux": True}
        if alone:
            t = diag_ggn(lambda b, w, x, y: (F.mse_loss(f(b, w, x)[0], y), "aux"), **options)
        else:
            t = diag_ggn(f, F.mse_loss, out_dims=1, **options)
        result, aux = chunked(t, 2, over=over)(b, w, x, y)
        wanted = dense_diag_ggn(lambda p, x: p[0].T @ x + p[1][:, None], F.mse_loss)((w, b), x, y)
        assert_trees_close(result, wanted, EXACT)
        assert aux == (["aux", "aux"] if over == "samples" else "aux")


def drawing(p, x, y):
    """The losses of a network with dropout."""
    z = F.dropout(x @ p["w"] + p["b"], 0.5).tanh() @ p["v"]
    return F.cross_entropy(z, y, reduction="none")


def case(n=6, classes=3):
    rand = Numbers()
    params = {"w": rand(4, 5), "b": rand(5), "v": rand(5, classes)}
    return params, Numbers(1)(n, 4), Numbers(2).below(classes, n)


def logits(p, x):
    return (x @ p["w"] + p["b"]).tanh() @ p["v"]


class TestChunksAlone:
    """Over samples, f runs on each chunk as on a batch of its own."""

    @pytest.mark.quick
    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    def test_a_chunk_is_one_call_of_f(self, reduction):
        sizes, args = [], case()

        def f(p, x, y):
            sizes.append(len(x))
            return F.cross_entropy(logits(p, x), y, reduction=reduction)

        t = chunked(invfunc.clipped_grad(f, 0.1), chunk_size=4)
        t(*args)  # what f does with a few samples is looked at in the first call
        sizes.clear()
        found = t(*args)
        assert sizes == [4, 2]
        assert_trees_close(found, invfunc.clipped_grad(f, 0.1)(*args), EXACT)

    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_draw_as_a_loop_over_the_parts(self, size):
        params, *batch = case()

        def model(p, x):
            return F.dropout(logits(p, x), 0.5)

        def total(z, y):
            return F.cross_entropy(z, y, reduction="sum")

        def drawn(call):
            torch.manual_seed(0)
            return call(), torch.rand(1)

        def ours(t):
            return drawn(lambda: chunked(t, chunk_size=size, over="samples")(params, *batch))

        def looped(t, join):
            found, after = drawn(lambda: [t(params, *(z[a : a + size] for z in batch)) for a in range(0, 6, size)])
            return {name: join([part[name] for part in found]) for name in params}, after

        shares = looped(invfunc.batch_grad(drawing), torch.cat)
        assert_trees_close(ours(invfunc.batch_grad(drawing)), shares, EXACT)
        spread = tree.map_tensors(lambda g: g.var(0, correction=0), shares[0])
        assert_trees_close(ours(invfunc.variance(drawing)), (spread, shares[1]), EXACT)
        assert_trees_close(ours(diag_ggn(model, total)), looped(diag_ggn(model, total), sum), EXACT)

    @pytest.mark.quick
    @pytest.mark.parametrize("loss", MASKED.values(), ids=MASKED)
    @pytest.mark.parametrize("n", [2, 3, 6])
    def test_data_that_weigh_samples_are_seen_in_each_call(self, loss, n):
        """Also where the first call has nothing that is left out: the result is right, or refused."""
        params, x, y = case()
        t = invfunc.batch_grad(loss)
        c = chunked(t, n)
        for target in (y, y.where(torch.arange(6) > 0, -100), y):
            with suppress(invfunc.errors.SampleAxisError):
                assert_trees_close(c(params, x, target), t(params, x, target), EXACT)

    @pytest.mark.parametrize("n", [2, 6])
    @pytest.mark.parametrize("prepare", OF_THE_WHOLE_BATCH.values(), ids=OF_THE_WHOLE_BATCH)
    @pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
    def test_what_needs_the_whole_batch_is_never_wrong(self, n, prepare, reduction):
        params, x, y = case(5)
        t = invfunc.batch_grad(lambda p, x, y: F.cross_entropy(logits(p, prepare(x)), y, reduction=reduction))
        with suppress(invfunc.errors.SampleAxisError):
            found = chunked(t, n)(params, x, y)
            assert_trees_close(found, t(params, x, y), EXACT)

    @pytest.mark.parametrize("n", [2, 6])
    def test_samples_that_meet_are_refused(self, n):
        params, x, y = case()

        def normed(p, x, y):
            return F.cross_entropy(F.batch_norm(logits(p, x), None, None, training=True), y, reduction="none")

        def contrastive(p, x, y):
            z = F.normalize(logits(p, x), dim=1)
            return F.cross_entropy(z @ z.T, torch.arange(len(x)))

        for f in (normed, contrastive, lambda *args: normed(*args).mean()):
            with pytest.raises(invfunc.errors.SampleAxisError):
                chunked(invfunc.variance(f), n)(params, x, y)


def noted(passes, pull):
    def pulled(run, *args, **kwargs):
        passes.append(run.n)
        return pull(run, *args, **kwargs)

    return pulled


@pytest.mark.quick
class TestPasses:
    """Number of backward passes through f."""

    N, CLASSES = 5, 4

    @pytest.fixture(autouse=True)
    def counted(self, monkeypatch):
        self.passes = []
        for name in ("pull_columns", "stream"):
            monkeypatch.setattr(Run, name, noted(self.passes, getattr(Run, name)))

    def counting(self):
        calls, rand = [], Numbers()
        params = {"a": rand(3, 4), "b": [rand(4), rand(4, self.CLASSES)], "c": rand(self.CLASSES)}
        x, y = rand(self.N, 3), rand.below(self.CLASSES, self.N)

        def f(p, x):
            z = (x @ p["a"] + p["b"][0]).tanh() @ p["b"][1] + p["c"]
            calls.append(len(x))
            return z

        return f, (params, x, y), calls, self.passes

    @pytest.mark.parametrize("n", [1, 2, 3, 4, 100])
    @pytest.mark.parametrize("over, length", [("outputs", CLASSES - 1), ("samples", N), ("params", 4)])
    @pytest.mark.parametrize("alone", [True, False], ids=["f", "f, loss"])
    def test_are_exactly_n(self, over, length, alone, n):
        f, args, calls, passes = self.counting()
        t = diag_ggn(lambda p, x, y: F.cross_entropy(f(p, x), y)) if alone else diag_ggn(f, F.cross_entropy)
        chunked(t, n, over=over)(*args)
        assert len(passes) == min(n, length)

    @pytest.mark.parametrize("over, length", [("outputs", CLASSES - 1), ("samples", N), ("params", 4)])
    @pytest.mark.parametrize("size", [1, 2, 3])
    @pytest.mark.parametrize("n", [2, 3])
    def test_of_a_size_divide_each_chunk(self, over, length, size, n):
        f, args, calls, passes = self.counting()
        t = diag_ggn(f, F.cross_entropy)
        found = chunked(chunked(t, chunk_size=size, over=over), n, over=over)(*args)
        edges = [length * i // n for i in range(n + 1)]
        assert len(passes) == sum(-(-(b - a) // size) for a, b in zip(edges, edges[1:], strict=False))
        assert_trees_close(found, t(*args), EXACT)

    def test_over_samples_see_a_part_of_them_only(self):
        f, args, calls, passes = self.counting()
        chunked(diag_ggn(f, F.cross_entropy), 3, over="samples")(*args)
        assert max(calls) == 2
        assert len(passes) == 3


class TestWriting:
    @pytest.mark.parametrize("options", [{"n": 2}, {"chunk_size": 2}, {"n": 2, "over": "samples"}], ids=str)
    def test_decorator(self, options):
        net, y = network("affine", 5), Numbers(1).below(3, 5)

        @chunked(**options)
        @diag_ggn
        def t(p, x, y):
            return F.cross_entropy(net.f(p, x), y)

        args = (net.params, net.x, y)
        assert_trees_close(t(*args), dense_diag_ggn(net.f, F.cross_entropy)(*args), EXACT)

        @chunked(n=2, fold="sum")
        def g(p, x, y):
            return F.cross_entropy(net.f(p, x), y, reduction="sum")

        assert torch.allclose(g(*args), F.cross_entropy(net.f(*args[:2]), y, reduction="sum"))


class TestPlainFunctions:
    @staticmethod
    def f(p, x, y):
        z = (x @ p["w"]).tanh() + y[:, None]
        return {"cat": z, "sum": z.square().sum(), "mean": z.mean(), "deep": (z.exp().sum(0), [z[:, 0]])}

    FOLD = {"cat": "cat", "sum": "sum", "mean": "mean", "deep": ("sum", "cat")}

    @given(st.integers(1, 7), numbers_of_passes, st.booleans())
    def test_folds_are_a_prefix_of_the_output(self, length, n, by_size):
        args = ({"w": Numbers()(3, 2)}, Numbers(1)(length, 3), Numbers(2)(length))
        number = {"chunk_size": n} if by_size else {"n": n}
        assert_trees_close(chunked(self.f, **number, fold=self.FOLD)(*args), self.f(*args), EXACT)

    def test_folds_of_a_dict_may_come_in_another_order(self):
        args = ({"w": Numbers()(3, 2)}, Numbers(1)(5, 3), Numbers(2)(5))
        fold = dict(reversed(self.FOLD.items()))
        assert_trees_close(chunked(self.f, 2, fold=fold)(*args), self.f(*args), EXACT)

    @given(st.integers(1, 7), numbers_of_passes, numbers_of_passes)
    def test_nest(self, length, n, m):
        args = ({"w": Numbers()(3, 2)}, Numbers(1)(length, 3), Numbers(2)(length))
        twice = chunked(chunked(self.f, n, fold=self.FOLD), m, fold=self.FOLD)
        assert_trees_close(twice(*args), self.f(*args), EXACT)

    @given(st.integers(1, 7), numbers_of_passes)
    def test_calls_are_exactly_n_and_nearly_even(self, length, n):
        sizes = []
        chunked(lambda p, x: sizes.append(len(x)) or x, n)({}, torch.zeros(length))
        assert len(sizes) == min(n, length) and sum(sizes) == length and max(sizes) - min(sizes) <= 1

    @given(numbers_of_passes, st.integers(0, 1), st.sampled_from([0, 1, -1]))
    def test_samples_along_other_axes(self, n, first, out):
        w, x, y, shared = Numbers()(3, 2), Numbers(1)(5, 3), Numbers(2)(5, 2), Numbers(3)(2)

        def f(w, x, y, shared):
            z = (x.movedim(first, 0) @ w) * shared + y["y"][0]
            return z if out == 0 else z.T

        args = (w, x.movedim(0, first), {"y": [y], "note": None}, shared)
        found = chunked(f, n, in_dims=(first, 0, None), out_dims=out)(*args)
        assert_trees_close(found, f(*args), EXACT)

    @pytest.mark.parametrize("aux", ["a string", None, {"t": torch.ones(2)}], ids=repr)
    def test_aux_is_a_list_of_that_of_the_chunks(self, aux):
        result, found = chunked(lambda p, x: (x.sum(), aux), 2, fold="sum", has_aux=True)({}, torch.ones(5))
        assert result == 5 and found == [aux, aux]
