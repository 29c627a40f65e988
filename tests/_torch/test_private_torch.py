"""Behaviour of private torch that the doors rely on: these tests fail loudly on a torch that changed it."""

import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import hessian
from torch.func import grad, jacrev, jvp, vmap

from invfunc._torch import doors, functorch, opened, sharded
from invfunc._torch.generators import uniform
from invfunc.errors import TorchVersionError
from tests import versions
from tests.strategies import Numbers

SEEN_ON = "2.13", "2.14", "2.15"
"""Versions of torch on which the suite was run: each has all private names."""


@pytest.mark.quick
@pytest.mark.parametrize("name", versions.used())
def test_a_private_name_is_there(name):
    assert doors.holder(*name.rsplit(".", 1)) is not None
    assert ".".join(torch.__version__.split(".")[:2]) in SEEN_ON, "the suite was not run on this torch"


def test_versions_are_the_same_everywhere():
    assert f'"{doors.SUPPORTED}"' in (versions.ROOT / "pyproject.toml").read_text()
    major, minor = SEEN_ON[-1].split(".")
    assert doors.SUPPORTED == f"torch>={SEEN_ON[0]},<{major}.{int(minor) + 1}"


@pytest.mark.quick
def test_what_torch_lacks_is_told_by_the_call_that_needs_it():
    told = f"torch {torch.__version__} has no torch._C.no_name, .*{doors.SUPPORTED}".replace("+", r"\+")
    missing, gone = doors.door("torch._C"), doors.door("torch._no_module")
    called = doors.entry("torch._C", "no_name")
    for call in (lambda: missing.no_name, called, lambda: called(1)):
        with pytest.raises(TorchVersionError, match=told):
            call()
    with pytest.raises(TorchVersionError, match="no torch._no_module.name"):
        gone.name()
    assert not hasattr(missing, "no_name")


def test_the_import_needs_no_private_name():
    """But for the pytrees, in which results are registered, and the base of dispatch modes."""
    code = """
import pkgutil, types, torch
real = pkgutil.resolve_name
pkgutil.resolve_name = lambda path: real(path) if path == "torch.utils._pytree" else types.SimpleNamespace()
import invfunc
try:
    invfunc.batch_grad(lambda p, x: (x * p).sum(-1))(torch.ones(2), torch.ones(3, 2))
except invfunc.errors.TorchVersionError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"torch {torch.__version__} has no torch." in run.stdout, run.stdout + run.stderr


@pytest.mark.quick
def test_compiled_functions_run_as_they_were_written():
    seen = []
    part = torch.compile(lambda x: x.sin(), backend=lambda graph, inputs: seen.append(graph) or graph)
    stance = torch._dynamo.eval_frame._stance
    with opened.Uncompiled(), opened.Uncompiled():
        part(torch.ones(2))
    assert seen == [] and torch._dynamo.eval_frame._stance is stance
    part(torch.ones(2))
    assert len(seen) == 1


@pytest.mark.quick
def test_a_level_of_our_own_differentiates_and_composes():
    def slope(x):
        with functorch.grad_level() as (enter, leave):
            inner = enter(x)
            (g,) = torch.autograd.grad((inner**3).sum(), inner, create_graph=True)
            return leave(g)

    x = torch.tensor([1.0, 2.0])
    assert torch.equal(slope(x), 3 * x**2) and not slope(x).requires_grad
    assert torch.equal(grad(lambda x: slope(x).sum())(x), 6 * x)
    assert torch.equal(vmap(slope)(torch.stack([x, -x])), torch.stack([3 * x**2] * 2))
    assert not functorch.transforming()


@pytest.mark.quick
def test_python_functions_of_torch_are_opened():
    body = opened.opened(torch.nn.functional.multi_head_attention_forward)
    assert body is not None and body.__code__ is torch.nn.functional.multi_head_attention_forward.__code__
    assert opened.opened(torch.tanh) is None and opened.opened(len) is None


@pytest.mark.quick
def test_parameters_that_are_sharded_can_be_gathered_again():
    pytest.importorskip("torch.distributed.fsdp")
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    group, node = _fsdp_param_group.FSDPParamGroup, _fsdp_param_group.RegisterPostBackwardFunction
    assert isinstance(group.is_unsharded, property) and all(
        callable(getattr(group, name)) for name in ("unshard", "wait_for_unshard", "reshard")
    )
    assert sharded.divided(node) and "ctx.param_group = " in inspect.getsource(node)


# Numbers without a pattern that are the same in each call


@pytest.mark.quick
def test_numbers_are_the_same_whatever_the_default_dtype():
    """Half precision as the default: 2**32 is infinite in it."""
    wanted, before = uniform(1000, 1), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float16)
        found = uniform(1000, 1)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found, wanted) and found.abs().max() <= 1


# Faults of torch that the package works around: a test fails on the torch that has mended one, for somebody to
# delete the workaround, or to say since which version it is not needed

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
