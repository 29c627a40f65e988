"""Behaviour of private torch that the doors rely on: these tests fail loudly on a torch that changed it."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch.func import grad, vmap

from invfunc._torch import doors, functorch, opened, sharded
from invfunc.errors import TorchVersionError
from tests import versions

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
