"""kfac and its relatives: their options, in chunks, under transforms of torch.func, and what they refuse."""

from functools import partial

import pytest
import torch.nn.functional as F

from invfunc import chunked, diag_ggn, ekfac, kfac, reduced
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close
from tests.networks import LOSSES
from tests.reductions.test_kfac import matrices
from tests.strategies import Numbers, seeded

EXACT, DERIVED = 1e-9, 1e-7


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
