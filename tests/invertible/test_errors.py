"""What invertible functions refuse: the call, what came, what was wanted, the fix."""

import numpy as np
import pytest
import torch
from torch.func import grad, vmap

from invfunc import (
    ArgumentError,
    ArgumentTypeError,
    ClosedOverError,
    Grid,
    InverseError,
    Invertible,
    ModifiedError,
    RangeError,
    ReplayError,
    additive_coupling,
    affine_coupling,
    batch_grad,
    chain,
    check_inverse,
    drift,
    invert,
    invertible_checkpoint,
    layers,
    leapfrog,
    momentum,
    repeated,
    state_first,
    with_log_det,
)
from invfunc.testing import assert_trees_close
from tests.invertible_same import f, f_inv, g, gradients, leaves, squares
from tests.strategies import Numbers

X, W = torch.ones(2, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64, requires_grad=True)
PLAIN = Invertible(f, f_inv)
COUPLING = additive_coupling(torch.sin, torch.cos)
HIDING = Invertible(lambda x: (2 * x, 2.0), lambda y, by: y / by, hidden=True, name="hiding")
CHAIN = chain(g, g)
REPEATED = repeated(g)


def made(f=f, f_inv=f_inv, x=X, **options):
    return invertible_checkpoint(f, f_inv, **options)(x, W)


TYPES = {
    "invertible_checkpoint(f)": [
        (lambda: invertible_checkpoint(3, f_inv), "f is of type int, but has to be a function"),
        (lambda: invertible_checkpoint(torch.nn.Linear, f_inv), r"f is the class Linear.*functional\(Linear\(...\)\)"),
    ],
    "invertible_checkpoint(Invertible(f, f_inv), f_inv)": [
        (lambda: invertible_checkpoint(PLAIN, f_inv), "the pair has its inverse; leave f_inv out"),
        (lambda: invertible_checkpoint(PLAIN, None), "leave f_inv out"),
    ],
    "Invertible(": [
        (lambda: Invertible(1, f_inv), "forward is of type int, but has to be a function"),
        (lambda: Invertible(f, None), "inverse is of type NoneType, but has to be a function"),
        (lambda: Invertible(f, f_inv, shared=(f, 2)), r"shared\[1\] is of type int, but has to be a function"),
        (lambda: Invertible(f, f_inv, log_det=2), "log_det is of type int, but has to be a function"),
    ],
    "invert(pair)": [(lambda: invert(f), r"of type function, but has to be an Invertible.*Invertible\(f_inv, f\)")],
    "with_log_det(pair)": [(lambda: with_log_det(f), "of type function, but has to be an Invertible")],
    "additive_coupling(F, G)": [(lambda: additive_coupling(torch.sin, 1), "G is of type int, but has to be a")],
    "affine_coupling(F, G)": [(lambda: affine_coupling(f, f, log_scale=1), "log_scale is of type int")],
    "momentum(f)": [(lambda: momentum(None), "of type NoneType, but has to be a function")],
    "leapfrog(force, step)": [(lambda: leapfrog("f", 0.1), "of type str, but has to be a function")],
    "state_first(f)": [(lambda: state_first(2), "of type int, but has to be a function")],
    "chain": [(lambda: chain(g, 2), "block 1 is of type int, but has to be a function")],
    "repeated": [(lambda: repeated(2), "is of type int, but has to be a function")],
    "check_inverse(pair, ...)": [(lambda: check_inverse(f, X), r"of type function.*Invertible or \(f, f_inv\)")],
    "drift(pair, ...)": [(lambda: drift(None, X, [W]), r"of type NoneType.*Invertible or \(f, f_inv\)")],
}
VALUES = {
    "invertible_checkpoint(f, f_inv)(x, ...)": [
        (lambda: made(keep=(1,)), r"keep=\(1,\) names tensors of x by their place, but x has 1 of them"),
        (lambda: made(keep=[-1]), r"keep=\(-1,\) names tensors of x"),
    ],
    "invertible_checkpoint(Invertible(f, f_inv))": [
        (
            lambda: invertible_checkpoint(PLAIN, has_aux=True),
            "has_aux=True shows what a pair hides, but this one hides",
        ),
    ],
    "hiding": [(lambda: Invertible(f, f_inv, hidden=True, name="hiding")(X, W), r"has to return \(y, hidden\), but")],
    "invert(hiding)": [(lambda: invert(HIDING), "needs what forward hides beside y")],
    "with_log_det(hiding)": [(lambda: with_log_det(HIDING), "hides something")],
    "with_log_det(Invertible(f, f_inv))": [(lambda: with_log_det(PLAIN), "has no log_det")],
    "additive_coupling(sin, cos)": [
        (lambda: COUPLING(X), "x has to be a pair of tensors, but is Tensor.*split_dim="),
        (lambda: COUPLING((X, X, X)), "x has to be a pair of tensors, but is tuple"),
        (lambda: COUPLING((X, X), 3), "the parameters have to be a pair, of F and of G, but are int"),
        (lambda: invert(COUPLING)(X), "y has to be a pair of tensors, but is Tensor"),
    ],
    "additive_coupling(sin, cos, split_dim=2)": [
        (lambda: additive_coupling(torch.sin, torch.cos, split_dim=2)(X), r"x is \[2, 3\], which has no two halves"),
    ],
    "momentum(sin, gamma=1)": [(lambda: momentum(torch.sin, 1), "gamma has to be between 0 and 1")],
    "momentum(sin, gamma=nan)": [(lambda: momentum(torch.sin, float("nan")), "gamma has to be between 0 and 1")],
    repr(CHAIN) + "(x, params)": [
        (lambda: CHAIN(X, [W]), "params is 1 entries, but has to be a list with an entry for each of the 2 blocks"),
        (lambda: CHAIN(X, W), "params is (Tensor|Parameter), but has to be a list"),
    ],
    repr(REPEATED) + "(x, params)": [
        (lambda: REPEATED(X, {"a": X, "b": W}), r"one leading size.*have the shapes \[2, 3\], \[3\].*A list has"),
        (lambda: REPEATED(X, None), r"params says how often.*by \[None\] \* n"),
    ],
    "chain(..., anchor_every=0)": [(lambda: chain(g, anchor_every=0), "from 1 on is wanted")],
    "repeated(..., anchor_every=-1)": [(lambda: repeated(g, anchor_every=-1), "from 1 on is wanted")],
    "Grid(fraction_bits=16, dtype=torch.float16": [(lambda: Grid(dtype=torch.float16), "float32 or torch.float64")],
}


def cases(table):
    return [
        pytest.param(call, fn, reason, id=f"{call}: {reason[:30]}")
        for call, rows in table.items()
        for fn, reason in rows
    ]


@pytest.mark.parametrize(("call", "fn", "reason"), cases(TYPES))
def test_what_is_no_function(call, fn, reason):
    with pytest.raises(ArgumentTypeError, match=reason) as told:
        fn()
    assert str(told.value).startswith(call.rstrip("#")) and isinstance(told.value, TypeError)


@pytest.mark.parametrize(("call", "fn", "reason"), cases(VALUES))
def test_what_has_another_form(call, fn, reason):
    with pytest.raises(ArgumentError, match=reason) as told:
        fn()
    assert str(told.value).startswith(call) and isinstance(told.value, ValueError)


WAS = r"where it was \[2, 3\] torch.float64 on cpu"
WRONG = {
    "another shape": (lambda y, w: f_inv(y, w)[:1], rf"the inverse gives x as \[1, 3\] torch.float64 on cpu, {WAS}"),
    "another dtype": (
        lambda y, w: f_inv(y, w).float(),
        rf"the inverse gives x as \[2, 3\] torch.float32 on cpu, {WAS}",
    ),
    "another structure": (lambda y, w: (f_inv(y, w),), "the inverse gives"),
    "none": (lambda y, w: None, rf"the inverse gives x as NoneType, {WAS}.*keep=\(0,\)"),
}


class TestWrongInverses:
    @pytest.mark.parametrize(("wrong", "reason"), WRONG.values(), ids=WRONG)
    def test_whose_results_do_not_come_back(self, wrong, reason):
        """When called with check=, in backward without it, and within every transform."""
        with pytest.raises(InverseError, match=f"^invertible_checkpoint.*{reason}"):
            made(f_inv=wrong, check=True)
        x, w = leaves()
        h = invertible_checkpoint(f, wrong)
        y = h(x * 1, w)
        with pytest.raises(InverseError, match=reason):
            gradients(y, x)
        for transform in (grad, lambda f: vmap(grad(f))):
            batched = transform is not grad
            with pytest.raises(InverseError, match="the inverse gives"):
                transform(lambda v: squares(h(h(x.detach(), v), v)))(torch.stack([w] * 2) if batched else w.detach())

    def test_are_found_by_check_which_names_the_leaf(self):
        def forward(x, w):
            return {"a": x["a"] * w.exp(), "b": [x["b"][0] * w.exp()]}

        def back(y, w):
            return {"a": y["a"] / w.exp(), "b": [y["b"][0] / w.exp() * (1 + 1e-3)]}

        state = {"a": X, "b": [X]}
        told = r"gives x\['b'\]\[0\] of shape \[2, 3\] back with an error of 1.0e-03 .* is tolerated \(check=\)"
        for check in (True, 1e-4):
            h = invertible_checkpoint(forward, back, check=check)
            for call in (lambda h=h: h(state, W), lambda h=h: grad(lambda w: h(state, w)["a"].sum())(W.detach())):
                with pytest.raises(InverseError, match=told) as error:
                    call()
                assert check is True or "1.0e-04 is tolerated" in str(error.value)
        invertible_checkpoint(forward, back, check=2e-3)(state, W)
        invertible_checkpoint(forward, back, check=True, keep=(1,))(state, W)
        with pytest.raises(InverseError, match=r"x\['b'\]\[0\] comes back with an error of 1.0e-03 .*\(tolerance=\)"):
            check_inverse((forward, back), state, W)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_that_give_no_number(self, bad):
        with pytest.raises(InverseError, match="error of (nan|inf)"):
            made(f_inv=lambda y, w: y * bad, check=True)

    def test_that_fail_or_are_none(self):
        x, w = leaves()
        with pytest.raises(ZeroDivisionError):
            gradients(invertible_checkpoint(f, lambda y, w: 1 / 0)(x * 1, w), x)
        with pytest.raises(InverseError, match="has no inverse"):
            invert(chain(lambda x: 2 * x))(X, [None])

    def test_that_evaluate_shared_functions_otherwise(self):
        def forward(F, x):
            return x[0] + F(x[1]), x[1]

        for inverse, told in [
            (lambda F, y: (y[0] - F(y[1]) - 0 * F(y[1]), y[1]), "more often than forward"),
            (lambda F, y: (y[0] - y[1].sin(), y[1]), "evaluates its shared functions 0 times, forward 1"),
        ]:
            x = leaves()[0]
            y = invertible_checkpoint(Invertible(forward, inverse, (torch.sin,), name="pair"))((x * 1, x * 2))
            with pytest.raises(InverseError, match=f"pair.*{told}"):
                gradients(y, x)


def sine(x):
    return x.sin() * x


CHANGES = {
    "number": (sine, lambda x: x.sin()),
    "shape": (sine, lambda x: x[:1].sin() * x),
    "dtype": (sine, lambda x: x.float().sin() * x),
}


def seeded(g):
    return torch.Generator().manual_seed(int(g.integers(2**30)))


DRAWN = {
    "mask": lambda x, g: x * torch.as_tensor(g.random(x.shape) > 0.5),
    "masked_fill": lambda x, g: x.masked_fill(torch.tensor(g.random(x.shape) > 0.5), 0.0),
    "where": lambda x, g: torch.where(torch.tensor(g.random(x.shape) > 0.5), x, 0.0),
    "index": lambda x, g: x.sin()[:, g.permutation(x.shape[1])] * x,
    "index_select": lambda x, g: x + x.index_select(1, torch.tensor(g.permutation(x.shape[1]))).square(),
    "fractions": lambda x, g: x * torch.tensor(g.random(x.shape)),
    "a seed": lambda x, g: x * (torch.rand(x.shape, generator=seeded(g)) > 0.5),
    "a single precision number": lambda x, g: x * torch.tensor(g.random(dtype=np.float32)),
}
SHARED = {
    "where": lambda x, g: torch.where(torch.from_numpy(g.random(x.shape) > 0.5), x, 0.0),
    "fractions": lambda x, g: x * torch.from_numpy(g.random(x.shape)),
    "bytes": lambda x, g: x * torch.frombuffer(bytearray(g.bytes(x.numel())), dtype=torch.uint8).view(x.shape),
}


class TestChanges:
    @pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
    @pytest.mark.parametrize("check", [False, True])
    def test_an_f_that_does_something_else_when_evaluated_again(self, change, check):
        (first, later), calls = change, []

        def part(x):
            calls.append(x)
            return first(x) if len(calls) == 1 else later(x)

        x = leaves()[0]
        y = invertible_checkpoint(part, None, check=check)(x * 1)
        with pytest.raises(ReplayError, match="twice|evaluated again"):
            gradients(y, x)

    @pytest.mark.parametrize("inside", [False, True], ids=["backward", "torch.func"])
    @pytest.mark.parametrize("part", DRAWN.values(), ids=DRAWN)
    def test_arrays_that_a_generator_of_numpy_draws(self, part, inside):
        """Whole numbers and booleans are saved as well as fractions; nothing but f itself keeps the generator."""
        generator, x = np.random.default_rng(0), leaves()[0].detach()
        block = invertible_checkpoint(lambda x: part(x, generator), None)
        with pytest.raises(ReplayError, match="random numbers of Python or numpy"):
            if inside:
                grad(lambda x: squares(block(x)))(x)
            else:
                gradients(block(x.requires_grad_()), x)

    @pytest.mark.parametrize("part", SHARED.values(), ids=SHARED)
    def test_tensors_that_share_the_memory_of_drawn_arrays(self, part):
        """They come from outside, and those of the first time are taken again."""
        generators, x = [np.random.default_rng(0) for _ in range(2)], leaves()[0]
        block = invertible_checkpoint(lambda x: part(x, generators[0]), None)
        assert torch.equal(gradients(block(x), x)[0], gradients(part(x, generators[1]), x)[0])

    @pytest.mark.parametrize("inside", [False, True], ids=["backward", "torch.func"])
    def test_arrays_that_stay_as_they_are(self, inside):
        mask, order, x = np.arange(3) % 2 == 0, np.array([2, 0, 1]), leaves()[0].detach()
        block = invertible_checkpoint(lambda x: x.tanh()[..., order] * torch.as_tensor(mask), None)
        if inside:
            came, wanted = (grad(lambda x, f=f: squares(f(x)))(x) for f in (block, block.pair.forward))
        else:
            x.requires_grad_()
            came, wanted = (gradients(f(x), x)[0] for f in (block, block.pair.forward))
        assert torch.equal(came, wanted)

    @pytest.mark.parametrize("change", [lambda n: n[0], lambda n: float(np.random.default_rng(n[0]).random())])
    def test_values_are_compared_with_check(self, change):
        """Of what reads a number of Python, or the generator of another library; also inside of torch.func."""
        calls = [0]

        def part(b):
            calls[0] += 1
            return (b * change(calls)).tanh() * b

        h, x = invertible_checkpoint(additive_coupling(part, part), check=True), leaves()[0]
        for keep in (False, True):
            h = invertible_checkpoint(part, None, check=True) if keep else h
            state = (lambda x: x * 1) if keep else lambda x: (x * 1, x * 2)
            with pytest.raises((ReplayError, InverseError), match="other numbers|back with an error"):
                gradients(h(state(x)), x)
            with pytest.raises((ReplayError, InverseError), match="another result|back with an error"):
                grad(lambda x, h=h, state=state: squares(h(state(x))))(x.detach())

    def test_texts(self):
        x, w = leaves()
        y = g(x * 1, w)
        with torch.no_grad():
            y.mul_(2)
        with pytest.raises(
            ModifiedError, match=r"shape \[2, 3\].*inplace operation.*Write y = y \+ z in place of y \+="
        ):
            gradients(y, x)
        told = r"^invertible_checkpoint\(<lambda>, f_inv\)\(x, \.\.\.\): .*writes into x .*shape \[2, 3\].*x = x \+ z"
        with pytest.raises(ReplayError, match=told):
            invertible_checkpoint(lambda x, w: x.mul_(w), f_inv)(x * 1, w)
        with pytest.raises(
            ClosedOverError, match=r"`mul` reads .* shape \[3\] that needs a gradient.*functional\(model\)"
        ):
            others = iter([W + 0, W + 1, W + 2])
            grad(lambda x: invertible_checkpoint(lambda x: x * next(others), lambda y: y)(x).sum())(X)
        with pytest.raises(RangeError, match=r"^Grid\(.*Grid.enter\(x\)"):
            additive_coupling(torch.sin, torch.cos, exact=True)((X, X))

    def test_are_told_once_by_the_outermost_call(self):
        inner = invertible_checkpoint(lambda x, w: x.mul_(w), f_inv)
        with pytest.raises(ReplayError) as told:
            invertible_checkpoint(lambda x, w: inner(x * 1, w), None)(X, W)
        assert str(told.value).count("(x, ...)") == 1
        with pytest.raises(ArgumentError, match=r"linear\(\)\(x, params\): W has shape \(2, 3\)"):
            invertible_checkpoint(layers.linear())(X, X.detach().requires_grad_())


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN, torch.nn.LSTMCell])
@pytest.mark.parametrize("of", [grad, lambda f: f], ids=["grad", "value"])
def test_recurrent_layers_under_vmap_are_named(layer, of):
    """They fail without a block, too; `batch_grad` is the way out."""
    cell = layer is torch.nn.LSTMCell
    part = layer(2, 2, dtype=torch.float64, **({} if cell else {"batch_first": True}))
    x = Numbers(0)(*(3, 4) if cell else (3, 5, 4))

    def first(b):
        y = part(b)
        return y[0] if isinstance(y, tuple) else y

    block = invertible_checkpoint(additive_coupling(first, first))

    def loss(scale, x):
        return torch.cat(block((x * scale).chunk(2, -1)), -1).square().flatten(1).sum(1)

    scale = torch.ones((), dtype=x.dtype)
    with pytest.raises(ArgumentError, match=f"^invertible_checkpoint.*{layer.__name__}: torch.func.vmap cannot batch"):
        vmap(of(lambda scale, x: loss(scale, x[None])[0]), (None, 0))(scale, x)
    wanted = torch.stack([grad(lambda s, one=one: loss(s, one[None]).sum())(scale) for one in x])
    assert_trees_close(batch_grad(loss)(scale, x), wanted, 1e-9)
