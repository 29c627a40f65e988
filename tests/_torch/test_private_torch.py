"""What the doors to private torch rely on: these fail loudly on a torch that changed it."""

import inspect

import pytest
import torch
from torch.func import grad, vmap

from invfunc._torch import functorch, opened, sharded


@pytest.mark.quick
def test_levels_are_seen():
    seen = []
    assert not functorch.transforming()
    vmap(lambda x: seen.append(functorch.transforming()) or x)(torch.ones(2))
    grad(lambda x: seen.append(functorch.transforming()) or x)(torch.ones(()))
    assert seen == [True, True] and not functorch.transforming()


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
def test_wrappers_are_taken_off():
    x, seen = torch.ones(3, 2), []
    vmap(grad(lambda x: seen.append(functorch.innermost(x)) or x.sum()))(x)
    assert torch.equal(seen[0], x) and not seen[0].requires_grad


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
    assert sharded.divided(node) and "ctx.param_group = " in inspect.getsource(node.setup_context)
