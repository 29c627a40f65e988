"""Bad input gets one clear error: the call as it was written, what came, what was wanted, the fix."""

import ast
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import batch_grad, chunked, diag_ggn, functional, ggnvp, hvp, sum_grad_squared, variance
from invfunc import errors as family
from invfunc.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConvexityError,
    InvFuncError,
    InvFuncWarning,
    RandomnessError,
    SampleAxisError,
    SplitError,
)
from tests.strategies import Numbers

W, X, Y = Numbers()(4, 3), Numbers(1)(5, 4), Numbers(2).below(3, 5)
P = {"w": W}
Z = Numbers(3)(5, 3)


def model(params, x):
    return x @ params["w"]


def loss(params, x, y):
    return F.cross_entropy(model(params, x), y)


def total(params, x):
    return model(params, x).sum()


def mixed(params, x):
    return model(params, x).std(0).sum()


def centred(params, x):
    return model(params, x) - model(params, x).mean(0)


def normalised(params, x, y):
    return F.cross_entropy(F.batch_norm(model(params, x), None, None, training=True), y)


def penalised(params, x, y):
    return loss(params, x, y) + params["w"].square().sum()


def weighted(params, x, y):
    return (-params["s"]).exp() * loss(params, x, y) + params["s"]


def dropped(params, x):
    return F.dropout(model(params, x), 0.5)


def dropped_loss(params, x, y):
    return F.cross_entropy(dropped(params, x), y)


def bent(z, y):
    return z.sin().sum()


def public_exceptions():
    return [e for e in vars(family).values() if isinstance(e, type) and issubclass(e, Exception)]


def _warns(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "warn"


# fmt: off
MAKING = {
    "not callable": (lambda: batch_grad(3), ArgumentTypeError, "batch_grad(f): f is ... int ... function"),
    "None": (lambda: variance(None), ArgumentTypeError, "variance(f): f is ... NoneType ... function"),
    "a module": (lambda: sum_grad_squared(nn.Linear(2, 2)), ArgumentTypeError,
        "sum_grad_squared(f) ... Linear ... functional(model)"),
    "a tensor for a loss": (lambda: diag_ggn(model, Y), ArgumentTypeError,
        "diag_ggn(f, loss): loss is ... Tensor ... function"),
    "no module": (lambda: functional(model), ArgumentTypeError,
        "functional(model): model is ... function ... nn.Module"),
    "method": (lambda: diag_ggn(loss, method="sparse"), ArgumentError,
        "diag_ggn(loss, method='sparse') ... 'auto' ... 'dense'"),
    "n = 0": (lambda: chunked(batch_grad(loss), 0), ArgumentError, "chunked(batch_grad(loss), n=0): n ... at least 1"),
    "n is a float": (lambda: chunked(loss, 2.0), ArgumentTypeError, "chunked(loss, n=2.0): n is ... float ... an int"),
    "chunk_size = 0": (lambda: chunked(loss, chunk_size=0), ArgumentError,
        "chunked(loss, chunk_size=0) ... at least 1"),
    "n and chunk_size": (lambda: chunked(loss, 2, chunk_size=3), ArgumentError,
        "chunked(loss, n=2, chunk_size=3) ... not both"),
    "decorator": (lambda: chunked(n=0)(loss), ArgumentError, "chunked(loss, n=0) ... at least 1"),
    "over what": (lambda: chunked(diag_ggn(loss), 2, over="rows"), ArgumentError,
        "chunked(diag_ggn(loss), over='rows') ... 'outputs', 'samples', 'params'"),
    "over outputs": (lambda: chunked(variance(loss), 2, over="outputs"), ArgumentError,
        "chunked(variance(loss), over='outputs') ... 'samples', 'params'"),
    "over params": (lambda: chunked(loss, 2, over="params"), ArgumentError,
        "chunked(loss, over='params') ... plain function ... 'samples'"),
    "fold": (lambda: chunked(loss, 2, fold="max"), ArgumentError, "chunked(loss, fold='max') ... 'cat', 'sum', 'mean'"),
    "argnums": (lambda: batch_grad(loss, argnums="w")(P, X, Y), ArgumentTypeError,
        "batch_grad(loss ... argnums='w' ... int"),
    "argnums twice": (lambda: batch_grad(loss, argnums=(0, 0))(P, X, Y), ArgumentError,
        "batch_grad(loss ... argnums=(0, 0)"),
}

CALLS = {
    "no tensors": (batch_grad(loss), ({}, X, Y), ArgumentError,
        "batch_grad(loss)(params, x, y): params has no tensors"),
    "a number for a parameter": (variance(loss), ({"w": W, "b": [1.5]}, X, Y), ArgumentTypeError,
        "params['b'][0] is ... float ... tensor"),
    "None for all parameters": (diag_ggn(loss), ({"w": None}, X, Y), ArgumentError,
        "diag_ggn(loss)(params, x, y): params has no tensors"),
    "integers": (sum_grad_squared(loss), ({"w": W, "i": [torch.arange(2)]}, X, Y), ArgumentTypeError,
        "params['i'][0] has dtype torch.int64 ... floating-point ... Close over"),
    "bools": (diag_ggn(model, F.mse_loss), (W > 0, X, Z), ArgumentTypeError,
        "params has dtype torch.bool ... floating-point"),
    "complex": (batch_grad(loss), (P | {"c": W.cfloat()}, X, Y), ArgumentTypeError,
        "params['c'] has dtype torch.complex64 ... real"),
    "sizes": (batch_grad(loss), (P, X, Y[:4]), ArgumentError,
        "batch_grad(loss)(params, x, y): x has 5 samples but y has 4 ... in_dims=(0, None)"),
    "sizes in a tree": (batch_grad(total), (P, {"a": X, "b": [X[:2]]}), ArgumentError,
        "x['a'] has 5 samples but x['b'][0] has 2"),
    "sizes, chunked": (chunked(batch_grad(loss), 2), (P, X, Y[:4]), ArgumentError,
        "chunked(batch_grad(loss), n=2, over='samples')(params, x, y): x has 5 samples but y has 4"),
    "sizes along in_dims": (batch_grad(loss, in_dims=(1, 0)), (P, X, Y), ArgumentError,
        "x has 4 samples but y has 5 ... in_dims=(1, None)"),
    "no samples": (batch_grad(loss), (P, X[:0], Y[:0]), ArgumentError,
        "batch_grad(loss)(params, x, y): x has no samples (N = 0)"),
    "no batch": (batch_grad(total), (P,), ArgumentError,
        "batch_grad(total)(params): there is no batch argument ... pass the samples"),
    "all fixed": (batch_grad(loss, in_dims=None), (P, X, Y), ArgumentError, "there is no batch argument"),
    "no sample axis": (batch_grad(loss), (P, X, Y[0]), ArgumentError, "y has shape () and no axis 0 ... in_dims=None"),
    "in_dims beyond": (batch_grad(loss, in_dims=(0, 1)), (P, X, Y), ArgumentError, "y has shape (5,) and no axis 1"),
    "in_dims too short": (batch_grad(loss, in_dims=(0,)), (P, X, Y), ArgumentError,
        "in_dims=(0,) has 1 ... 2 batch arguments"),
    "argnums beyond": (batch_grad(loss, argnums=3), (P, X, Y), ArgumentError, "argnums=3 ... gets 3"),
    "no pair": (batch_grad(loss, has_aux=True), (P, X, Y), ArgumentError,
        "batch_grad(loss)(params, x, y) ... has_aux=True ... pair"),
    "aux unsaid": (batch_grad(lambda p, x: (total(p, x), 1)), (P, X), ArgumentError,
        "batch_grad(<lambda>)(p, x) ... tuple ... a scalar or [N]"),
    "a model function": (batch_grad(model), (P, X), ArgumentError,
        "batch_grad(model)(params, x): f returned shape (5, 3) for N = 5 ... looks like a model "
        "function ... loss function ... scalar or shape (5,)"),
    "a sum over samples": (variance(lambda p, x: model(p, x).sum(0)), (P, X), ArgumentError,
        "shape (3,) for N = 5 ... scalar or shape (5,)"),
    "an integer": (batch_grad(lambda p, x: model(p, x).argmax(1)), (P, X), ArgumentError,
        "torch.int64 ... floating-point"),
    "a number": (batch_grad(lambda p, x: 1.5), (P, X), ArgumentError, "float ... a scalar or [N]"),
    "nothing": (sum_grad_squared(lambda p, x: None), (P, X), ArgumentError, "NoneType ... a scalar or [N]"),
    "a loss function": (diag_ggn(total, F.mse_loss), (P, X, Z), ArgumentError,
        "diag_ggn(total, mse_loss)(params, x, target): f returned shape () ... looks like a loss "
        "function ... model function"),
    "no outputs": (diag_ggn(lambda p, x: None, F.mse_loss), (P, X, Y), ArgumentError, "NoneType ... floating-point"),
    "other outputs": (diag_ggn(lambda p, x: model(p, x).T, F.mse_loss), (P, X, Z), ArgumentError,
        "f returned shape (3, 5) for N = 5 ... axis 0"),
    "a loss that is none": (diag_ggn(model, lambda z, y: z), (P, X, Z), ArgumentError,
        "the loss returned shape (5, 3) ... scalar or shape (5,)"),
    "samples mixed": (batch_grad(mixed), (P, X), SampleAxisError,
        "batch_grad(mixed)(params, x): the samples are not kept apart at `std` ... over the sample "
        "axis ... Keep them apart"),
    "samples mixed in the model": (diag_ggn(centred, F.mse_loss), (P, X, Z), SampleAxisError,
        "diag_ggn(centred, mse_loss)(params, x, target) ... `sub`"),
    "batch statistics": (batch_grad(normalised), (P, X, Y), SampleAxisError,
        "batch_grad(normalised)(params, x, y) ... batch_norm ... train=False"),
    "a path around": (diag_ggn(penalised), (P, X, Y), SplitError,
        "diag_ggn(penalised)(params, x, y): a path ... goes around ... `add` ... outputs(z)"),
    "a weight around": (diag_ggn(weighted), (P | {"s": torch.tensor(0.3)}, X, Y), SplitError,
        "diag_ggn(weighted)(params, x, y): a path ... goes around ... `add` ... outputs(z)"),
    "no known loss": (diag_ggn(total), (P, X), SplitError,
        "diag_ggn(total)(params, x): no outputs are found ... outputs(z)"),
    "neither mean nor sum, chunked": (chunked(batch_grad(lambda p, x: total(p, x) / x.sum()), 2), (P, X),
        SampleAxisError, "n=2, over='samples')(p, x) ... neither the mean nor the sum ... [N] losses"),
    "not convex": (diag_ggn(model, bent), (P, X, Z), ConvexityError,
        "diag_ggn(model, bent)(params, x, target):  ... not convex in the outputs"),
    "random chunks of a loss": (chunked(batch_grad(dropped_loss), 2), (P, X, Y), RandomnessError,
        "chunked(batch_grad(dropped_loss), n=2, over='samples')(params, x, y):  ... random ... [N] losses"),
    "no sample axis to cat": (chunked(loss, 2), (P, X, Y), ArgumentError,
        "chunked(loss, n=2)(params, x, y) ... shape () ... fold='sum' ... fold='mean'"),
    "folds for another tree": (chunked(loss, 2, fold=("sum", "sum")), (P, X, Y), ArgumentError,
        "chunked(loss, n=2)(params, x, y) ... fold=('sum', 'sum')"),
}
# fmt: on


@pytest.mark.parametrize("make, kind, text", MAKING.values(), ids=MAKING)
def test_what_is_wrong_with_a_transform(make, kind, text):
    assert_told(make, kind, text)


@pytest.mark.parametrize("t, args, kind, text", CALLS.values(), ids=CALLS)
def test_what_is_wrong_with_a_call(t, args, kind, text):
    assert_told(lambda: t(*args), kind, text)


OPENING = r"(chunked|diag_ggn|batch_grad|variance|sum_grad_squared|functional)\(.*?\)[^:]*: "


def assert_told(call, kind, text, of=OPENING):
    pattern = ".*".join(re.escape(words) for words in text.split(" ... "))
    with pytest.raises(kind, match=pattern) as told:
        call()
    error, message = told.value, str(told.value)
    assert isinstance(error, InvFuncError) and isinstance(error, (ValueError, TypeError, RuntimeError))
    assert error.__cause__ is None and (error.__suppress_context__ or error.__context__ is None)
    opening = re.match(of, message)
    assert opening and message.count(opening.group()) == 1  # told once, by the innermost transform that failed
    assert len(message) < 500 and "\n" not in message.strip()


class TestFamily:
    def test_every_error_is_of_the_family_and_a_builtin(self):
        errors = [e for e in public_exceptions() if not issubclass(e, Warning)]
        assert len(errors) > 5
        for error in errors:
            assert issubclass(error, InvFuncError) and getattr(invfunc.errors, error.__name__) is error
            assert error is InvFuncError or issubclass(
                error, (ValueError, TypeError, RuntimeError, ImportError, MemoryError, AttributeError)
            )

    def test_every_warning_is_of_the_family_and_a_builtin(self):
        kinds = [e for e in public_exceptions() if issubclass(e, Warning)]
        assert len(kinds) > 1
        for kind in kinds:
            assert issubclass(kind, InvFuncWarning) and issubclass(kind, UserWarning)
            assert getattr(invfunc.errors, kind.__name__) is kind

    def test_every_warning_that_is_given_is_of_the_family(self):
        kinds = {e.__name__ for e in public_exceptions() if issubclass(e, Warning)}
        sources = Path(invfunc.__file__).parent.rglob("*.py")
        calls = [c for s in sources for c in ast.walk(ast.parse(s.read_text())) if _warns(c)]
        assert len(calls) > 2
        assert all(kinds & {name.id for name in ast.walk(c) if isinstance(name, ast.Name)} for c in calls)

    def test_errors_of_the_user_pass_through(self):
        def broken(params, x):
            raise KeyError("mine")

        for t, args in [
            (batch_grad(broken), (P, X)),
            (diag_ggn(broken, F.mse_loss), (P, X, Z)),
            (chunked(variance(broken), 2), (P, X)),
            (chunked(broken, 2), (P, X)),
        ]:
            with pytest.raises(KeyError, match="mine"):
                t(*args)


# Common slips in a call: each gets an error that says what to write

PS, XS, YS = {"w": Numbers()(3, 2)}, Numbers(1)(4, 3), Numbers(2).below(2, 4)
NET = nn.Linear(3, 2).double()
G, Q = functional(NET)


def of_module(params, x, y):
    return F.cross_entropy(G(params, x), y)


def scaled(a, w, x):
    return (x @ w * a.sum()).square().sum(1)


# fmt: off
SLIPS = {
    "forgotten target": (lambda: diag_ggn(model, F.cross_entropy)(PS, XS),
        "diag_ggn(model, cross_entropy)(params, target): the target is missing. It is called as (params, x, target)."),
    "forgotten target of a product": (lambda: ggnvp(model, F.cross_entropy)(PS, PS, XS), "the target is missing"),
    "target by keyword": (lambda: diag_ggn(model, F.cross_entropy)(PS, XS, target=YS),
        "target is passed by keyword, but has to be the last positional argument ... (params, x, target)"),
    "a list of arguments": (lambda: batch_grad(loss)(PS, [XS, YS]),
        "x is one list of 2, which are arguments of their own. It is called as (params, x, y)."),
    "a list of arguments and target": (lambda: diag_ggn(model, F.cross_entropy)(PS, [XS, YS]),
        "target is one list of 2, which are arguments of their own. It is called as (params, x, target)."),
    "a target without a loss": (lambda: batch_grad(model)(PS, XS, YS),
        "f takes (params, x), and got 3 positional arguments. If the last one is a target, give the loss"),
    "a keyword that f does not have": (lambda: batch_grad(loss)(PS, XS, target=YS),
        "f takes (params, x, y), and got 2 positional arguments and target=."),
    "an option at the call": (lambda: diag_ggn(model, F.cross_entropy)(PS, XS, YS, generator=torch.Generator()),
        "and got 2 positional arguments and generator=. Options of the transform come with f"),
    "too few": (lambda: hvp(loss)(PS, PS, XS), "f takes (params, x, y), and got 2 positional arguments"),
    "arrays": (lambda: batch_grad(loss)(PS, XS.numpy(), YS.numpy()),
        "x is of type numpy.ndarray ... torch.as_tensor(x)"),
    "an array that f takes for a tensor": (lambda: hvp(lambda p, x: model(p, x.double()).sum())(PS, PS, XS.numpy()),
        "x is of type numpy.ndarray ... torch.as_tensor(x)"),
    "an array that f computes with": (
        lambda: chunked(variance(lambda p, x, y: (model(p, x) - y).sum(1)), 2)(PS, XS, XS.numpy()),
        "y is of type numpy.ndarray ... torch.as_tensor(y)"),
    "an array as parameters": (lambda: batch_grad(loss)({"w": XS.numpy()}, XS, YS), "torch.as_tensor(params['w'])"),
    "an array as a vector": (lambda: hvp(loss)(PS, {**PS, "w": XS.numpy()}, XS, YS), "v['w'] ... torch.as_tensor"),
    "an array in a tree": (lambda: batch_grad(lambda params, d: model(params, d["x"]).sum(1))(PS, {"x": XS.numpy()}),
        "d['x'] is of type numpy.ndarray ... torch.as_tensor(d['x'])"),
    "a list of parameters": (lambda: batch_grad(of_module)(list(NET.parameters()), XS, YS),
        "params is of type list, but has to be the dict ... dict(model.named_parameters())"),
    "a generator": (lambda: batch_grad(of_module)(NET.parameters(), XS, YS),
        "params is of type generator, but parameters are tensors ... dict(model.named_parameters())"),
    "a module for parameters": (lambda: batch_grad(of_module)(NET, XS, YS),
        "params is of type Linear ... f, params = functional(model)"),
    "the class of a loss": (lambda: diag_ggn(model, nn.CrossEntropyLoss), "is the class CrossEntropyLoss ... Loss()"),
    "the class, of a product": (lambda: ggnvp(model, nn.MSELoss), "loss is the class MSELoss ... MSELoss()"),
    "the class of a model": (lambda: batch_grad(nn.Linear), "f is the class Linear ... functional(Linear(...))"),
    "swapped": (lambda: diag_ggn(F.cross_entropy, model), "diag_ggn(cross_entropy, model): f is a loss, but the model"),
    "swapped, a module": (lambda: ggnvp(nn.MSELoss(), G), "f is a loss, but the model comes first: ggnvp(f, loss)"),
    "a model for a loss": (lambda: diag_ggn(model, G), "loss is a model, functional(Linear)"),
}
SIZES = {
    "of two": (lambda: batch_grad(scaled, argnums=1)(torch.ones(3), torch.ones(3, 2), XS.float()),
        "a has 3 samples but x has 4 ... in_dims=(0, None) to hold x fixed, or in_dims=(None, 0) to hold a fixed."),
    "data before the parameters": (lambda: batch_grad(scaled)(XS, PS, XS),
        "Is argument 2, a dict of tensors, the parameters? They come first. If not: "),
    "in one tree": (lambda: batch_grad(lambda p, d: d)(PS, {"a": XS, "b": XS[:2]}),
        "d['a'] has 4 samples but d['b'] has"),
}
# fmt: on


def matching(text):
    return ".*".join(re.escape(part) for part in text.split(" ... "))


@pytest.mark.quick
@pytest.mark.parametrize("slip, text", SLIPS.values(), ids=SLIPS)
def test_a_slip_in_a_call(slip, text):
    with pytest.raises(ArgumentTypeError, match=matching(text)):
        slip()


@pytest.mark.quick
@pytest.mark.parametrize("slip, text", SIZES.values(), ids=SIZES)
def test_sizes_that_differ(slip, text):
    with pytest.raises(ArgumentError, match=matching(text)):
        slip()


@pytest.mark.quick
def test_shapes_of_samples_that_do_not_meet_are_told():
    p, x, y = Numbers()(3, 1), Numbers(1)(4, 3), Numbers(2)(4)
    with pytest.raises(
        SampleAxisError, match=r"along axis 0 of a tensor \[4, 1\] with .* along axis 0 of a tensor \[4\]"
    ):
        batch_grad(lambda p, x, y: (x @ p - y).square().mean())(p, x, y)
    batch_grad(lambda p, x, y: ((x @ p)[:, 0] - y).square().mean())(p, x, y)


@pytest.mark.quick
def test_errors_of_f_that_got_the_data_before_the_parameters_have_a_note():
    with pytest.raises(Exception) as caught:  # whatever f makes of it
        batch_grad(lambda x, params: x @ params)(XS, {"w": XS})
    assert "They come first" in caught.value.__notes__[0]
    with pytest.raises(Exception) as caught:
        batch_grad(lambda x, params: x @ params["w"][:, :1], argnums=1)(XS[:, :1], PS)
    assert not hasattr(caught.value, "__notes__")
