"""Operations that no function mode sees: custom autograd.Functions, derivatives, checkpoints and vmap inside of f."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.checkpoint import checkpoint

from invfunc import (
    InvFuncError,
    batch_grad,
    batch_jacobian,
    chunked,
    diag_ggn,
    diag_hessian,
    functional,
    gram,
    kfac,
    reduced,
    together,
    tree,
    variance,
)
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_batch_grad, loop_batch_jacobian, loop_gram
from tests.rows import FIRST_ORDER
from tests.strategies import Numbers

EXACT, N = 1e-9, 3
RAND = Numbers()
PARAMS = {"w": RAND(4, 4) / 2, "v": RAND(4, 3) / 2, "unread": RAND(2)}
X, Y = RAND(N, 4), RAND.below(3, N)
LSTM = torch.nn.LSTM(4, 4, batch_first=True).double().requires_grad_(False)


class Rounded(torch.autograd.Function):
    """Straight through, in the old style, with an argument that is not a tensor."""

    @staticmethod
    def forward(ctx, z, scale):
        ctx.save_for_backward(z)
        return (z * scale).round() / scale

    @staticmethod
    def backward(ctx, slope):
        (z,) = ctx.saved_tensors
        return slope * (z.abs() < 2), None


class RoundedLater(torch.autograd.Function):
    """The same with a context of its own, for which torch makes a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z, scale):
        return (z * scale).round() / scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    backward = Rounded.backward


class FixedPoint(torch.autograd.Function):
    """z = tanh(z w / 3 + x), with an implicit derivative that is found by iteration."""

    @staticmethod
    def forward(ctx, w, x):
        z = torch.zeros_like(x)
        for _ in range(60):
            z = torch.tanh(z @ w / 3 + x)
        ctx.save_for_backward(w, x, z)
        return z

    @staticmethod
    def backward(ctx, slope):
        w, x, z = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(z @ w / 3 + x)
        found = slope
        for _ in range(60):
            found = slope + torch.autograd.grad(y, z, found, retain_graph=True)[0]
        return torch.autograd.grad(y, (w, x), found)


class Averaged(torch.autograd.Function):
    """Divides by the size of the batch, on the way back alone."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, slope):
        return slope / len(slope)


def head(h, p):
    return h.tanh() @ p["v"]


def slopes(p, x, order=1):
    """A physics-informed network: its outputs and their derivatives in the inputs."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        u = head(x @ p["w"], p)
        g = u
        for _ in range(order):
            (g,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
    return u + g[:, :3]


def recurrent(h, w):
    weights = {"weight_ih_l0": w.repeat(4, 1), "weight_hh_l0": w.T.repeat(4, 1)}
    steps = h[:, None] * torch.arange(1.0, 4, dtype=h.dtype)[:, None]
    return torch.func.functional_call(LSTM, weights, (steps,))[0][:, -1]


def by_checkpoint(f, *args, reentrant=False):
    return checkpoint(f, *args, use_reentrant=reentrant)


SMOOTH = {
    "autograd.grad": slopes,
    "autograd.grad twice": lambda p, x: slopes(p, x, 2),
    "func.grad": lambda p, x: torch.func.vmap(torch.func.grad(lambda x: head(x @ p["w"], p).square().sum()))(x)[:, :3],
    "func.jvp": lambda p, x: torch.func.jvp(lambda x: head(x @ p["w"], p), (x,), (torch.ones_like(x),))[1],
    "func.vmap": lambda p, x: torch.func.vmap(lambda x: head(x @ p["w"], p))(x),
    "checkpoint": lambda p, x: head(by_checkpoint(lambda x: (x @ p["w"]).sin(), x), p),
    "checkpoint with an argument": lambda p, x: head(by_checkpoint(lambda x, w: (x @ w).sin(), x, p["w"]), p),
    "checkpoint of recurrent layers": lambda p, x: head(by_checkpoint(recurrent, x, p["w"]), p),
}
ROUGH = {
    "straight through": lambda p, x: head(Rounded.apply(x @ p["w"], 4.0), p),
    "straight through, a parameter": lambda p, x: head(x @ Rounded.apply(p["w"], 4.0), p),
    "straight through, setup_context": lambda p, x: head(RoundedLater.apply(x @ p["w"], 4.0), p),
    "straight through, at the end": lambda p, x: Rounded.apply(head(x @ p["w"], p), 4.0),
    "fixed point": lambda p, x: head(FixedPoint.apply(p["w"], x), p),
}
HIDDEN = SMOOTH | ROUGH
SEEN = {"checkpoint", "checkpoint with an argument"}
"""Programs whose inner operations are recorded: every form works."""
hidden = pytest.mark.parametrize("called", HIDDEN)


def losses(f):
    return lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="none")


def mean(f):
    return lambda p, x, y: F.cross_entropy(f(p, x), y)


FIRST = {
    **{name: (row.make, row.of_shares) for name, row in FIRST_ORDER.items()},
    "samples": (lambda f: batch_grad(f, samples=[2, 0, 2]), lambda G: tree.map_leaves(lambda g: g[[2, 0, 2]], G)),
    "chunks": (lambda f: chunked(batch_grad(f), 2), lambda G: G),
    "chunks of one": (lambda f: chunked(variance(f), N), FIRST_ORDER["variance"].of_shares),
    "chunks of parameters": (lambda f: chunked(variance(f), 2, over="params"), FIRST_ORDER["variance"].of_shares),
    "together": (lambda f: together(batch_grad(f), variance(f)), lambda G: (G, FIRST_ORDER["variance"].of_shares(G))),
    "reduced": (lambda f: reduced(batch_grad(f), lambda g: g.sum(0)), lambda G: tree.map_leaves(lambda g: g.sum(0), G)),
}


@hidden
class TestEqualsTheLoop:
    @pytest.mark.quick
    @pytest.mark.parametrize("statistic", FIRST)
    def test_of_the_losses_of_the_samples(self, called, statistic):
        ours, of_shares = FIRST[statistic]
        f = losses(HIDDEN[called])
        assert_trees_close(ours(f)(PARAMS, X, Y), of_shares(loop_batch_grad(f)(PARAMS, X, Y)), EXACT, 1e-12)

    @pytest.mark.parametrize("statistic", FIRST)
    def test_a_scalar_is_right_or_refused_with_a_way_out(self, called, statistic):
        ours, of_shares = FIRST[statistic]
        f = HIDDEN[called]
        shares = tree.map_leaves(lambda g: g / N, loop_batch_grad(losses(f))(PARAMS, X, Y))
        try:
            found = ours(mean(f))(PARAMS, X, Y)
        except SampleAxisError:
            assert called not in SEEN and statistic != "variance"
        else:
            assert_trees_close(found, of_shares(shares), EXACT, 1e-12)

    @pytest.mark.parametrize("over", [None, "outputs", "samples", "params"])
    def test_of_a_model(self, called, over):
        f = HIDDEN[called]
        divided = (lambda t: t) if over is None else (lambda t: chunked(t, 2, over=over))
        wanted = dense_diag_ggn(f, F.cross_entropy)(PARAMS, X, Y)
        assert_trees_close(divided(diag_ggn(f, F.cross_entropy))(PARAMS, X, Y), wanted, EXACT, 1e-12)
        each = divided(diag_ggn(f, F.cross_entropy, per_sample=True))(PARAMS, X, Y)
        assert_trees_close(tree.map_leaves(lambda d: d.sum(0), each), wanted, EXACT, 1e-12)
        rows = divided(batch_jacobian(f))(PARAMS, X)
        assert_trees_close(rows, loop_batch_jacobian(f)(PARAMS, X), EXACT, 1e-12)
        if over in (None, "params"):
            assert_trees_close(divided(gram(f))(PARAMS, X), loop_gram(f)(PARAMS, X), EXACT, 1e-12)


def test_a_backward_that_is_not_differentiable_is_told():
    with pytest.raises(SampleAxisError, match="the samples are not kept apart"):
        diag_hessian(HIDDEN["fixed point"], F.cross_entropy)(PARAMS, X, Y)


class TestRefuses:
    @pytest.mark.parametrize("form", [losses, mean])
    def test_a_reentrant_checkpoint(self, form):
        def f(p, x):
            return head(by_checkpoint(torch.sin, x @ p["w"], reentrant=True), p)

        for t in (batch_grad(form(f)), diag_ggn(form(f)), diag_ggn(f, F.cross_entropy)):
            args = (PARAMS, X, Y)
            with pytest.raises(SampleAxisError, match="the samples are not kept apart"):
                t(*args)

    @pytest.mark.parametrize("n", [None, 2, N])
    def test_samples_that_are_mixed(self, n):
        for mixed in (
            lambda p, x: head(Rounded.apply(x @ p["w"] - (x @ p["w"]).mean(0), 1e6), p),
            *([] if n == N else [lambda p, x: head(Averaged.apply(x @ p["w"]), p)]),  # of one it is right
            lambda p, x: head(Rounded.apply(x @ p["w"], 1e6) / len(x), p),
        ):
            with pytest.raises(SampleAxisError, match="the samples are not kept apart|in a smaller batch"):
                chunked(batch_grad(losses(mixed)), n)(PARAMS, X, Y)
            with pytest.raises(SampleAxisError, match="the samples are not kept apart|in a smaller batch"):
                diag_ggn(mixed, F.cross_entropy)(PARAMS, X, Y)


def slope(x, tree_, **options):
    """`torch.autograd.grad`, with zeros where there is none."""
    if not x.requires_grad:
        return [torch.zeros_like(leaf) for leaf in tree_.values()]
    options = {"allow_unused": True, "materialize_grads": True, "retain_graph": True} | options
    return list(torch.autograd.grad(x, list(tree_.values()), **options))


# Samples that go where function modes do not see them: shares of a scalar loss are those of the loop, or refused

EXACT_LOST = 1e-9
P, X_LOST, Y_LOST = Numbers()(3, 3), Numbers(1)(4, 3), torch.tensor([0, 2, 1, 2])
LAYER = nn.Linear(3, 3).double().requires_grad_(False)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return g


@torch.library.custom_op("invfunc_tests::lost", mutates_args=())
def own_op(x: torch.Tensor) -> torch.Tensor:
    return x.square()


def differentiated(x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(x.pow(3).sum(), x)[0]


def backward(x):
    x = x.detach().clone().requires_grad_()
    x.pow(3).sum().backward()
    return x.grad


def strange(x):
    return torch.vmap(torch.sin)(x)


FOUND = {
    "vmap": vmap(torch.sin),
    "vmap of a layer": vmap(lambda row: LAYER(row).tanh()),
    "vmap, samples last": lambda x: vmap(torch.sin, 0, -1)(x).T,
    "vmap over features": vmap(torch.sin, 1, 1),
    "grad": grad(lambda x: x.pow(3).sum()),
    "vmap of grad": vmap(grad(lambda x: x.pow(3).sum())),
    "jvp": lambda x: jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda x: jacrev(lambda x: x.sin().sum(0))(x).sum(0),
    "parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "buffer": nn.Buffer,
    "autograd.Function": Squares.apply,
    "functional_call": lambda x: functional_call(LAYER, dict(LAYER.named_parameters()), (x,)),
    "deepcopy": copy.deepcopy,
    "data": lambda x: x.data.clone(),
}
"""Operations that are followed."""
WAYS = FOUND | {
    "vmap in chunks": lambda x: vmap(torch.sin, chunk_size=2)(x),
    "vjp": lambda x: vjp(torch.sin, x)[1](torch.ones_like(x))[0],
    "jacfwd": lambda x: jacfwd(lambda x: x.sin().sum(0))(x).sum(0),
    "linearize": lambda x: linearize(torch.sin, x)[1](torch.ones_like(x)),
    "autograd.grad": differentiated,
    "backward": backward,
    "jagged": lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged).values().view(x.shape),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "custom op": own_op,
    "mean": lambda x: strange(x).mean(0).expand(x.shape),
    "roll": lambda x: strange(x.roll(1, 0)),
    "next": lambda x: strange(torch.cat([x[1:], x[-1:]])),
}
"""Functions of torch alone, of a batch `[N, 3]`."""
LOSSES = {
    "alone": lambda g: lambda p, x, y: (g(x) @ p).tanh().square().mean(),
    "with a target": lambda g: lambda p, x, y: F.cross_entropy(g(x) @ p, y),
    "beside what is seen": lambda g: lambda p, x, y: ((g(x) @ p).tanh() - x).square().mean(),
    "beside a term that is seen": lambda g: (
        lambda p, x, y: F.cross_entropy(x @ p, y) + (g(x) @ p).tanh().square().mean()
    ),
}
"""Means over the samples, of what a way gives."""


def loop(f, p, *batch):
    """The plain loop: f on each sample alone."""
    n, shares = len(batch[0]), []
    for i in range(n):
        q = p.clone().requires_grad_()
        shares.append(torch.autograd.grad(f(q, *(x[i : i + 1].clone() for x in batch)), q)[0] / n)
    return torch.stack(shares)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_shares_are_those_of_the_loop_or_refused(way, loss):
    f = loss(WAYS[way])
    try:
        found = batch_grad(f)(P, X_LOST, Y_LOST)
    except InvFuncError:
        assert way not in FOUND
        return
    assert_trees_close(found, loop(f, P, X_LOST, Y_LOST), EXACT_LOST)


# Operations called by the names of all their arguments, and parts that torch.compile made: statistics are the same

N_C, T, D = 5, 3, 4
P_C = {"w": Numbers()(D, D), "b": Numbers(1)(D)}
X_C, Y_C = Numbers(2)(N_C, T, D), Numbers(3).below(2, N_C)

OPERATIONS = {
    "linear": (lambda p, x: F.linear(x, p["w"], p["b"]), lambda p, x: F.linear(weight=p["w"], bias=p["b"], input=x)),
    "matmul": (lambda p, x: torch.matmul(x, p["w"]), lambda p, x: torch.matmul(input=x, other=p["w"])),
    "conv1d": (
        lambda p, x: F.conv1d(x.mT, p["w"][..., None], p["b"]),
        lambda p, x: F.conv1d(input=x.mT, weight=p["w"][..., None], bias=p["b"]),
    ),
    "layer_norm": (
        lambda p, x: F.layer_norm(x @ p["w"], (D,), p["b"]),
        lambda p, x: F.layer_norm(input=x @ p["w"], normalized_shape=(D,), weight=p["b"]),
    ),
    "cat": (lambda p, x: torch.cat([x @ p["w"], x], -1), lambda p, x: torch.cat(tensors=[x @ p["w"], x], dim=-1)),
    "where": (
        lambda p, x: torch.where(x > 0, x @ p["w"], x * p["b"]),
        lambda p, x: torch.where(condition=x > 0, input=x @ p["w"], other=x * p["b"]),
    ),
    "attention": (
        lambda p, x: F.scaled_dot_product_attention(x @ p["w"], x, x * p["b"]),
        lambda p, x: F.scaled_dot_product_attention(query=x @ p["w"], key=x, value=x * p["b"]),
    ),
    "max_pool1d": (
        lambda p, x: F.max_pool1d(x @ p["w"], 2),
        lambda p, x: F.max_pool1d(input=x @ p["w"], kernel_size=2),
    ),
}
STATISTICS = {
    "batch_grad": batch_grad,
    "diag_ggn": diag_ggn,
    "diag_hessian": diag_hessian,
    "kfac": lambda f: kfac(f, fisher="exact", unsupported="diagonal"),
}


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_statistics_are_those_of_calls_by_place(operation, statistic):
    found, wanted = (
        STATISTICS[statistic](lambda p, x, y, g=g: F.cross_entropy(input=g(p, x).flatten(1), target=y))(P_C, X_C, Y_C)
        for g in reversed(OPERATIONS[operation])
    )
    if statistic == "kfac":
        assert repr(found) == repr(wanted)
        found, wanted = ({k: v.dense() for k, v in each.items()} for each in (found, wanted))
    assert_trees_close(found, wanted, 1e-10)


# What torch.compile made, in f: it runs as it was written, whether it has been called before or not


@pytest.mark.parametrize("make", [batch_grad, variance, diag_ggn, diag_hessian])
class TestCompiled:
    @pytest.mark.parametrize("called", [False, True], ids=["first", "later"])
    def test_modules(self, make, called):
        x, y = Numbers()(4, 5), Numbers(1).below(3, 4)
        torch.compiler.reset()
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        compiled = torch.compile(net, backend="eager")
        if called:
            compiled(x)
        (f, params), (plain, weights) = functional(compiled), functional(net)
        came, wanted = make(mean(f))(params, x, y), make(mean(plain))(weights, x, y)
        assert_trees_close({k.removeprefix("_orig_mod."): v for k, v in came.items()}, wanted, rtol=1e-10)
