"""Whatever function of torch brings entries of data to other places: each share is that of their sample."""

import warnings
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from torch.overrides import get_overridable_functions

from invfunc import batch_grad
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

X, C = Numbers()(4, 3), Numbers(1)(4, 3)
ARGUMENTS = [(), (0,), (1,), ((0,),), ((0, 1),), (0, 1), (1, 0), (1, (0, 1)), (2,), (2, 0)]
KNOWN = {"flip", "roll", "flipud", "rot90", "fft_fftshift", "fft_ifftshift", "unsqueeze_", "t_", "transpose_", "msort"}


def functions() -> list[Callable]:
    groups = get_overridable_functions()
    return [f for group in (torch, torch.Tensor, torch.fft, torch.nn.functional) for f in groups[group]]


def origins(out: object) -> torch.Tensor | None:
    """Of which sample each entry of a result is; None if some are of none, or of several."""
    if not isinstance(out, torch.Tensor) or out.layout != torch.strided or out.is_meta or out.dtype != X.dtype:
        return None
    same = out.reshape(-1, 1) == X.reshape(1, -1)
    return same.int().argmax(1).view(out.shape) // 3 if out.numel() and bool((same.sum(1) == 1).all()) else None


def moves() -> Iterator[tuple[str, Callable, torch.Tensor]]:
    """The functions that permute all entries of data, with arguments, and of which sample each entry then is."""
    for func, args in product(functions(), ARGUMENTS):
        try:
            samples = origins(func(X.clone(), *args))
        except Exception:  # these are not arguments of it
            continue
        if samples is None or samples.numel() != X.numel():
            continue
        own = torch.arange(4).view(-1, 1).expand(4, 3)
        if samples.shape != own.shape or not torch.equal(samples, own):
            yield func.__name__, lambda x, func=func, args=args: func(x.clone(), *args), samples


@pytest.mark.filterwarnings("ignore")
def test_moved_entries():
    w, found, right = torch.tensor(0.7, dtype=X.dtype), set(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, move, samples in moves():
            found.add(name)
            weights, c = w.expand(samples.shape).clone().requires_grad_(), C.reshape(samples.shape)
            (each,) = torch.autograd.grad(((move(X) * weights).tanh() * c).sum(), weights)
            wanted = torch.stack([each[samples == n].sum() for n in range(4)])
            try:
                came = batch_grad(lambda w, x, move=move, c=c: ((move(x) * w).tanh() * c).sum())(w, X)
            except SampleAxisError:
                continue
            assert_trees_close(came, wanted, rtol=1e-10)
            right += 1
    assert found >= KNOWN
    assert right > 50
