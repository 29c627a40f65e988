"""Faults of a user are found, with the smallest case: a rule, an inverse, a model that mixes its samples."""

import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as drawing
from hypothesis import settings
from hypothesis import strategies as st

import invfunc
from invfunc import tree
from invfunc._torch import functorch
from invfunc.testing import assert_trees_close, laws, strategies
from invfunc.testing.laws.rows import FACTORS, ROWS
from invfunc.testing.models import FAMILIES, Loss, Model, Problem
from tests.networks import LOSSES, network
from tests.strategies import Numbers


def doubled():
    """A wrong rule: twice the shares."""
    op = invfunc.operation(lambda x, weight: x @ weight)

    @op.share_of("weight")
    def _(cotangent, x, weight):
        return "vno,ni->io", 2 * cotangent, x

    return op


FIRST = list(laws.LAWS)[:6]
"""Laws that find most faults."""


def test_a_wrong_rule_of_an_operation():
    op, rand = doubled(), Numbers()
    args = {"layer": {"w": rand(3, 2)}}, rand(5, 3), rand(5, 2)

    def f(p, x, y):
        return (op(x, p["layer"]["w"]).tanh() - y).square().sum(1)

    with pytest.raises(AssertionError) as failed:
        laws.check(f, *args, only=FIRST)
    told = str(failed.value)
    assert "a law does not hold: per-sample gradients sum to the gradient" in told
    assert "['layer']['w'][" in told and "samples: [0], of 5" in told
    assert "laws.check(f, params, *batch, only='per-sample gradients sum to the gradient', samples=[0], seed=0)" in told
    with pytest.raises(AssertionError, match="of 1"):
        laws.check(f, *args, only="per-sample gradients sum to the gradient", samples=[0])


@pytest.mark.parametrize("loss", [None, F.mse_loss], ids=["[N] losses", "model and loss"])
def test_a_model_that_mixes_its_samples(loss):
    rand = Numbers()
    w, x, y = rand(3, 2), rand(5, 3), rand(5, 2)

    def f(w, x, y=None):
        z = F.batch_norm(x @ w, None, None, training=True)
        return z if y is None else (z - y).square().sum(1)

    with pytest.raises(AssertionError) as failed:
        laws.check(f, w, x, y, loss=loss, only=FIRST)
    told = str(failed.value)
    assert "a law does not hold: samples do not mix" in told and "samples: [0, 1], of 5" in told
    assert "batch_norm" in told  # the library refuses it, and says where


def test_a_wrong_inverse():
    def f(x, p):
        return x * p["scale"].exp() + p["shift"]

    def f_inv(y, p):
        return (y - p["shift"]) * (-p["scale"]).exp().clamp(max=1)  # right for most scales

    p = {"scale": torch.tensor([0.3, -0.2]).double(), "shift": Numbers()(2)}
    with pytest.raises(AssertionError) as failed:
        laws.check_pair((f, f_inv), Numbers(1)(4, 2), p)
    told = str(failed.value)
    assert "a law does not hold: the inverse restores" in told
    assert "f_inv(f(x)) at [0, 1]" in told and "samples: [0], of 4" in told
    assert "x, *args, only='the inverse restores', samples=[0], seed=0)" in told


def test_what_a_message_says_to_type_is_what_fails_again():
    rand = Numbers()
    x, y = rand(6, 3), torch.zeros(6).double()
    x[4, 0] = 9.0

    def f(w, x, y):
        far = (x.abs() > 8).any(1)
        return torch.where(far, 2 * (x @ w - y), (x @ w - y).square())  # a kink that no law sees

    assert not laws.check(f, rand(3), x, y, only="per-sample gradients equal their loop").failed
    op = invfunc.operation(lambda x, weight: x @ weight)

    @op.share_of("weight")
    def _(cotangent, x, weight):
        return "vno,ni->io", cotangent, x.clamp(max=8.0)

    def wrong(w, x, y):
        return (op(x, w[:, None])[:, 0] - y).square()

    with pytest.raises(AssertionError, match=r"samples: \[4\], of 6(.|\n)*samples=\[4\]"):
        laws.check(wrong, rand(3), x, y, only=FIRST)
    assert not laws.check(
        wrong, rand(3), x, y, only="per-sample gradients equal their loop", samples=[0, 1, 2, 3, 5]
    ).failed
    with pytest.raises(AssertionError):
        laws.check(wrong, rand(3), x, y, only="per-sample gradients equal their loop", samples=[4])


class TestCheck:
    """Messages of check about arguments, time and refusals."""

    w, x = Numbers()(3), Numbers(1)(4, 3)

    @staticmethod
    def f(w, x):
        return (x @ w).square()

    def test_names_the_laws_that_there_are(self):
        with pytest.raises(
            invfunc.errors.ArgumentError, match="no law 'sharez'; the names are 'per-sample gradients sum"
        ):
            laws.check(self.f, self.w, self.x, only="sharez")

    @pytest.mark.parametrize(
        "args, match",
        [
            ((torch.nn.Linear(2, 2), {}, torch.ones(2)), "functional"),
            ((f, w), "no samples"),
            ((f, w.long(), x), "int64"),
            ((f, {"w": None}, x), "no tensors"),
            ((lambda w, x: (x @ w)[:2], w, x), "N = 4"),
            ((lambda w, x: "text", w, x), "N = 4"),
        ],
        ids=["module", "no batch", "integers", "no parameters", "wrong length", "no tensor"],
    )
    def test_of_arguments_that_it_cannot_use(self, args, match):
        with pytest.raises(invfunc.InvFuncError, match=match):
            laws.check(*args)

    def test_refusals_are_told_and_a_function_that_is_refused_by_all_is_an_error(self):
        def mean(w, x):
            return F.batch_norm(x * w, None, None, training=True).sin().mean()

        table = laws.check(
            mean,
            self.w,
            self.x,
            only=["per-sample gradients sum to the gradient", "products equal those of the matrix"],
        )
        assert "batch_norm" in str(table) and {outcome.state for outcome in table.outcomes} >= {"refused", "holds"}
        with pytest.raises(invfunc.errors.ArgumentError, match="refuses(.|\n)*batch_norm"):
            laws.check(
                mean,
                self.w,
                self.x,
                only=["per-sample gradients sum to the gradient", "per-sample gradients equal their loop"],
            )

    def test_what_rounding_does_in_float32_is_no_failure_and_more_is_one(self, monkeypatch):
        """An attention of one sample, whose norm makes much of the rounding of few terms."""
        of = Problem(Model("attention", n=1, seed=18, dtype=torch.float32), Loss("cross_entropy"))
        right, law = invfunc.hvp, "products equal those of the matrix"
        assert laws.check(*of.args, **of.options, only=law).outcomes[0].state == "holds"
        monkeypatch.setattr(invfunc, "hvp", lambda *f: lambda *a: tree.map_leaves(lambda v: 1.2 * v, right(*f)(*a)))
        with pytest.raises(AssertionError, match="hvp"):
            laws.check(*of.args, **of.options, only=law)

    def test_leaves_the_generators_and_the_arguments(self):
        before, version = torch.get_rng_state(), self.x._version
        laws.check(self.f, self.w, self.x, only=["per-sample gradients equal their loop", "samples do not mix"])
        assert torch.equal(torch.get_rng_state(), before) and self.x._version == version

    def test_a_function_that_writes_into_its_arguments_is_told_so(self):
        def writing(w, x):
            z = (x @ w).tanh()
            x.mul_(1.01)
            return z.square()

        before = self.x.clone()
        with pytest.raises(invfunc.errors.ArgumentError, match="writes into its arguments"):
            laws.check(writing, self.w, self.x)
        assert torch.equal(self.x, before)

    def test_no_law_at_all_is_an_error(self):
        with pytest.raises(invfunc.errors.ArgumentError, match="leave `only` out for all laws"):
            laws.check(self.f, self.w, self.x, only=[])

    def test_nan_is_an_error(self):
        with pytest.raises(invfunc.errors.ArgumentError, match=r"samples \[2\] give NaN(.|\n)*samples="):
            laws.check(self.f, self.w, torch.where(self.x == self.x[2], torch.nan, self.x))


MIXING = {
    "rolled": lambda z, y: F.cross_entropy(z.roll(1, 0), y, reduction="none"),
    "centred": lambda z, y: (z - z.detach().mean(0)).square().sum(1),
    "a mean that is rolled": lambda z, y: F.cross_entropy(z.roll(1, 0), y),
    "a mean that is centred": lambda z, y: (z - z.mean(0)).square().mean(),
    "contrastive": lambda z, y: F.cross_entropy(z @ z.T, torch.arange(len(z))),
}
APART = {
    "mean": F.cross_entropy,
    "ignored": lambda z, y: F.cross_entropy(z, y, ignore_index=1),
    "weighted": lambda z, y: F.cross_entropy(z, y, torch.tensor([0.3, 2.0, 1.0]).to(z)),
    "[N]": lambda z, y: F.cross_entropy(z, y, reduction="none"),
}


class TestLossesThatMix:
    """Of a model that does not."""

    args = Numbers()(3, 3), Numbers(1)(5, 3), torch.tensor([0, 1, 1, 2, 0])

    @staticmethod
    def f(w, x):
        return (x @ w).tanh()

    @pytest.mark.parametrize("loss", MIXING)
    def test_are_found(self, loss):
        with pytest.raises(AssertionError, match="samples do not mix(.|\n)*    loss"):
            laws.check(self.f, *self.args, loss=MIXING[loss], only="samples do not mix")

    @pytest.mark.parametrize("loss", APART)
    def test_and_no_others(self, loss):
        assert not laws.check(self.f, *self.args, loss=APART[loss], only="samples do not mix").failed


def test_other_random_numbers_under_vmap_are_no_failure():
    torch.manual_seed(0)
    f, params = invfunc.functional(torch.nn.TransformerEncoderLayer(4, 2, 4, 0.5, batch_first=True).double().train())
    args = lambda p, x: f(p, x).flatten(1), params, Numbers()(2, 2, 4), Numbers(1)(2, 8)
    table = laws.check(*args, loss=F.mse_loss, only="vmap over parameters is the loop")
    assert table.outcomes[0].state == "does not apply" and "other random numbers under vmap" in str(table)


# A law that cannot fail is worthless: for each of them a fault is planted that it finds, and it holds without


def spoilt(result):
    """One number of it is wrong by a tenth."""

    def one(x):
        x = x.clone(memory_format=torch.contiguous_format)
        x.view(-1)[:1] *= 1.1
        return x

    leaves, form = tree.separate(result)
    return form.join([one(leaves[0]), *leaves[1:]])


def when(condition):
    return lambda t, given, result: spoilt(result) if condition(t) else result


def of_one(t, given, result):
    return spoilt(result)


ALWAYS = "batch_grad"
FAULTS = {
    "per-sample gradients sum to the gradient": (ALWAYS, of_one),
    "per-sample gradients equal their loop": (
        ALWAYS,
        lambda t, given, result: tree.map_tensors(lambda g: g.flip(0), result),
    ),
    "the GGN equals its loop": ("sqrt_ggn", of_one),
    "the Hessian equals its loop": ("diag_hessian", of_one),
    "Jacobians equal their loop": ("batch_jacobian", of_one),
    "K-factors of one sample are its block": ("kfac empirical", of_one),
    "grad of a statistic is that of its loop": (
        ALWAYS,
        lambda t, given, result: result if functorch.transforming() else tree.map_tensors(torch.detach, result),
    ),
    "vmap over parameters is the loop": (ALWAYS, when(lambda t: functorch.transforming())),
}
ELSEWHERE = {"products equal those of the matrix", "samples do not mix"}
OF_F = [name for name, law in laws.LAWS.items() if "a function" in law.subjects]


def checked(*args, only):
    return laws.check(*args, loss=LOSSES[0], only=only)


def given():
    """A small model that all laws apply to."""
    net = network("affine", 3)
    return net, (net.f, net.params, net.x, LOSSES[0].target(Numbers(1), 3))


def faulty(t, fault):
    """A statistic that computes with a fault."""

    class Wrong(type(t)):
        owned = False  # else copies are made of what shares memory

        def compute(self, args, kwargs, names):
            result, aux = super().compute(args, kwargs, names)
            return fault(self, args, result), aux

    return Wrong(**{f.name: getattr(t, f.name) for f in fields(t) if f.init})


def planted(fault, name, monkeypatch):
    """The statistic of a row has a fault."""
    row = ROWS[name]

    def make(*functions, **options):
        return faulty(row.make(*functions, **options), fault)

    monkeypatch.setitem(ROWS, name, replace(row, make=make))


def test_each_law_of_functions_has_a_fault():
    assert {*FAULTS} | ELSEWHERE == {*OF_F}


@pytest.mark.parametrize("law", FAULTS)
def test_finds_its_fault(law, monkeypatch):
    net, args = given()
    assert checked(*args, only=law).outcomes[0].state == "holds"
    name, fault = FAULTS[law]
    planted(fault, name, monkeypatch)
    with pytest.raises(AssertionError, match=f"a law does not hold: {law}"):
        checked(*args, only=law)


@pytest.mark.parametrize("product", ["hvp", "ggnvp"])
@pytest.mark.parametrize("linearized", [False, True])
def test_finds_a_wrong_product(product, linearized, monkeypatch):
    net, args = given()
    right = getattr(invfunc, product)

    class Wrong:
        def __init__(self, *given, **options):
            self.of = right(*given, **options)

        def __call__(self, *given):
            return self.of(*given) if linearized else spoilt(self.of(*given))

        def linearize(self, *given):
            at = self.of.linearize(*given)
            return lambda v: spoilt(at(v))

    law = "products equal those of the matrix"
    assert checked(*args, only=law).outcomes[0].state == "holds"
    monkeypatch.setattr(invfunc, product, Wrong)
    with pytest.raises(AssertionError, match=product):
        checked(*args, only=law)


# The laws that users are given hold for drawn models and losses: for all statistics at once, in every form

OF_FUNCTIONS = [name for name, law in laws.LAWS.items() if "a function" in law.subjects]
FORMS = {
    "a model and its loss": lambda of: (of.args, of.options),
    "a loss function": lambda of: ((of.f, of.model.params, *of.batch), {"in_dims": of.in_dims}),
    "a model": lambda of: (of.args[:-1], {"in_dims": of.in_dims[0]}),
}
COMPUTED = ["derived", "recurrent"]
"""Families that have no K-factors: weights are computed from parameters."""
OF_FACTORS = "K-factors of one sample are its block"


def quick(names):
    """The cheap and telling ones come first."""
    return [pytest.param(name, marks=pytest.mark.quick) for name in names]


def some(model):
    """A loss that the outputs of the model take."""
    losses = strategies.losses(["mse_loss", "bce", "log cosh of outputs"] if model.family == "sequence" else None)
    return st.builds(strategies.Problem, st.just(model), losses)


def may_be_refused(of, problem):
    """Not every model has K-factors."""
    row = ROWS.get(of.split(" over ")[0].split(", ")[0].removesuffix(" of the model"))
    factors = of.startswith(("K-factors", "kfac of params")) if row is None else row.gives == FACTORS
    return of.startswith("kfra") or (factors and problem.model.family in COMPUTED)


@pytest.mark.parametrize("law", [*quick(OF_FUNCTIONS[:6]), *OF_FUNCTIONS[6:]])
@drawing(st.data())
@settings(max_examples=4)
def test_of_functions(law, dtype, device, data):
    families = [name for name in FAMILIES if law != OF_FACTORS or name not in COMPUTED]
    problems = strategies.models(families, in_dims=(0, 1), dtype=dtype, device=str(device)).flatmap(some)
    problem, form = data.draw(problems), data.draw(st.sampled_from([*FORMS]))
    args, options = FORMS[form](problem)
    table = laws.check(*args, **options, only=law, seconds=300)
    (outcome,) = table.outcomes
    assert outcome.tried or outcome.why_not or outcome.inapplicable, table
    assert not outcome.left and all(may_be_refused(of, problem) for of in outcome.refused), table


@pytest.mark.parametrize("law", [name for name, law in laws.LAWS.items() if "a pair" in law.subjects])
@drawing(st.data())
@settings(max_examples=5)
def test_of_pairs(law, dtype, device, data):
    of = data.draw(strategies.pairs(dtype=dtype, device=str(device)))
    table = laws.check_pair(of.pair, of.x, *of.args, only=law, seconds=300)
    assert table.outcomes[0].state in ("holds", "does not apply") and not table.refused, table


# Draws of the public strategies: small, of every family, in any precision, printed as code that makes them again

DRAWN = {
    "models": strategies.models([*FAMILIES]),
    "models of other axes": strategies.models(["affine", "perceptron"], in_dims=(0, 1)),
    "losses": strategies.losses(),
    "problems": strategies.problems(),
    "pairs": strategies.pairs(),
    "chunkings": strategies.chunkings(),
    "splits": strategies.splits(5),
}


def numbers(value):
    """All that a value is made of."""
    if isinstance(value, strategies.Problem):
        return numbers(value.model), value.target
    if isinstance(value, strategies.Model):
        return value.params, value.x, value.f(value.params, value.x)
    if isinstance(value, strategies.Pair):
        return value.x, value.args, value.pair(value.x, *value.args)
    return torch.tensor(hash(str(value)) % 1000)


@pytest.mark.parametrize("what", DRAWN)
@settings(max_examples=8)
@drawing(data=st.data())
def test_values_print_as_code_that_makes_them_again(what, data):
    value = data.draw(DRAWN[what])
    names = {"torch": torch}
    exec(f"from invfunc.testing.strategies import *\nvalue = {value!r}", names)
    assert names["value"] == value
    assert_trees_close(numbers(names["value"]), numbers(value), 0.0)


@pytest.mark.slow
def test_without_hypothesis_there_are_laws_and_an_error_names_the_extra():
    code = """
import sys
sys.modules["hypothesis"] = None
import torch, invfunc
from invfunc.testing import laws
laws.check(lambda w, x: (x @ w).square(), torch.ones(2), torch.eye(2), only="per-sample gradients sum to the gradient")
try:
    from invfunc.testing import strategies
except invfunc.errors.MissingExtraError as error:
    assert "invfunc[testing]" in str(error)
else:
    raise AssertionError("no error")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
