"""certified: what is found beside numbers that are not finite, kinks and small leaves, and in half precision."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import batch_grad, batch_l2_grad, certified, gram, operation, tree, variance
from invfunc.errors import CertificateError
from invfunc.testing.laws.rows import MODEL
from invfunc.testing.models import Loss, Model, Problem
from tests.alarms.calls import CERTIFIED
from tests.certificates.test_certified import made, planted, same

quick = pytest.mark.quick
each_row = pytest.mark.parametrize("row", CERTIFIED.values(), ids=CERTIFIED)
SEED = 7


def squares(p, x, y):
    return (torch.tanh(x @ p["w"]) @ p["v"] - y).square()


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


PARAMS = {"w": rand(3, 2), "v": rand(2, seed=1)}
ARGS = PARAMS, rand(5, 3, seed=2), rand(5, seed=3)


def spoiled(number, sample=1):
    """The arguments with one number of a sample's input that is not finite."""
    x = ARGS[1].clone()
    x[sample, 0] = number
    return ARGS[0], x, ARGS[2]


class TestNumbersThatAreNotFinite:
    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    @each_row
    def test_are_no_fault(self, row, number):
        problem = Problem(Model("perceptron", n=4), Loss("mse_loss", "none"))
        t, (params, x, *target) = made(row, problem)
        x = x.clone()
        x[1, 0] = number
        certified(t, generator=SEED)(params, x, *target)

    @pytest.mark.parametrize("t", [batch_grad, batch_l2_grad, invfunc.clipped_grad, gram])
    def test_of_a_norm_are_none(self, t):
        """Infinity times zero: the norm of the sample is no number."""
        options = {"max_norm": 1.0} if t is invfunc.clipped_grad else {}
        f = lambda w, x, y: (x @ w - y).square()  # noqa: E731  (as users write it)
        x = torch.rand(4, 3)
        x[1, 0] = float("inf")
        certified(t(f, **options), generator=SEED)(torch.tensor([0.0, 1.0, 1.0]), x, torch.zeros(4))

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    @pytest.mark.parametrize(
        "t",
        [
            batch_grad,
            partial(invfunc.diag_ggn, per_sample=True),
            partial(invfunc.diag_hessian, per_sample=True),
            invfunc.batch_jacobian,
        ],
    )
    def test_hide_nothing_of_other_samples(self, t, number):
        f, args = (squares, spoiled(number)) if t is batch_grad else (lambda p, x: torch.tanh(x @ p["w"]), ())
        if t is not batch_grad:
            args = spoiled(number)[:2] if t is invfunc.batch_jacobian else (*spoiled(number)[:2], rand(5, 2))
        loss = () if t in (batch_grad, invfunc.batch_jacobian) else (F.mse_loss,)

        def change(result):
            return tree.map_tensors(lambda g: torch.cat([g[:-1], 1.001 * g[-1:]]), result)

        with planted(change), pytest.raises(CertificateError, match=r"result.*\[4"):
            certified(t(f, *loss), generator=SEED)(*args)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), 0.0])
    @each_row
    def test_beside_finite_ones_are_a_fault(self, row, number):
        """One kind in the place of the other."""
        problem = Problem(Model("perceptron", n=3), Loss("mse_loss", "none"))
        t, (params, x, *target) = made(row, problem)
        if number == 0:
            x = torch.full_like(x, float("nan"))
        with planted(lambda result: tree.map_tensors(lambda r: torch.full_like(r, number), result)):
            with pytest.raises(CertificateError):
                certified(t, generator=SEED)(params, x, *target)


class TestKinks:
    """|z| where z is 0 to the last digit for one of the samples."""

    @staticmethod
    def f(p, x, y):
        return (x @ p["w"] - y).abs() + torch.tanh(x @ p["v"])

    ARGS = {"w": torch.ones(3), "v": rand(3).float()}, torch.randint(9, (6, 3)).float(), torch.zeros(6)

    def args(self):
        x = self.ARGS[1]
        return *self.ARGS[:2], torch.cat([x[:1].sum(1), self.ARGS[2][1:]])

    @pytest.mark.parametrize("t", [batch_grad, batch_l2_grad, variance, gram, invfunc.sum_grad_squared])
    def test_are_no_fault(self, t):
        for seed in range(5):
            certified(t(self.f), generator=seed)(*self.args())

    @pytest.mark.parametrize("t, called", [(batch_grad, "[wv]"), (batch_l2_grad, "[wv]"), (variance, "v")])
    def test_hide_nothing_elsewhere(self, t, called):
        def change(result):
            return {"w": result["w"], "v": 1.01 * result["v"]} if called == "v" else tree.map_tensors(off, result)

        def off(x):
            return torch.cat([x[:-1], 1.01 * x[-1:]])

        args = tree.map_tensors(lambda x: x.double(), self.args())  # of float32 the rounding at the kink hides it
        with planted(change), pytest.raises(CertificateError, match=rf"'{called}'"):
            certified(t(self.f), generator=SEED)(*args)


class TestSmallLeaves:
    @pytest.mark.parametrize("scale", [1e-3, 1e-6])
    @pytest.mark.parametrize("dtype", [torch.float64])
    @pytest.mark.parametrize("t", [batch_grad, batch_l2_grad, variance, invfunc.sum_grad_squared])
    def test_are_looked_at_as_others(self, t, dtype, scale):
        def f(p, x, y):
            return squares({"w": p["w"], "v": p["v"] + scale * p["small"]}, x, y)

        params, *batch = tree.map_tensors(lambda x: x.to(dtype), ({**ARGS[0], "small": torch.zeros(2)}, *ARGS[1:]))

        def change(result):
            return {**result, "small": 1.01 * result["small"]}

        certified(t(f), generator=SEED)(params, *batch)
        with planted(change), pytest.raises(CertificateError, match="small"):
            certified(t(f), generator=SEED)(params, *batch)


class TestHalfPrecision:
    @pytest.mark.parametrize(
        "dtype, n, turn", [(torch.bfloat16, 32, 0), (torch.bfloat16, 300, 1), (torch.float16, 300, 0)]
    )
    @each_row
    def test_finds_what_is_nothing_or_twice_as_much(self, row, dtype, n, turn):
        """By turns: each row meets both, and each dtype."""
        factor = 2 * ((list(CERTIFIED.values()).index(row) + turn) % 2)
        problem = Problem(Model("perceptron", n, 3, dtype), Loss("mse_loss", "none"))
        t, args = made(row, problem)
        with planted(lambda result: tree.map_tensors(lambda x: factor * x, result)), pytest.raises(CertificateError):
            certified(t, generator=SEED)(*args)


@quick
class TestGenerators:
    def test_by_a_generator_that_the_function_holds_is_the_same(self):
        """It is where t alone leaves it, also behind an error."""
        g = torch.Generator().manual_seed(0)
        f = lambda w, x: (x @ w * torch.rand((), generator=g)).square()  # noqa: E731  (as users write it)
        args = torch.ones(3), torch.rand(4, 3)
        plain, after = batch_grad(f)(*args), g.get_state()
        g.manual_seed(0)
        assert same(certified(batch_grad(f), generator=SEED)(*args), plain)
        assert torch.equal(g.get_state(), after)
        g.manual_seed(0)
        with planted(lambda result: 2 * result), pytest.raises(CertificateError, match="by plain loops"):
            certified(batch_grad(f), generator=SEED)(*args)
        assert torch.equal(g.get_state(), after)


class TestPaths:
    """What an error says of where it is."""

    @pytest.mark.parametrize(
        "t, path",
        [
            (batch_grad, r"result\['[wv]'\]\[1, [\d, ]+\]"),
            (batch_l2_grad, r"result\['[wv]'\]\[1\]"),
            (gram, r"result\[1, [01]\]"),
            (invfunc.batch_jacobian, r"result\['w'\]\[1, [01], \d, \d\]"),
            (invfunc.sqrt_ggn, r"\(result\['w'\] \*\* 2\).sum\(0\)\[1, \d, \d\]"),
        ],
    )
    def test_name_the_place_in_the_result(self, t, path):
        """Of which only some are asked for."""
        model = lambda p, x: torch.tanh(x @ p["w"])  # noqa: E731  (as users write it)
        f, args = (squares, ARGS) if t in (batch_grad, batch_l2_grad, gram) else (model, ({"w": PARAMS["w"]}, ARGS[1]))
        loss, args = ((F.mse_loss,), (*args, rand(5, 2))) if t is invfunc.sqrt_ggn else ((), args)

        def change(result):
            def off(x):
                x = x.clone()
                x.narrow(1 if t is invfunc.sqrt_ggn else 0, 1, 1).mul_(2)
                return x

            return tree.map_tensors(off, result)

        with planted(change), pytest.raises(CertificateError) as told:
            certified(t(f, *loss, samples=[4, 1]), generator=SEED)(*args)
        assert re.fullmatch(path, told.value.path), told.value.path

    def test_name_the_vector(self):
        product = invfunc.ggnvp(lambda w, x: x @ w, F.mse_loss, blocks=True)
        args = rand(3), rand(2, 3), rand(5, 3), rand(5)
        compute = type(product).compute

        def wrong(self, *given):
            result, aux = compute(self, *given)
            return torch.stack([result[0], 2 * result[1]]), aux

        with pytest.MonkeyPatch.context() as patch, pytest.raises(CertificateError, match=r"result\[1, \d\] is"):
            patch.setattr(type(product), "compute", wrong)
            certified(product, generator=SEED)(*args)


class TestRawErrorsOfOld:
    @each_row
    def test_a_leaf_without_entries(self, row):
        def model(p, x):
            return torch.tanh(x @ p["w"] + p["none"].sum())

        def loss(z, y):
            return F.mse_loss(z, y, reduction="none").sum(1)

        params, batch = {"w": PARAMS["w"], "none": torch.ones(0, dtype=torch.float64)}, (ARGS[1], rand(5, 2))
        if row.form == MODEL:
            certified(row.make(model), generator=SEED)(params, batch[0])
            return
        of = (model, loss) if len(row.forms) > 1 else (lambda p, x, y: loss(model(p, x), y),)
        certified(row.make(*of), generator=SEED)(params, *batch)

    @pytest.mark.parametrize("product", [invfunc.hvp, invfunc.ggnvp, partial(invfunc.ggnvp, fisher="empirical")])
    def test_a_product_with_one(self, product):
        f = lambda p, x, y: squares({"w": p["w"] + p["none"].sum(), "v": p["v"]}, x, y)  # noqa: E731
        params = {**PARAMS, "none": torch.ones(0, dtype=torch.float64)}
        of = product(f) if product is not invfunc.ggnvp else product(lambda *a: f(*a).sum(), lambda z, y: z.square())
        batch = ARGS[1:] if product is not invfunc.ggnvp else (*ARGS[1:], rand(1))
        certified(of, generator=SEED)(params, params, *batch)

    @pytest.mark.parametrize("loss", ["weighted", "ignored", "dropped"])
    def test_hessians_of_losses_that_single_samples_do_not_have(self, loss):
        """Given apart from the model, or found in a function of all."""
        torch.manual_seed(0)  # what is dropped leaves something to be wrong
        weight = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
        options = {"weighted": {"weight": weight}, "ignored": {"ignore_index": 1}, "dropped": {}}[loss]

        def model(w, x):
            z = torch.tanh(x @ w)
            return F.dropout(z) if loss == "dropped" else z

        of = lambda z, y: F.cross_entropy(z, y, **options)  # noqa: E731  (as users write it)
        args = rand(3, 3), rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
        for t in (
            invfunc.diag_hessian(model, of, per_sample=True),
            invfunc.diag_hessian(lambda w, x, y: of(model(w, x), y), per_sample=True),
            invfunc.diag_hessian(model, of, samples=[0, 3]),
        ):
            certified(t, generator=SEED)(*args)
            with planted(lambda result: 1.001 * result), pytest.raises(CertificateError):
                certified(t, generator=SEED)(*args)


@quick
class TestFormsOfOperations:
    """Both ways differentiate f in a form that can be differentiated twice, so f is compared with that."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_that_give_something_else(self, monkeypatch, dtype):
        f, params = invfunc.functional(torch.nn.EmbeddingBag(4, 2, mode="mean", padding_idx=1).to(dtype))
        data = torch.tensor([[0, 1, 2], [1, 1, 3], [2, 3, 0]]), rand(3, 2, dtype=dtype)
        whole = lambda p, x, y: (f(p, x) - y).square().sum(1)  # noqa: E731  (as users write it)
        statistics = batch_grad(whole), invfunc.diag_ggn(f, F.mse_loss), invfunc.batch_jacobian(f)
        product = certified(invfunc.ggnvp(f, F.mse_loss), generator=SEED)
        for t in statistics:
            certified(t, generator=SEED)(params, *data[: 1 if t is statistics[2] else 2])
        product(params, params, *data)
        monkeypatch.setattr(torch.Tensor, "logical_not", lambda x: torch.ones_like(x))
        for t in statistics:
            with pytest.raises(CertificateError, match=r"f in the form in which it is differentiated\["):
                certified(t, generator=SEED)(params, *data[: 1 if t is statistics[2] else 2])
        with pytest.raises(CertificateError, match="f in the form in which it is differentiated"):
            product(params, params, *data)


class TestShapes:
    @pytest.mark.parametrize("change", [lambda x: x[:, :2], lambda x: torch.cat([x, x], 1)], ids=["fewer", "more"])
    def test_of_samples_that_are_missing_or_come_twice(self, change):
        t = invfunc.sqrt_ggn(lambda p, x: torch.tanh(x @ p["w"]) @ p["v"], lambda z, y: (z - y).square())
        wrong = planted(lambda result: tree.map_tensors(change, result))
        with wrong, pytest.raises(CertificateError, match=r"has shape .*, but by plain loops it is \(5, "):
            certified(t, generator=SEED)(*ARGS)


class TestCodes:
    """Features that are 0 or 1 are not moved: a rule that is wrong for just these would be right beside them."""

    @pytest.mark.parametrize("code", [1, -1, 2])
    @pytest.mark.parametrize("name", ["batch_grad", "diag_ggn", "batch_jacobian"])
    def test_of_which_a_rule_is_wrong(self, name, code):
        product = operation(lambda x, w: x @ w)

        @product.share_of("w")
        def rule(cotangent, x, w):
            return "vno,ni->io", cotangent * (1 + 0.05 * (x == code).any(1))[None, :, None], x

        def f(p, x):
            return torch.tanh(product(x, p["w"])) @ p["v"]

        x = rand(5, 6).index_fill(1, torch.tensor([3]), code)
        params = {"w": rand(6, 4, seed=1), "v": rand(4, 3, seed=2)}
        loss = (F.cross_entropy,) if name == "diag_ggn" else ()
        t = getattr(invfunc, name)(f if name != "batch_grad" else lambda *args: f(*args).square().sum(1), *loss)
        with pytest.raises(CertificateError, match="w"):
            certified(t, generator=SEED)(params, x, *[torch.arange(5) % 3] * len(loss))
