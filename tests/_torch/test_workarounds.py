"""Faults of torch that the package works around: a test fails on the torch that has mended one, for somebody to delete
the workaround, or to say since which version it is not needed."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import hessian
from torch.func import grad, jacrev, jvp, vmap

from invfunc._torch import doors
from tests.strategies import Numbers

rand = Numbers(0)
X, IMAGES, W, CLASSES = rand(4, 3), rand(2, 3, 2, 2), rand(3), torch.tensor([0, 1, 2, 0])


def near(a, b):
    return torch.allclose(a, b, 1e-8, 1e-10)


def twice(f):
    """Tells whether a second derivative in torch.func is that of a loop without vmap."""
    return near(jacrev(jacrev(f))(W), hessian(f, W))


def forward(f):
    """Tells whether the second derivative has a forward mode."""
    return near(jvp(grad(f), (W,), (X[0],))[1], jacrev(jacrev(f))(W) @ X[0])


def in_order(norm, n):
    """Tells whether a gradient does not depend on the order of what is sent back in memory."""
    x, sent = rand(n, 3, 3, 2).requires_grad_(), rand(n, 3, 3, 2)
    orders = sent, sent.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    return near(*[torch.autograd.grad(norm(x), x, each)[0] for each in orders])


def attention(w):
    q = (IMAGES * w[:, None, None]).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).sin().sum()


def prelu():
    mixed = jacrev(grad(lambda x, w: F.prelu(x, w).sin().sum()), argnums=1)
    return vmap(mixed)(rand(2, 4, 3), rand(2, 3)) is not None


def solve():
    a, b = rand(2, 2, 3, 3), rand(2, 3, 2)
    return near(vmap(torch.linalg.solve)(a, b), torch.stack([*map(torch.linalg.solve, a, b)]))


def complex_abs():
    return grad(grad(grad(lambda x: torch.complex(x, x).abs())))(W.new_zeros(())).isfinite()


def scaled(v, g):
    return v * (g / torch.norm_except_dim(v, 2, 0))


def weight_norm():
    made = torch._weight_norm, scaled
    return near(*[jacrev(jacrev(lambda w, f=f: f(X[:3] * w, w[:, None]).sin().sum()))(W) for f in made])


def bag(w):
    return F.embedding_bag(torch.tensor([[0, 1], [2, 1]]), w[:, None] * torch.ones_like(X[:2, :2])[0]).sin().sum()


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0].cos()


def nested_jvp():
    one = W.new_ones(())
    return near(jvp(lambda x: jvp(Sine.apply, (x,), (one,))[1], (W[0],), (one,))[1], -W[0].sin())


NORMS = "operations/forms.py"
RIGHT = {
    "attention": (lambda: twice(attention), "operations/forms.py", None),
    "prelu": (prelu, "operations/forms.py", None),
    "cdist": (lambda: twice(lambda w: torch.cdist(X * w, X + 1).sum()), "operations/forms.py", None),
    "third derivative of abs": (complex_abs, "operations/forms.py", None),
    "solve": (solve, "operations/forms.py", None),
    "layer_norm": (lambda: twice(lambda w: F.layer_norm(X * w, (3,), w).sin().sum()), NORMS, None),
    "batch_norm": (lambda: twice(lambda w: F.batch_norm(X * w, None, None, w, None, True).sin().sum()), NORMS, None),
    "order of one": (lambda: in_order(lambda x: F.batch_norm(x, None, None, None, None, True), 1), NORMS, None),
    "order of each": (lambda: in_order(F.instance_norm, 3), NORMS, None),
    "weight_norm": (weight_norm, NORMS, None),
    "embedding_bag": (lambda: twice(bag), "operations/forms.py", None),
    "mse": (lambda: forward(lambda w: F.mse_loss(X * w, X)), "operations/forms.py", None),
    "huber": (lambda: forward(lambda w: F.huber_loss(X * w, X)), "operations/forms.py", None),
    "soft_margin": (lambda: forward(lambda w: F.soft_margin_loss(X * w, X.sign())), "operations/forms.py", None),
    "no samples": (lambda: F.pixel_unshuffle(X.new_ones(0, 1, 4, 4), 2).shape[1] == 4, "layers/shapes.py", None),
    "jvp of a jvp": (nested_jvp, "linear_algebra/matrices.py", None),
}


@pytest.mark.parametrize("fault", RIGHT)
@pytest.mark.filterwarnings("ignore")
def test_is_still_there(fault):
    right, where, since = RIGHT[fault]
    torch_is = tuple(map(int, torch.__version__.split(".")[:2]))
    try:
        found = right()
    except (RuntimeError, ValueError):
        found = False
    assert found == (since is not None and torch_is >= since), f"torch has changed: what {where} works around"
    oldest = doors.SUPPORTED.removeprefix("torch>=").partition(",")[0]
    assert since is None or tuple(map(int, oldest.split("."))) < since, f"all torch is right: delete it from {where}"
