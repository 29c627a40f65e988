"""gram and batch_jacobian, of losses and of models: against plain loops, torch.func and each other."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import batch_jacobian, chunked, gram, tree
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.testing import assert_trees_close, loop_batch_jacobian
from tests.laws import OF_MODELS
from tests.networks import networks
from tests.statistics.test_first_order import EXACT
from tests.strategies import Numbers

of_models = pytest.mark.parametrize("kind", OF_MODELS.values(), ids=OF_MODELS)


def rows(result, params, ndim):
    """All entries of the parameters of each row of a Jacobian with `ndim` dimensions of outputs, samples included."""
    flat = [
        j.flatten(ndim) if p.ndim else j[..., None] for j, p in zip(*map(tree.leaves, (result, params)), strict=True)
    ]
    return torch.cat([j.reshape(-1, j.shape[-1]) for j in flat], 1)


@of_models
class TestOfModels:
    @given(networks(sequences=True))
    def test_equals_the_loop(self, kind, net):
        assert_trees_close(kind.make(net.f)(net.params, net.x), kind.loop(net.f)(net.params, net.x), EXACT)

    @given(st.data(), networks(sequences=True))
    def test_does_not_depend_on_chunks(self, kind, data, net):
        t = divided = kind.make(net.f)
        for over in data.draw(st.lists(st.sampled_from(kind.axes), min_size=1, max_size=3)):
            divided = chunked(divided, data.draw(st.integers(1, 6)), over=over)
        assert_trees_close(divided(net.params, net.x), t(net.params, net.x), EXACT)

    def test_has_no_other_axes(self, kind):
        for over in {"outputs", "samples", "params", "rows"} - {*kind.axes}:
            with pytest.raises(ArgumentError, match=f"over='{over}'.*{', '.join(map(repr, kind.axes))}"):
                chunked(kind.make(F.linear), 2, over=over)
        assert repr(chunked(kind.make(F.linear), 2)).endswith(f"over='{kind.axes[0]}')")

    @given(st.permutations(range(3)), st.integers(-3, 2))
    def test_finds_its_samples_along_in_dims_and_out_dims(self, kind, order, out):
        w, x, scale = Numbers()(3, 2), Numbers(1)(4, 2, 3), Numbers(2)(2)

        def f(w, x, scale):
            return (x @ w).tanh() * scale

        back = [order.index(d) for d in range(3)]
        t = kind.make(lambda w, x, s: f(w, x.permute(back), s).movedim(0, out), in_dims=(back[0], None), out_dims=out)
        assert_trees_close(t(w, x.permute(order), scale), kind.loop(f)(w, x, scale), EXACT)

    @pytest.mark.parametrize("argnums", [0, -2, (1,), (1, 0)], ids=str)
    def test_takes_its_parameters_from_argnums(self, kind, argnums):
        rand = Numbers()
        args = ({"w": rand(3, 2), "more": [rand(2)]}, rand(2), rand(5, 3))

        def f(a, b, x, *, scale):
            return (x @ a["w"] * a["more"][0]).tanh() * b * scale

        wanted = [a % 3 for a in (argnums if isinstance(argnums, tuple) else (argnums,))]
        fixed = tuple(None for i in range(2) if i not in wanted)

        def of(params, x, **kwargs):
            given = dict(zip(wanted, params if isinstance(argnums, tuple) else [params], strict=True))
            return f(*(given.get(i, args[i]) for i in range(2)), x, **kwargs)

        params = tuple(args[a] for a in wanted) if isinstance(argnums, tuple) else args[argnums]
        found = kind.make(f, argnums=argnums, in_dims=(*fixed, 0))(*args, scale=2)
        assert_trees_close(found, kind.loop(of)(params, args[2], scale=2), EXACT)

    @pytest.mark.parametrize("aux", ["a string", None, {"deep": [None, (1.5,)]}, torch.ones(2)], ids=repr)
    def test_hands_on_any_aux_as_the_last(self, kind, aux):
        w, x = Numbers()(3, 2), Numbers(1)(4, 3)
        for over in kind.axes:
            whole = kind.make(lambda w, x: (x @ w, (aux, len(x))), has_aux=True)
            for t in (whole, chunked(whole, 2, over=over)):
                result, told = t(w, x)
                assert_trees_close(result, kind.loop(lambda w, x: x @ w)(w, x), EXACT)
                chunks = told if over == "samples" and t is not whole else [told]
                assert sum(n for _, n in chunks) == 4
                for found, _ in chunks:
                    assert torch.equal(found, aux) if isinstance(aux, torch.Tensor) else found == aux

    def test_is_zero_where_a_parameter_has_no_influence(self, kind):
        rand = Numbers()
        args = ({"used": rand(3, 2), "unused": rand(2, 2), "cut": rand(2), "scalar": rand()}, rand(4, 3))

        def f(p, x):
            return x @ p["used"] + p["cut"].detach()

        found = kind.make(f)(*args)
        assert_trees_close(found, kind.loop(f)(*args), EXACT)
        assert isinstance(found, torch.Tensor) or not any(found[name].any() for name in ("unused", "cut", "scalar"))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    def test_sums_are_accumulated_in_float32(self, kind, dtype):
        """A bfloat16 sum of sixteenths stops at 16."""

        def f(w, x):
            return (x * w).sum(1)

        w, x = torch.zeros(2, dtype=dtype), torch.full((3, 512, 2), 1 / 16, dtype=dtype)
        found = kind.make(f)(w, x)
        assert all(leaf.dtype == dtype for leaf in tree.leaves(found))
        assert_trees_close(found, kind.loop(f)(w.double(), x.double()), torch.finfo(dtype).eps)

    def test_under_autocast_results_have_the_precision_of_the_parameters(self, kind, device):
        w, v, x = (t.float().to(device) for t in (Numbers()(4, 6), Numbers(1)(3, 4), Numbers(2)(5, 6)))

        def f(params, x):
            return F.linear(F.linear(x, params[0]).sigmoid(), params[1]).float()

        def low(*args):
            with torch.autocast(device.type, torch.bfloat16):
                return f(*args)

        found = kind.make(low)((w, v), x)
        assert all(leaf.dtype == torch.float32 for leaf in tree.leaves(found))
        assert_trees_close(found, kind.loop(f)((w, v), x), 5e-2)

    def test_refuses_samples_that_are_mixed(self, kind):
        with pytest.raises(SampleAxisError, match="`mean`|`sub`"):
            kind.make(lambda w, x: x @ w - (x @ w).mean(0))(Numbers()(3, 2), Numbers(1)(4, 3))


def forked(p, x):
    """A tree of outputs of several sizes: an [N], an image for each sample, one of the data alone."""
    z = (x @ p["w"]).tanh()
    return {"sum": z.sum(1) * p["s"], "more": [z[:, :, None] * p["v"], (x[:, :2],)]}


FORK = {"w": Numbers()(3, 2), "v": Numbers(1)(4), "s": Numbers(2)()}


class TestJacobian:
    @pytest.mark.parametrize("over", [None, "outputs", "samples", "params"])
    @pytest.mark.parametrize("n", [1, 4])
    def test_of_a_tree_of_outputs_is_a_tree_of_these(self, over, n):
        x = Numbers(3)(n, 3)
        t = batch_jacobian(forked) if over is None else chunked(batch_jacobian(forked), 2, over=over)
        assert_trees_close(t(FORK, x), torch.func.jacrev(forked)(FORK, x), EXACT)
        assert_trees_close(t(FORK, x), loop_batch_jacobian(forked)(FORK, x), EXACT)


class TestErrors:
    w, x = Numbers()(3, 2), Numbers(1)(4, 3)

    @pytest.mark.parametrize(
        "returned", [lambda z: z.sum(), lambda z: (z, z.mean()), lambda z: z.T, lambda z: z.argmax(1), lambda z: None]
    )
    def test_jacobian_refuses_what_no_model_returns(self, returned):
        t = batch_jacobian(lambda w, x: returned(x @ w))
        with pytest.raises(ArgumentError, match=r"batch_jacobian\(<lambda>\)\(w, x\): f returned"):
            t(self.w, self.x)

    def test_jacobian_of_a_loss_function_says_so(self):
        with pytest.raises(ArgumentError, match=r"shape \(\) for N = 4.*loss function.*model function"):
            batch_jacobian(lambda w, x: (x @ w).sum())(self.w, self.x)

    @pytest.mark.parametrize("returned", [lambda z: (z, z), lambda z: {"z": z}, lambda z: z.sum(0), lambda z: None])
    def test_gram_refuses_what_is_neither_losses_nor_one_output(self, returned):
        with pytest.raises(ArgumentError, match=r"gram\(<lambda>\)\(w, x\): f returned"):
            gram(lambda w, x: returned(x @ w))(self.w, self.x)

    @pytest.mark.parametrize("transform", [gram, batch_jacobian])
    def test_both_refuse_modules_and_parameters_that_are_not_real(self, transform):
        with pytest.raises(invfunc.errors.ArgumentTypeError, match=r"f is.*Linear.*functional\(model\)"):
            transform(torch.nn.Linear(2, 2))
        for leaf in (torch.arange(2), torch.ones(2, dtype=torch.complex64)):
            with pytest.raises(invfunc.errors.ArgumentTypeError, match=rf"p\['b'\] has dtype {leaf.dtype}.*real"):
                transform(lambda p, x: x @ p["a"])({"a": self.w, "b": leaf}, self.x)
