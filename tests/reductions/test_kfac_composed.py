"""kfac and its relatives: their options, in chunks, under transforms of torch.func, and what they refuse."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from invfunc import chunked, diag_ggn, ekfac, kfac, reduced
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close
from tests.networks import LOSSES, total
from tests.reductions.test_kfac import SHARINGS, assert_factors, built, matrices
from tests.strategies import Numbers, seeded

EXACT, DERIVED = 1e-9, 1e-7
MAKERS = {
    "exact kfac": partial(kfac, fisher="exact"),
    "kfac": lambda f, loss=None, **options: kfac(f, loss, mc_samples=3, generator=seeded(), **options),
    "empirical": partial(kfac, fisher="empirical"),
}


def arranged(called, loss=LOSSES[0]):
    _, f, params, x = built(called)
    return f, (params, x, loss.target(Numbers(1), len(x)))


def factors(found):
    return {name: matrices(k) for name, k in found.items() if k is not None}


class TestArguments:
    def test_trees_argnums_aux_and_keywords(self):
        w, v, x, y = Numbers(1)(3, 2), Numbers(2)(2, 3), Numbers(3)(4, 3), Numbers(4)(4, 3)

        def f(a, x, b, *, scale):
            return (x @ a["w"] * scale).tanh() @ b[0], "aux"

        wanted = kfac(lambda p, x: (x @ p["w"] * 2).tanh() @ p["v"], F.mse_loss, fisher="exact")({"w": w, "v": v}, x, y)
        t = kfac(f, F.mse_loss, argnums=(2, 0), has_aux=True, fisher="exact")
        ((second,), first), aux = t({"w": w}, x, [v], y, scale=2)
        assert aux == "aux"
        assert_trees_close(matrices(first["w"]), matrices(wanted["w"]), EXACT)
        assert_trees_close(matrices(second), matrices(wanted["v"]), EXACT)

    @pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
    def test_samples_along_other_axes(self, make):
        f, (params, x, y) = arranged("positions")
        wanted = factors(make(f, LOSSES[0])(params, x, y))
        found = make(
            lambda p, x: f(p, x.movedim(1, 0)).T, lambda z, y: F.cross_entropy(z.T, y), in_dims=(1, 0), out_dims=1
        )
        assert_factors(found(params, x.movedim(0, 1), y), wanted, EXACT)

    def test_time_first(self):
        """The positions are the same, wherever they stand."""
        rand = Numbers(2)
        params, x, y = {"w": rand(3, 3), "v": rand(3, 2)}, rand(2, 4, 3), rand(2, 4, 2)

        def f(p, x):
            return torch.cumsum((x @ p["w"]).tanh(), 0) @ p["v"]

        def other(p, x):
            return torch.cumsum((x @ p["w"]).tanh(), 1) @ p["v"]

        for sharing in SHARINGS:
            found = kfac(f, F.mse_loss, weight_sharing=sharing, in_dims=1, out_dims=1, fisher="exact")(params, x, y)
            wanted = kfac(other, F.mse_loss, weight_sharing=sharing, fisher="exact")(
                params, x.transpose(0, 1), y.transpose(0, 1)
            )
            assert_factors(found, factors(wanted), EXACT)

    @pytest.mark.parametrize("fisher", ["exact", "empirical"])
    def test_says_which_columns_it_has(self, fisher):
        assert repr(kfac(F.linear, F.mse_loss, fisher=fisher)) == f"kfac(linear, mse_loss, fisher={fisher!r})"


NOT_LINEAR = {
    "exp(w) @ x": lambda p, x: x @ p["w"].exp(),
    "w * w": lambda p, x: x @ (p["w"] * p["w"]),
    "masked": lambda p, x: x @ p["w"].tril(),
    "low rank": lambda p, x: x @ (p["w"] @ p["w"].T),
}


class TestRefusals:
    x, y = Numbers(1)(4, 3), Numbers(2)(4, 3)

    @pytest.mark.parametrize("f", NOT_LINEAR.values(), ids=NOT_LINEAR)
    @pytest.mark.parametrize(
        "make", [partial(kfac, fisher="exact"), partial(ekfac, fisher="exact")], ids=["exact", "ekfac"]
    )
    def test_a_parameter_that_no_operation_is_linear_in(self, make, f):
        with pytest.raises(ArgumentError, match=r"\['w'\]"):
            make(f, F.mse_loss)({"w": Numbers(3)(3, 3)}, self.x, self.y)

    @pytest.mark.parametrize(
        "make",
        [partial(kfac, fisher="exact"), partial(ekfac, fisher="exact"), kfra],
        ids=["exact", "ekfac", "kfra"],
    )
    def test_name_all_parameters_at_once(self, make):
        def f(p, x):
            return (x @ p["w"].exp()).tanh() @ p["fine"] @ p["v"].tril()

        params = {name: Numbers(i)(3, 3) for i, name in enumerate(("w", "fine", "v"))}
        with pytest.raises(ArgumentError, match=r"\['w'\]: .*; .*\['v'\]: .*'diagonal'.*'skip'") as error:
            make(f, F.mse_loss)(params, self.x, self.y)
        assert "fine" not in str(error.value)

    @pytest.mark.parametrize("f", NOT_LINEAR.values(), ids=NOT_LINEAR)
    @pytest.mark.parametrize("loss", LOSSES[:3], ids=repr)
    def test_or_have_the_diagonal_of_their_block(self, f, loss):
        args = {"w": Numbers(3)(3, 3)}, self.x, loss.target(Numbers(1), 4)
        wanted = diag_ggn(f, loss)(*args)["w"]
        for make in (partial(kfac, fisher="exact"), partial(ekfac, fisher="exact")):
            found = make(f, loss, unsupported="diagonal")(*args)["w"]
            assert_trees_close(found.dense(), wanted.flatten().diag(), EXACT)
            assert_trees_close(found.solve(found @ args[0]["w"] + args[0]["w"], 1.0), args[0]["w"], EXACT)
        drawn = kfac(f, loss, mc_samples=2, generator=seeded(), unsupported="diagonal")(*args)["w"]
        same = diag_ggn(f, loss, mc_samples=2, generator=seeded())(*args)["w"]
        assert_trees_close(drawn.dense(), same.flatten().diag(), EXACT)

    @pytest.mark.parametrize("over", ["outputs", "samples", "params"])
    def test_or_are_left_out(self, over):
        def f(p, x):
            return x @ p["w"].exp() @ p["v"]

        args = {"w": Numbers(3)(3, 3), "v": Numbers(2)(3, 3)}, self.x, self.y
        v = matrices(kfac(lambda v, x: f(args[0] | {"v": v}, x), F.mse_loss, fisher="exact")(args[0]["v"], *args[1:]))
        for unsupported in ("skip", "diagonal"):
            t = chunked(kfac(f, F.mse_loss, unsupported=unsupported, fisher="exact"), 2, over=over)
            found = t(*args)
            assert (found["w"] is None) == (unsupported == "skip")
            assert_trees_close(matrices(found["v"]), v, EXACT)
            named = reduced(t, lambda path, k: k.trace())(*args)
            assert (named["w"] is None) == (unsupported == "skip")
        with pytest.raises(ArgumentError, match="'w'"):
            chunked(kfac(f, F.mse_loss, fisher="exact"), 2, over=over)(*args)
        with pytest.raises(ArgumentError, match="'w'"):
            reduced(kfac(f, F.mse_loss, fisher="exact"), lambda path, k: k.trace())(*args)

    def test_an_option_that_is_not_known(self):
        with pytest.raises(ArgumentError, match=r"kfac\(unsupported='none'\).*'diagonal'"):
            kfac(F.linear, F.mse_loss, unsupported="none", fisher="exact")

    @pytest.mark.parametrize("make", [kfac, ekfac], ids=["kfac", "ekfac"])
    def test_options_of_the_columns(self, make):
        name = make.__name__
        with pytest.raises(ArgumentError, match=rf"{name}.*fisher='true'"):
            make(F.linear, F.mse_loss, fisher="true", generator=seeded())
        with pytest.raises(ArgumentTypeError, match=rf"{name}.*generator"):
            make(F.linear, F.mse_loss)
        with pytest.raises(ArgumentTypeError, match=rf"{name}.*generator.*int"):
            make(F.linear, F.mse_loss, generator=3)
        with pytest.raises(ArgumentError, match=rf"{name}.*mc_samples.*0"):
            make(F.linear, F.mse_loss, mc_samples=0, generator=seeded())

    @pytest.mark.parametrize("make", [kfac, ekfac])
    def test_a_sharing_that_is_not_known(self, make):
        with pytest.raises(ArgumentError, match=rf"{make.__name__}.*weight_sharing='kfc'.*expand"):
            make(F.linear, F.mse_loss, weight_sharing="kfc", generator=seeded())

    @pytest.mark.parametrize("make", [partial(kfac, fisher="exact"), kfra], ids=["exact kfac", "kfra"])
    def test_a_loss_that_is_not_convex(self, make):
        with pytest.raises(InvFuncError, match="not convex"):
            make(lambda p, x: x @ p, lambda z, y: z.sin().sum())(Numbers(3)(3, 3), self.x, self.y)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_of_a_parameter_that_is_read_twice_within_transforms(make):
    """A row of it is a bias: which entries that is, is found by a derivative at a level of torch.func."""
    rand = Numbers(4)
    args = (rand(3, 2), rand(4, 3), Numbers(1).below(3, 4))

    def dense(p, x, y):
        return make(lambda p, x: (x @ p).tanh() @ p.T + p[:, 0], F.cross_entropy)(p, x, y).dense()

    expected = torch.stack([dense(c * args[0], *args[1:]) for c in (1, 2)])
    if make is not MAKERS["kfac"]:  # whose draws torch.vmap refuses
        found = vmap(lambda c: dense(c * args[0], *args[1:]))(torch.tensor([1.0, 2.0]).double())
        assert_trees_close(found, expected, EXACT)
    p = args[0].clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(dense(p, *args[1:])), p)
    assert_trees_close(grad(lambda p: total(dense(p, *args[1:])))(args[0]), expected, DERIVED)
