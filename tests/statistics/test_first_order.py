"""The statistics of the shares of a loss function against a plain loop."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import chunked, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing.oracles import assert_trees_close, loop_batch_grad, loop_sum_grad_squared
from tests.laws import OF_LOSSES
from tests.networks import LOSSES, networks, samples_loss
from tests.strategies import Numbers

EXACT = 1e-10
statistics = pytest.mark.parametrize("kind", OF_LOSSES.values(), ids=OF_LOSSES)
losses = st.sampled_from(LOSSES)
reductions = st.sampled_from([None, torch.sum, torch.mean])


def reduced(f, reduction):
    return f if reduction is None else lambda *args: reduction(f(*args))


def drawn(net, loss):
    return net.params, net.x, loss.target(Numbers(1), net.n)


@pytest.mark.quick
class TestShares:
    @given(networks(), losses)
    def test_carry_the_scale_of_the_loss(self, net, loss):
        f, args = samples_loss(net, loss), drawn(net, loss)
        each = loop_batch_grad(f)(*args)
        assert_trees_close(invfunc.batch_grad(f)(*args), each, EXACT)
        assert_trees_close(invfunc.batch_grad(reduced(f, torch.sum))(*args), each, EXACT)
        mean = tree.map_leaves(lambda g: g / net.n, each)
        assert_trees_close(invfunc.batch_grad(reduced(f, torch.mean))(*args), mean, EXACT)

    @given(networks(), losses, st.sampled_from([torch.sum, torch.mean]), st.booleans())
    def test_of_a_term_in_the_parameters_alone_are_an_nth(self, net, loss, reduction, before):
        f, args = samples_loss(net, loss), drawn(net, loss)

        def penalty(params):
            return sum(p.square().sum() for p in tree.leaves(params)) / 2

        def penalised(params, x, y):
            value = reduction(f(params, x, y))
            return penalty(params) + value if before else value + penalty(params)

        plain = invfunc.batch_grad(reduced(f, reduction))(*args)
        wanted = tree.map_leaves(lambda g, p: g + p / net.n, plain, args[0])
        assert_trees_close(invfunc.batch_grad(penalised)(*args), wanted, EXACT)

    def test_of_a_term_in_the_parameters_in_each_loss_are_whole(self):
        def f(w, x):
            return (x @ w).square() + w.square().sum()

        args = (Numbers()(3), Numbers(1)(4, 3))
        assert_trees_close(invfunc.batch_grad(f)(*args), loop_batch_grad(f)(*args), EXACT)

    def test_of_the_parameters_alone_are_not_defined(self):
        with pytest.raises(invfunc.errors.SampleAxisError, match="from the parameters alone"):
            invfunc.batch_grad(lambda w, x: w.square().sum())(Numbers()(3), Numbers(1)(4, 3))


@statistics
class TestEveryStatistic:
    def test_has_no_other_axes(self, kind):
        for over in {"outputs", "samples", "params"} - {*kind.axes}:
            with pytest.raises(ArgumentError, match=f"over='{over}'.*{', '.join(map(repr, kind.axes))}"):
                chunked(kind.make(F.mse_loss), 2, over=over)
        assert repr(chunked(kind.make(F.mse_loss), 2)).endswith(f"over='{kind.axes[0]}')")

    def test_is_zero_where_a_parameter_has_no_influence(self, kind):
        rand = Numbers()
        params = {"used": rand(3), "unused": rand(2, 2), "cut": rand(3), "rounded": rand(3)}
        params["selected"] = rand(2, 3)

        def f(p, x):
            z = x @ (p["used"] + p["cut"].detach() + p["rounded"].sign()) + x @ p["selected"][1]
            return z.square()

        args = (params, rand(4, 3))
        found = kind.make(f)(*args)
        assert_trees_close(found, kind.loop(f)(*args), EXACT)
        for part in found if isinstance(found, tuple) else (found,):
            if isinstance(part, dict) and {*part} == {*params}:
                assert not any(part[name].any() for name in ("unused", "cut", "rounded"))
                assert part["selected"].any()

    @pytest.mark.parametrize(
        "aux",
        ["a string", None, 3, (), {"deep": [None, "string", (1.5,)]}, [torch.ones(2), {"t": torch.arange(3)}]],
        ids=repr,
    )
    def test_hands_on_any_aux_as_the_last(self, kind, aux):
        def f(w, x):
            return (x @ w).square(), aux

        args = (Numbers()(3), Numbers(1)(4, 3))
        *result, found = kind.make(f, has_aux=True)(*args)
        wanted = kind.loop(lambda *a: f(*a)[0])(*args)
        assert_trees_close(tuple(result) if isinstance(wanted, tuple) else result[0], wanted, EXACT)
        assert tree.flatten(found)[1] == tree.flatten(aux)[1]
        for ours, theirs in zip(tree.leaves(found), tree.leaves(aux), strict=True):
            assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs

    def test_hands_on_aux_that_it_computed(self, kind):
        def f(w, x):
            z = x @ w
            return z.square().mean(), {"outputs": z, "sum": z.sum()}

        w, x = Numbers()(3), Numbers(1)(4, 3)
        *_, aux = kind.make(f, has_aux=True)(w, x)
        assert_trees_close(aux, f(w, x)[1], EXACT)
        assert not any(a.requires_grad for a in aux.values())

    @pytest.mark.parametrize("argnums", [0, 1, -2, (0, 1), (1, 0), (-3,)], ids=str)
    def test_takes_its_parameters_from_argnums(self, kind, argnums):
        rand = Numbers()
        args = ({"w": rand(3, 2)}, [rand(2), rand(2)], rand(5, 3))

        def f(a, b, x):
            return ((x @ a["w"]).tanh() * b[0] + b[1]).square().sum(1)

        wanted = [a % 3 for a in (argnums if isinstance(argnums, tuple) else (argnums,))]
        fixed = tuple(None for i in range(2) if i not in wanted)

        def of(params, x):
            given = dict(zip(wanted, params if isinstance(argnums, tuple) else [params], strict=True))
            return f(*(given.get(i, args[i]) for i in range(2)), x)

        params = tuple(args[a] for a in wanted) if isinstance(argnums, tuple) else args[argnums]
        found = kind.make(f, argnums=argnums, in_dims=(*fixed, 0))(*args)
        assert_trees_close(found, kind.loop(of)(params, args[2]), EXACT)

    @given(st.permutations(range(3)), st.integers(0, 2), st.booleans())
    def test_finds_its_samples_along_in_dims(self, kind, order, other, negative):
        rand = Numbers()
        w, x, y, scale = rand(3), rand(4, 2, 3), rand(4, 2, 2), rand(2)

        def f(w, x, y, scale):
            return ((x @ w) * scale - y[..., 0]).square().sum(1)

        back = [order.index(d) for d in range(3)]

        def moved(w, x, y, scale):
            return f(w, x.permute(back), y.movedim(other, 0), scale)

        at = order.index(0)
        in_dims = (at - 3 if negative else at, other, None)
        found = kind.make(moved, in_dims=in_dims)(w, x.permute(order), y.movedim(0, other), scale)
        assert_trees_close(found, kind.loop(f)(w, x, y, scale), EXACT)

    def test_keeps_keyword_arguments_constant(self, kind):
        def f(w, x, *, scale, name):
            assert name == "constant"
            return (x @ w * scale).square()

        args, kwargs = (Numbers()(3), Numbers(1)(4, 3)), {"scale": Numbers(2)(4), "name": "constant"}
        assert_trees_close(kind.make(f)(*args, **kwargs), kind.loop(f)(*args, **kwargs), EXACT)

    @pytest.mark.parametrize("leaf", ["tensor", "tuple", "list", "nested"])
    def test_is_shaped_like_the_parameters(self, kind, leaf):
        w, b = Numbers()(3, 2), Numbers(1)()
        nested = {"a": [w, {"b": b}], "c": (), "d": {}}
        params = {"tensor": w, "tuple": (w, b), "list": [w, b], "nested": nested}[leaf]

        def f(p, x):
            w, *b = tree.leaves(p)
            return (x @ w + sum(b)).cosh().sum(1)

        args = (params, Numbers(2)(4, 3))
        assert_trees_close(kind.make(f)(*args), kind.loop(f)(*args), EXACT)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_keeps_the_dtype(self, kind, dtype):
        params = {"w": Numbers()(3).to(dtype), "b": Numbers(1)().double()}

        def f(p, x):
            return ((x * p["w"]).sum(1).double() + p["b"]).square()

        found = kind.make(f)(params, Numbers(2)(4, 3).to(dtype))
        for part in found if isinstance(found, tuple) else (found,):
            kept = [x.dtype for x in tree.tensors((part,))]
            like = isinstance(part, dict) and {*part} == {*params}
            assert kept == ([dtype, torch.float64] if like else [torch.float64] * len(kept))

    def test_says_what_it_is(self, kind, request):
        assert repr(kind.make(F.mse_loss)).startswith(request.node.callspec.id.split()[0] + "(mse_loss")

    def test_refuses_a_module_and_parameters_that_are_not_real(self, kind):
        with pytest.raises(ArgumentTypeError, match=r"\(f.*Linear.*functional\(model\)"):
            kind.make(torch.nn.Linear(2, 2))
        for leaf in (torch.arange(2), torch.ones(2, dtype=torch.complex64)):
            with pytest.raises(ArgumentTypeError, match=rf"params\['b'\]\[0\] has dtype {leaf.dtype}.*real"):
                kind.make(lambda params, x: x @ params["a"])({"a": torch.ones(3), "b": [leaf]}, torch.ones(2, 3))


class TestVariance:
    @given(networks(low=2), losses, reductions, st.sampled_from([0, 1, 0.5]))
    def test_is_the_variance_of_the_shares(self, net, loss, reduction, correction):
        f, args = reduced(samples_loss(net, loss), reduction), drawn(net, loss)
        wanted = tree.map_leaves(lambda g: g.var(0, correction=correction), invfunc.batch_grad(f)(*args))
        assert_trees_close(invfunc.variance(f, correction=correction)(*args), wanted, EXACT)

    @given(networks(low=2), losses, st.sampled_from([torch.float32, torch.float64]))
    def test_is_never_negative(self, net, loss, dtype):
        params, x, y = drawn(net, loss)
        same = tree.map_tensors(lambda t: t[:1].expand_as(t).clone(), (x, y))  # the true variance is zero
        params, *batch = tree.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (params, *same))
        f = samples_loss(net, loss)
        found = invfunc.variance(f)(params, *batch)
        largest = loop_sum_grad_squared(f)(params, *batch)
        for v, g in zip(tree.leaves(found), tree.leaves(largest), strict=True):
            assert (v >= 0).all() and (v <= 1e-9 * g.max() + 1e-30).all()

    @pytest.mark.parametrize("called", ["linear", "positions", "bias", "convolution", "transposed", "tied", "scale"])
    @pytest.mark.parametrize("n", [5, 64])
    def test_is_exact_in_float32_where_the_mean_is_1000_deviations(self, called, n):
        rand = Numbers()
        f, params, shape = {
            "linear": (lambda w, x: (x @ w).sum(1), rand(5, 3), (5,)),
            "positions": (lambda w, x: (x @ w).sum((1, 2)), rand(5, 3), (40, 5)),
            "bias": (lambda b, x: ((x + b) * x).sum(1), rand(5), (5,)),
            "convolution": (lambda w, x: F.conv2d(x, w, padding=1).sum((1, 2, 3)), rand(2, 3, 3, 3), (3, 6, 6)),
            "transposed": (lambda w, x: F.conv_transpose1d(x, w, stride=2).sum((1, 2)), rand(2, 3, 3), (2, 6)),
            "tied": (lambda w, x: (x @ w @ w.T).sum(1), rand(5, 3).abs() + 1, (5,)),
            "scale": (lambda w, x: (x * w).sum((1, 2)), rand(5), (4, 5)),
        }[called]
        x = 1000 + rand(n, *[1] * len(shape)) + rand(n, *shape) / 4
        params, x = params.float(), x.float()
        shares = loop_batch_grad(f)(params.double(), x.double())
        assert 300 < (shares.mean(0).abs() / shares.std(0)).median() < 3000
        assert_trees_close(invfunc.variance(f)(params, x), shares.var(0, correction=0), 1e-3)


class TestLowPrecision:
    @statistics
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("shape", [(320, 2), (3, 512, 2)], ids=["samples", "positions"])
    def test_sums_are_accumulated_in_float32(self, kind, dtype, shape):
        """A bfloat16 sum of ones stops at 256."""

        def f(w, x):
            return (x * w).flatten(1).sum(1)

        w, x = torch.zeros(2, dtype=dtype), torch.full(shape, 1 / 16, dtype=dtype)
        found, wanted = kind.make(f)(w, x), kind.loop(f)(w.double(), x.double())
        assert all(leaf.dtype == dtype for leaf in tree.leaves(found))
        assert_trees_close(found, wanted, torch.finfo(dtype).eps, 1.0)

    @statistics
    def test_under_autocast_results_have_the_precision_of_the_parameters(self, kind, device):
        w, v, x, y = (
            t.float().to(device) for t in (Numbers()(4, 6), Numbers(1)(3, 4), Numbers(2)(5, 6), Numbers(3)(5, 3))
        )

        def f(params, x, y):
            return (F.linear(F.linear(x, params[0]).sigmoid(), params[1]).float() - y).square().sum(1)

        def low(*args):
            with torch.autocast(device.type, torch.bfloat16):
                return f(*args)

        found = kind.make(low)((w, v), x, y)
        assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(found))
        assert_trees_close(found, kind.loop(f)((w, v), x, y), 5e-2)
