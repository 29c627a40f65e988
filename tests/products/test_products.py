"""Products with curvature matrices against the matrices: every network and loss, in both forms."""

from functools import partial
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import diag_ggn, functional, ggnvp, hvp, kfac, linearize, outputs, tree
from invfunc.errors import ArgumentError, ConvexityError
from invfunc.testing import assert_trees_close
from invfunc.testing.memory import peak_memory
from invfunc.testing.models import moved
from tests import matrices
from tests.criteria import after_logarithms, cross_entropies, elementwise, model
from tests.laws import composed
from tests.matrices import assert_near, flat
from tests.networks import LOSSES, network, networks
from tests.statistics.test_diag_ggn import CONVEX, NOT_CONVEX
from tests.strategies import Numbers

RTOL = {torch.float64: 1e-8, torch.float32: 1e-4}
reductions = st.sampled_from(["mean", "sum", "none"])


def vectors(params, *lead, seed=3):
    rand = Numbers(seed)
    return tree.map_leaves(lambda p: rand(*lead, *p.shape).to(p), params)


def arranged(net, loss, reduction):
    """A loss for the outputs of a network, and the arguments."""
    target = loss.target(Numbers(1), net.n)
    if net.called == "sequence":  # one loss for each step
        target = torch.stack([target, loss.target(Numbers(2), net.n)], 1)

    def criterion(z, y):
        if z.ndim == 3:
            z, y = z.transpose(1, 2), y.transpose(1, 2) if y.ndim == 3 else y
        found = loss(z, y, reduction)
        return found if found.ndim < 2 else found.flatten(1).sum(1)

    return criterion, (net.params, net.x, target)


@pytest.mark.quick
class TestOfAnyNetwork:
    @given(net=networks(sequences=True), loss=st.sampled_from(LOSSES), reduction=reductions)
    def test_equal_the_dense_matrices(self, device, dtype, net, loss, reduction):
        """hvp, ggnvp and their blocks, of a loss function, and of a model with its loss."""
        criterion, args = arranged(net, loss, reduction)
        args = moved(args, dtype, device)
        f, params, rtol = composed(net.f, criterion), args[0], RTOL[dtype]
        hessian, ggn = matrices.hessian(f, *args), matrices.ggn(net.f, criterion, *args)
        rows = vectors(params, 2)
        for product, block, matrix in (
            (hvp, partial(hvp, blocks=True), hessian),
            (ggnvp, partial(ggnvp, blocks=True), ggn),
        ):
            for given_as in ((f,), (net.f, criterion)):
                found = matrices.of(product(*given_as), *args)
                assert_near(found, matrix, rtol)
                assert_near(found, found.T, rtol)
                v = vectors(params)
                assert_near(flat(product(*given_as)(params, v, *args[1:])), matrix @ flat(v), 10 * rtol)
                of_blocks = tree.leaves(block(*given_as)(params, rows, *args[1:]))
                for b, x, y in zip(matrices.blocks(matrix, params), tree.leaves(rows), of_blocks, strict=True):
                    assert y.shape == x.shape and y.dtype == dtype
                    assert_near(y.flatten(1), x.flatten(1) @ b.T, 10 * rtol)

    @given(net=networks(sequences=True))
    def test_the_jacobian(self, device, dtype, net):
        params, x = moved((net.params, net.x), dtype, device)
        wanted, rtol = matrices.jacobian(net.f, params, x), RTOL[dtype]
        z, jvp, vjp = linearize(net.f)(params, x)
        torch.testing.assert_close(z, net.f(params, x), rtol=0 if device.type == "cpu" else rtol, atol=0)
        assert not z.requires_grad
        v, c = vectors(params), vectors(z)
        assert jvp(v).shape == z.shape
        assert_near(flat(jvp(v)), wanted @ flat(v), 10 * rtol)
        assert_near(flat(vjp(c)), wanted.T @ flat(c), 10 * rtol)


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")  # torch's, about kl_div
class TestLosses:
    @pytest.mark.parametrize("criteria", [cross_entropies(), elementwise(), after_logarithms()], ids=str)
    @given(data=st.data())
    def test_every_option_of_torchs_losses(self, criteria, data):
        criterion = data.draw(criteria)
        f, params = model(criterion.one)
        args = (params, Numbers(1)(len(criterion.target), 2), criterion.target)
        wanted = matrices.ggn(f, criterion.loss, *args)
        assert_near(matrices.of(ggnvp(f, criterion.loss), *args), wanted, 1e-8, 1e-6)
        assert_near(matrices.of(ggnvp(composed(f, criterion.loss)), *args), wanted, 1e-8, 1e-6)
        hessian = matrices.hessian(composed(f, criterion.loss), *args)
        assert_near(matrices.of(hvp(f, criterion.loss), *args), hessian, 1e-8, 1e-6)

    @pytest.mark.parametrize("loss", CONVEX.values(), ids=CONVEX)
    def test_those_of_the_user(self, loss):
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3))
        wanted = matrices.ggn(f, loss, *args)
        assert_near(matrices.of(ggnvp(f, loss), *args), wanted, 1e-8)
        assert_near(matrices.of(ggnvp(lambda p, x, y: loss(outputs(f(p, x)), y)), *args), wanted, 1e-8)

    @pytest.mark.parametrize("loss", NOT_CONVEX.values(), ids=NOT_CONVEX)
    @pytest.mark.parametrize("transform", [ggnvp, partial(ggnvp, blocks=True)], ids=["whole", "blocks"])
    def test_one_that_is_not_convex_is_refused_and_has_a_hessian(self, transform, loss):
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3))
        for product in (transform(f, loss), transform(lambda p, x, y: loss(outputs(f(p, x)), y))):
            with pytest.raises(ConvexityError, match="not convex in the outputs"):
                product.linearize(*args)
        assert_near(matrices.of(hvp(f, loss), *args), matrices.hessian(composed(f, loss), *args), 1e-8)


class TestVectors:
    def test_trees_may_have_another_order(self):
        net = network("affine")
        v = vectors(net.params)
        other = dict(reversed(v.items()))
        args = (net.x, LOSSES[0].target(Numbers(1), net.n))
        found = ggnvp(net.f, LOSSES[0])(net.params, other, *args)
        assert list(found) == list(net.params)
        assert_trees_close(found, ggnvp(net.f, LOSSES[0])(net.params, v, *args), 0)


# Products of one vector by forward mode: where it is taken, and where it would give something else

P = {"a": Numbers(1)(3, 4), "b": Numbers(2)(4, 3)}
X, Y = Numbers(3)(5, 3), Numbers(4).below(3, 5)


def plain(p, x):
    return (x @ p["a"]).tanh() @ p["b"]


def with_a_constant(p, x):
    z = plain(p, x)
    with torch.no_grad():
        size = z.square().sum()
    return z * size


def detached(p, x):
    z = plain(p, x)
    return z * z.detach().sum()


class Bent(torch.autograd.Function):
    """A function of the user, which has no derivative in forward mode."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


def attention(p, x):
    h = x @ p["a"]
    return F.scaled_dot_product_attention(*[h.view(1, 1, 5, 4)] * 3).view(5, 4) @ p["b"]


MODELS = {
    "plain": plain,
    "constant": with_a_constant,
    "detached": detached,
    "no derivative": lambda p, x: Bent.apply(plain(p, x)),
    "attention": attention,
    "logarithm": lambda p, x: plain(p, x) - F.log_softmax(plain(p, x), 1),
}
ALONE = {
    "criterion": lambda f: lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="sum"),
    "logarithm": lambda f: lambda p, x, y: F.nll_loss(F.log_softmax(f(p, x), 1), y, reduction="sum"),
    "marked": lambda f: lambda p, x, y: -outputs(f(p, x)).log_softmax(1).gather(1, y[:, None]).sum(),
}


@pytest.mark.parametrize("model", MODELS)
def test_products_are_those_of_the_matrices(model):
    f, v = MODELS[model], vectors(P)
    loss = lambda z, y: F.cross_entropy(z, y, reduction="sum")  # noqa: E731
    wanted = matrices.ggn(f, loss, P, X, Y) @ flat(v)
    products = [ggnvp(f, loss), *[ggnvp(make(f)) for make in ALONE.values()]]
    for product in products * 2:  # what forward mode has not is known the second time
        assert_near(flat(product(P, v, X, Y)), wanted, 1e-9)
    each = lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="none")  # noqa: E731
    wanted = matrices.fisher(each, P, X, Y) @ flat(v)
    for product in (
        ggnvp(each, fisher="empirical"),
        ggnvp(f, lambda z, y: F.cross_entropy(z, y, reduction="none"), fisher="empirical"),
    ):
        assert_near(flat(product(P, v, X, Y)), wanted, 1e-9)


def test_one_that_draws_from_its_own_generator_is_of_one_run():
    def drawn(generator):
        def f(p, x):
            return plain(p, x) * torch.rand(3, generator=generator, dtype=torch.float64)

        return f

    runs = []
    f = drawn(torch.Generator().manual_seed(0))

    def seen(p, x):
        runs.append(f(p, x))
        return runs[-1]

    v = vectors(P)
    found = ggnvp(seen, F.mse_loss)(P, v, X, X)
    scale = (runs[-1].detach() / plain(P, X)).mean(0)
    wanted = matrices.ggn(lambda p, x: plain(p, x) * scale, F.mse_loss, P, X, X) @ flat(v)
    assert_near(flat(found), wanted, 1e-9)


def test_an_output_that_no_parameter_reaches():
    y, v = torch.zeros(5, 3, dtype=torch.float64), vectors(P)

    def loss(z, y):
        return F.mse_loss(z[0] * z[1].detach().exp(), y)

    wanted = matrices.ggn(plain, lambda z, y: F.mse_loss(z * X.exp(), y), P, X, y) @ flat(v)
    for product in (ggnvp(lambda p, x: (plain(p, x), x), loss), ggnvp(lambda p, x: (plain(p, x), x[:, :3]), loss)):
        found = product(P, v, X, y)
        assert_near(flat(found), wanted, 1e-9)
        assert not any(g.requires_grad for g in tree.leaves(found))


def test_memory_is_less_than_that_of_a_linearisation():
    """A linearisation takes the memory of two gradients."""
    layers = [m for _ in range(8) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
    f, params = functional(torch.nn.Sequential(*layers))
    x, y = torch.randn(4096, 64), torch.randn(4096, 64)
    v, product = tree.map_tensors(torch.ones_like, params), ggnvp(f, F.mse_loss)

    def peak(call):
        return min(peak_memory(call)[1] for _ in range(3))

    assert peak(lambda: product(params, v, x, y)) < 0.8 * peak(lambda: product.linearize(params, x, y)(v))


class TestHeads:
    """Of a cross entropy over many classes nothing like the logits is kept beside them."""

    @pytest.mark.parametrize("form", ["of a model", "of a loss", "several"])
    def test_of_many_classes_equal_the_matrix_and_write_to_nothing_of_the_callers(self, form, monkeypatch):
        """In blocks of positions; where the outputs are the parameters themselves, J v is v."""
        monkeypatch.setattr("invfunc.thresholds.CACHE", {"cpu": 100})
        x, y = Numbers(1)(4, 3, 7), Numbers(2).below(7, 4, 3)
        y[0] = -100

        def f(p, x):
            return p + x

        def loss(z, y):
            return F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1)

        p, v = Numbers(3)(4, 3, 7), Numbers(4)(2, 4, 3, 7)
        before, matrix = v.clone(), matrices.ggn(f, loss, p, x, y)
        product = ggnvp(f, loss) if form == "of a model" else ggnvp(composed(f, loss))
        if form == "several":
            found = torch.vmap(product.linearize(p, x, y))(v)
        else:
            found = torch.stack([product(p, one, x, y) for one in v])
        assert_near(found.flatten(1), v.flatten(1) @ matrix, 1e-12)
        assert torch.equal(v, before)

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("laid", ["flat", "classes in front", "classes behind"])
    def test_rows_equal_what_is_taken_at_once(self, laid, reduction, monkeypatch):
        """Products, linearised and differentiated, Fisher matrices, and drawn columns."""
        x, y = Numbers(1)(4, 3, 5), Numbers(2).below(7, 4, 3)
        y[0, 1:] = -100
        params, v = ({"w": Numbers(k)(7, 5), "s": Numbers(k + 1)(5)} for k in (3, 5))

        def f(p, x):
            z = F.linear(x * p["s"].tanh(), p["w"])
            return z.transpose(1, 2) if laid == "classes in front" else z

        def loss(z, y):
            z = z.flatten(0, 1) if laid == "flat" else z if laid == "classes in front" else z.transpose(1, 2)
            return F.cross_entropy(z, y.flatten() if laid == "flat" else y, reduction=reduction)

        def each(p, x, y):
            return loss_of_each(f(p, x), y)

        def loss_of_each(z, y):
            z = z if laid == "classes in front" else z.transpose(1, 2)
            return F.cross_entropy(z, y, reduction="none").sum(1)

        def found():
            source, product = torch.Generator().manual_seed(0), ggnvp(composed(f, loss))
            wanted = tree.map_tensors(lambda p: p.clone().requires_grad_(), params)
            leaves = tree.tensors(product(wanted, v, x, y))
            return [
                ggnvp(f, loss)(params, v, x, y),
                product.linearize(params, x, y)(v),
                torch.autograd.grad([t.sum() for t in leaves], tree.tensors(wanted)),
                ggnvp(each, fisher="empirical")(params, v, x, y),
                ggnvp(f, loss_of_each, fisher="empirical").linearize(params, x, y)(v),
                ggnvp(f, loss, fisher="mc", generator=source)(params, v, x, y),
                diag_ggn(f, loss, mc_samples=2, generator=source)(params, x, y),
            ]

        monkeypatch.setattr("invfunc.thresholds.LOGITS", 2**60)
        at_once = found()
        monkeypatch.setattr("invfunc.thresholds.LOGITS", 0)
        monkeypatch.setattr("invfunc.thresholds.CACHE", {"cpu": 100})
        assert_trees_close(found(), at_once, 1e-12, 1e-12)

    @pytest.mark.parametrize("limit", [0, 2**60])
    @pytest.mark.parametrize("behind", [False, True])
    def test_losses_that_write_into_the_outputs_are_right_or_refused(self, behind, limit, monkeypatch):
        """Of a copy of small outputs; a product wants the outputs as they were."""
        monkeypatch.setattr("invfunc.thresholds.LOGITS", limit)
        w, v, x, y = Numbers(1)(3, 2), Numbers(4)(3, 2), Numbers(2)(4, 3), Numbers(3)(4, 2)
        source = torch.Generator().manual_seed(0)

        def f(w, x):
            return x @ w

        def loss(z, y):
            found = F.mse_loss(z if behind else z.mul_(2), y)
            if behind:
                z.mul_(3)
            return found

        def f_marked(w, x, y):
            return loss(outputs(f(w, x)), y)

        def f_behind(w, x, y):
            return loss(f(w, x).clone(), y)

        wanted = diag_ggn(f, F.mse_loss)(w, x, y) * (1 if behind else 4)
        for t in (diag_ggn(f, loss), diag_ggn(f_marked), diag_ggn(f_behind)):
            try:
                found = t(w, x, y)
            except ArgumentError as error:
                assert "in place" in str(error)
            else:
                assert_near(found, wanted, 1e-12)
        for t in (ggnvp(f, loss), ggnvp(f_marked), ggnvp(f, loss, fisher="mc", generator=source)):
            for call in (t, lambda w, v, x, y, t=t: t.linearize(w, x, y)(v)):
                with pytest.raises(ArgumentError, match="in place"):
                    call(w, v, x, y)
        if not behind:
            assert_near(hvp(f, loss)(w, v, x, y), hvp(f, lambda z, y: F.mse_loss(2 * z, y))(w, v, x, y), 1e-12)

    def test_take_few_tensors_like_the_logits(self):
        """2.2 in forward mode, where torch's own products take 10, in a linearisation, and of drawn K-factors."""
        n, classes = 512, 30000
        params = {"u": torch.randn(16, 16), "w": torch.randn(classes, 16) / 10}
        x, y = torch.randn(n, 16), torch.randint(classes, (n,))
        v, size = tree.map_tensors(torch.randn_like, params), 4 * n * classes
        of = lambda p, x: F.linear((x @ p["u"]).tanh(), p["w"]), F.cross_entropy
        calls = [
            lambda: ggnvp(*of)(params, v, x, y),
            lambda: ggnvp(composed(*of))(params, v, x, y),
            lambda: ggnvp(*of).linearize(params, x, y)(v),
            lambda: kfac(*of, mc_samples=1, generator=torch.Generator())(params, x, y),
        ]
        for call in calls:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
                call()
            events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
            held = accumulate(event.nbytes() for event in events if event.name() == "[memory]")
            assert size < max(held) < 2.4 * size, calls.index(call)
