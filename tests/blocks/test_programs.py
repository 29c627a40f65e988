"""Ordinary programs that were wrong once: dtypes, strides, losses on the side, the same tensor in several places."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, grad_and_value, vmap

from invfunc import additive_coupling, invertible_checkpoint, tree
from invfunc.errors import ArgumentTypeError, InverseError
from invfunc.pairs import momentum
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

X = Numbers(0)(3, 4)
EXACT = 1e-9


def as_it_is(pair):
    return pair


def test_parts_of_a_narrower_dtype_than_they_become():
    """The inverse gives them in the wider one; shared functions get them in the dtype that they had."""

    def wide(b):
        return b.sin() + torch.ones(4, dtype=torch.float64)

    found = []
    for wrap in (invertible_checkpoint, as_it_is):
        x, w = X.float().requires_grad_(), torch.ones(4, requires_grad=True)
        block = wrap(additive_coupling(lambda b, w=w: (b * w).tanh(), wide))
        a, b = block((x, x * 2))
        found.append(torch.autograd.grad((a * b).sum(), [x, w]))
    assert_trees_close(*found, 1e-5)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_an_operation_saves_before_it_fills_it_is_filled(inplace):
    """`rrelu` saves its noise, and draws it then."""
    matrix = Numbers(4)(4, 4)

    def part(b):
        return nn.functional.rrelu(b @ matrix, training=True, inplace=inplace)

    found = []
    for wrap in (invertible_checkpoint, as_it_is):
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        a, b = wrap(additive_coupling(part, torch.sin))((x, x.cos()))
        y = wrap(lambda x: x + part(x), None)(x) if wrap is invertible_checkpoint else x + part(x)
        found.append(torch.autograd.grad((a.sin() * b).sum() + (y * y).sum(), x))
    assert_trees_close(*found, EXACT)


class Expert(nn.Module):
    """A layer that leaves a loss in an attribute, as experts do for their balance."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3).double()

    def forward(self, x):
        y = self.lin(x)
        self.balance = y.square().mean()
        return y.tanh()


WAYS = {
    "a coupling": lambda F, G, block: block(additive_coupling(F, G, split_dim=1)),
    "a function": lambda F, G, block: block(
        lambda x: torch.cat([x[:, :3] + F(x[:, 3:]), x[:, 3:]], 1),
        lambda y: torch.cat([y[:, :3] - F(y[:, 3:]), y[:, 3:]], 1),
    ),
    "a checkpoint": lambda F, G, block: block(lambda x: x + torch.cat([F(x[:, :3]), G(x[:, 3:])], 1), None),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_in_an_attribute_has_its_gradient_beside_that_of_the_net(way):
    def gradients(block):
        torch.manual_seed(0)
        F, G = Expert(), Expert()
        x = torch.randn(5, 6, dtype=torch.float64)
        loss = WAYS[way](F, G, block)(x).square().mean() + F.balance
        return torch.autograd.grad(loss, list(F.parameters()))

    assert_trees_close(gradients(invertible_checkpoint), gradients(lambda f, f_inv=None: f), EXACT)


@pytest.mark.parametrize("given", [lambda a: (a, a), lambda a: (a, a * 1)], ids=["once", "twice"])
def test_the_same_tensor_in_several_places(given):
    """In the second evaluation each is a tensor of its own; a coupling function may return its argument."""
    pair = additive_coupling(lambda b, p: b, lambda a, p: (a * p[0]).sin() * p[1])

    def run(block):
        x, w = (Numbers(k)(3, 3).requires_grad_() for k in range(2))
        y = torch.stack(block(given(x * 1), (given(w), given(w))))
        return torch.autograd.grad(y.square().sum(), (x, w))

    assert_trees_close(run(invertible_checkpoint(pair)), run(pair), EXACT)


@pytest.mark.parametrize("n", [4, 5])
@pytest.mark.parametrize("split_dim", [None, 1])
def test_tensors_lie_in_memory_as_they_did(n, split_dim):
    """A linear layer saves its input and its weight in another order where its kernel is another."""

    def run(wrap):
        generator = torch.Generator().manual_seed(3)
        made = (torch.randn(4, 4, generator=generator), torch.randn(4, generator=generator))
        w, bias, x = (t.double().requires_grad_() for t in (*made, torch.randn(n, 8, generator=generator)))

        def part(b):
            return F.linear(b[:, None], w, bias)[:, 0].tanh()

        block = wrap(additive_coupling(part, part, split_dim=split_dim))
        out = block(block(x if split_dim == 1 else x.chunk(2, 1)))
        loss = sum(t.sin().sum() for t in tree.tensors(out))
        return torch.autograd.grad(loss, [w, bias, x])

    assert_trees_close(run(invertible_checkpoint), run(as_it_is), EXACT)


class TestOptions:
    def test_of_what_is_checkpointed_already_stay(self):
        x = torch.ones(3, requires_grad=True)
        kept = invertible_checkpoint(invertible_checkpoint(lambda x: x.exp(), None))
        kept(kept(x)).sum().backward()
        wrong = invertible_checkpoint(lambda x: 2 * x, lambda y: y, check=True)
        with pytest.raises(InverseError, match="check="):
            invertible_checkpoint(wrong)(x)

    @pytest.mark.parametrize("option", [{"keep": 0}, {"keep": (0.5,)}, {"check": "a"}, {"min_bytes": "a"}])
    def test_of_a_wrong_kind_are_refused(self, option):
        (name,) = option
        with pytest.raises(ArgumentTypeError, match=name):
            invertible_checkpoint(lambda x: x, lambda y: y, **option)


class TestInsideOfTorchFunc:
    @pytest.mark.parametrize("kind", ["dropout", "dropout2d"])
    def test_dropout_of_what_is_transposed_is_that_of_the_function(self, kind):
        """Inside of torch.func it gives its random numbers to other entries than outside."""
        drop = getattr(F, kind)

        def f(x, w):
            return x + drop(x.transpose(0, 1).sin() * w, 0.5, True).transpose(0, 1)

        def found(wrap):
            torch.manual_seed(0)
            g = wrap(f, None)
            loss = torch.func.grad_and_value(lambda w: g(g(torch.ones(5, 6, 2, 3), w), w).square().sum())
            return loss(torch.tensor([0.5, 1.0, 2.0]))

        assert_trees_close(found(invertible_checkpoint), found(lambda f, _: f), 1e-5)


ADJACENCY = Numbers(3)(5, 5) * (Numbers(4)(5, 5) > 0)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("where", ["argument", "buffer"])
def test_a_sparse_matrix_is_read_as_without_blocks(where, layout):
    """As the adjacency matrix of a graph network. torch.func itself takes those in COO format only."""
    with warnings.catch_warnings():  # torch says that they are in beta state
        warnings.simplefilter("ignore")
        A = ADJACENCY.to_sparse(layout=layout)
    module = nn.Module()
    module.register_buffer("A", A)
    pair = additive_coupling(lambda b, p, *A: ((A[0] if A else module.A) @ (b @ p)).tanh(), lambda a, p, *A: a.sin())

    def found(block):
        def loss(x, w):
            state, more = (x.sin(), x.cos()), (A,) if where == "argument" else ()
            for _ in range(3):
                state = block(state, (w, None), *more)
            return torch.cat(state).square().sum()

        x, w = Numbers(1)(5, 4), Numbers(2)(4, 4).requires_grad_()
        first = torch.autograd.grad(loss(x, w), w, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), w)
        return first, second, grad(loss, (0, 1))(x, w.detach()) if layout is torch.sparse_coo else ()

    assert_trees_close(found(invertible_checkpoint(pair)), found(pair), EXACT)


# Parts without a gradient, backward passes in inference mode, and parameters that data initialises.

START = Numbers()(2, 3), Numbers(1)(2, 3)
W = Numbers(2)(3, 3)


def hard(z, w):
    """A part without a gradient, as those of quantisers."""
    with torch.no_grad():
        rounded = (z @ w).round()
    return rounded + 0.3 * z @ w


def value(step, w, frozen=False):
    """Of blocks one after the other, of which one may need nothing that is saved."""
    q = w.detach() if frozen else w
    a, b = step(step(step(START, w), q), w)
    return (a * b).sin().sum()


PAIRS = {"coupling": lambda f: additive_coupling(f, f), "momentum": lambda f: momentum(f, 0.9)}
each_pair = pytest.mark.parametrize("pair", PAIRS)


def made(pair, f):
    """A step of both parts with one weight."""
    step = PAIRS[pair](f)
    blocks = [step, invertible_checkpoint(step), invertible_checkpoint(step, keep=True)]
    return [lambda x, w, g=g: g(x, (w, w) if pair == "coupling" else w) for g in blocks]


@each_pair
def test_parts_without_a_gradient(pair):
    def found(step):
        w = W.clone().requires_grad_()
        plain = [torch.autograd.grad(value(step, w, frozen), w)[0] for frozen in (False, True)]
        of = grad_and_value(lambda w: value(step, w))
        return plain, of(W), vmap(of)(W[None])

    plain, *blocks = (found(step) for step in made(pair, hard))
    for block in blocks:
        assert_trees_close(block, plain, 1e-9)


@each_pair
def test_the_backward_pass_may_be_in_inference_mode(pair):
    """As that of torch."""

    def found(step, mode):
        w = W.clone().requires_grad_()
        loss = value(step, w)
        with mode():
            torch.autograd.grad(loss, w, retain_graph=True)
            return torch.autograd.grad(loss, w)[0].clone()

    plain, *blocks = made(pair, lambda z, w: (z @ w).tanh())
    for block in blocks:
        assert_trees_close(found(block, torch.inference_mode), found(plain, torch.enable_grad), 1e-9)


class ActNorm(torch.nn.Module):
    """Glow's, whose first batch gives it its scale."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3, dtype=W.dtype))
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.done.fill_(True)
        return x * self.scale

    def inverse(self, y):
        return y / self.scale


@pytest.mark.parametrize("before", [False, True], ids=["at once", "by a call without gradients"])
def test_parameters_that_are_initialised_by_data_are_so_once(before):
    plain, norm = ActNorm(), ActNorm()
    (wanted,) = torch.autograd.grad(plain(START[0]).sin().sum(), plain.scale)
    block = invertible_checkpoint(norm, norm.inverse)
    if before:
        with torch.no_grad():
            block(START[0])
    x = START[0].clone().requires_grad_()
    (found,) = torch.autograd.grad(block(x * 1).sin().sum(), norm.scale)
    assert_trees_close(found, wanted, 1e-12)
    assert norm.done and torch.allclose(norm.scale, plain.scale)


@pytest.mark.parametrize("inverse", [True, False], ids=["given", "found"])
def test_functions_are_not_kept_alive(inverse):
    held = []

    def once():
        shift = torch.ones(3, requires_grad=True)
        held.append(weakref.ref(shift))
        functions = (lambda x: (x[0] + shift, x[1])), (lambda y: (y[0] - shift, y[1]))
        f = invertible_checkpoint(*functions[: 1 + inverse])
        for _ in range(4):
            torch.stack(f((torch.ones(3) * 1, torch.ones(3) * 2))).sum().backward()

    once()
    gc.collect()
    assert held[0]() is None


def test_tensors_of_inference_mode_are_taken():
    f = invertible_checkpoint(lambda x, w: x + w, lambda y, w: y - w)
    with torch.inference_mode():
        w = torch.ones(3)
    x = torch.ones(3, requires_grad=True)
    f(x * 1, w).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.parametrize(
    "compiled", [torch.jit.script, lambda m: torch.jit.trace(m, X[:, :2])], ids=["script", "trace"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_of_torch_jit(compiled):
    """Whose parameters are in no dict. The first calls, by which torch optimises them, save other tensors."""
    torch.manual_seed(0)
    part = compiled(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Tanh()).double())
    pair, found = additive_coupling(part, lambda a: part(a).sin(), split_dim=1), []
    for block in (pair, pair, pair, invertible_checkpoint(pair)):
        x = X.clone().requires_grad_()
        found.append(torch.autograd.grad(block(block(x * 1)).sin().sum(), [x, *part.parameters()]))
    assert_trees_close(found[3], found[2], EXACT)
