"""Opacus: its optimiser fed with our per-sample gradients, and its fast clipping beside ours."""

import copy
import warnings

import torch
from torch import nn
from torch.nn import functional as F

import invfunc
from invfunc import InvFuncError
from tests.clients.client import Outcome, assert_near

NORM = 0.5


def problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    return model, torch.randn(5, 1, 4, 4).double(), torch.tensor([0, 1, 2, 2, 1])


def clipped(model, x, y):
    """Our sum of the clipped gradients, by name, over the number of samples."""
    f, params = invfunc.functional(model)
    total, norms = invfunc.clipped_grad(lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="none"), NORM)(
        params, x, y
    )
    assert (norms > NORM).any() and (norms < 4 * NORM).any()
    return {name: g / len(x) for name, g in total.items()}


def optimiser() -> Outcome:
    """`DPOptimizer` takes `p.grad_sample` as it comes: no hooks, no GradSampleModule."""
    from opacus.optimizers import DPOptimizer

    model, x, y = problem()
    wanted = clipped(model, x, y)
    f, params = invfunc.functional(model)
    each = invfunc.batch_grad(lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="none"))(params, x, y)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=NORM,
        expected_batch_size=len(x),
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad_sample = each[name]
    optimizer.step()
    found = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    assert_near(found, wanted, 1e-5)  # it divides by the norm plus 1e-6
    return Outcome(["DPOptimizer fed by batch_grad: the step of clipped_grad"])


def fast_clipping() -> Outcome:
    """Both find the sum of the clipped gradients without a gradient of one sample."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    model, x, y = problem()
    wanted, twin = clipped(model, x, y), copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its hooks make torch warn
        hooked = GradSampleModuleFastGradientClipping(twin, max_grad_norm=NORM, use_ghost_clipping=True)
        optimizer = DPOptimizerFastGradientClipping(
            torch.optim.SGD(twin.parameters(), lr=1.0),
            noise_multiplier=0.0,
            max_grad_norm=NORM,
            expected_batch_size=len(x),
        )
        criterion = DPLossFastGradientClipping(hooked, optimizer, nn.CrossEntropyLoss())
        criterion(hooked(x), y).backward()
        optimizer.step()
    before = dict(model.named_parameters())
    assert_near({name: (before[name] - p).detach() for name, p in twin.named_parameters()}, wanted, 1e-5)
    outcome = Outcome(["fast (ghost) clipping: the step of clipped_grad"])
    mixing = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 3)).double()
    try:
        clipped(mixing, x, y)
    except InvFuncError as error:
        outcome.refuse("batch norm in training", error)
    return outcome
