"""Columns at the outputs of a model: where its loss is one of torch's criteria, of which the Hessian is known.

The criterion is found while f runs: its input is what the columns are at, and its result is replaced by a number (or by
those of the positions), in which the rest of f has to be linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._torch.functorch import storage_of, version
from invfunc._torch.values import anywhere
from invfunc.core.marks import Axis, Run, Unsupported, wide
from invfunc.core.tables import called
from invfunc.core.uses import front
from invfunc.loss.drawn import drawn
from invfunc.loss.hessian import check_sign
from invfunc.loss.square_root import Columns, Elementwise, Softmax, rooted
from invfunc.operations.naming import argument
from invfunc.reductions.quantity import Quantity

CRITERIA = {F.cross_entropy, F.mse_loss, F.binary_cross_entropy_with_logits}
"""Losses of which the Hessian is known."""
OTHERS = called(
    "nll_loss binary_cross_entropy kl_div poisson_nll_loss gaussian_nll_loss huber_loss smooth_l1_loss l1_loss"
)


Hessian = Softmax | Elementwise


def made(hessian: Hessian, quantity: Quantity, n: int) -> list[Columns]:
    """The columns of a quantity."""
    if quantity.drawing is None:
        return [rooted(hessian, "all")]
    return drawn([hessian], quantity.drawing.count, quantity.drawing.source(n), quantity.drawing.peel)


def joined(parts: Sequence[Hessian]) -> Hessian:
    """The Hessian of the loss of all samples, given that of parts of them."""
    first = parts[0]
    if any([type(part) is not type(first) for part in parts]):
        raise Unsupported("the criterion is another one for a part of the samples")
    names = ("logits", "weight") if isinstance(first, Softmax) else ("logits", "diagonal")
    return replace(first, **{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def weighs(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a criterion is a mean in which the targets weigh, which parts of the samples do not make up."""
    if func not in (F.cross_entropy, F.nll_loss) or argument(func, args, kwargs, "reduction", "mean") != "mean":
        return False
    target, ignored = argument(func, args, kwargs, "target"), argument(func, args, kwargs, "ignore_index", -100)
    if target.is_floating_point():
        return False
    return argument(func, args, kwargs, "weight") is not None or anywhere(target == ignored)


class Criterion:
    """The criterion that f calls, and what comes of its result."""

    def __init__(self, token: object) -> None:
        """`token` is that of the run, which the marks of its tensors have."""
        self.token = token
        self.func: Any = None
        self.input: torch.Tensor | None = None
        self.slope: torch.Tensor | None = None
        self.output: torch.Tensor | None = None
        """The output of a model that is given apart from its loss, or that is marked."""
        self.version = 0

    def meet(self, run: Run, func: Callable, args: tuple, kwargs: dict[str, Any], axis: Axis) -> torch.Tensor:
        """Compute the criterion, and return its result as something new."""
        x = args[0]
        if self.input is not None:
            raise Unsupported("f calls several criteria")
        if self.output is not None and not self._views(x):
            raise Unsupported("what the loss is of is computed from the outputs")
        self.func, self.input, self.axis = func, x, axis
        self.args, self.kwargs = (run.strip(x), *args[1:]), kwargs
        out = func(*self.args, **kwargs)
        with torch.enable_grad():
            self.leaf = out.detach().requires_grad_() if not run.deep else run.alias(out)
        return self.leaf

    def mark(self, z: torch.Tensor) -> None:
        """Take a tensor as the outputs, of which the criterion has to be."""
        known = getattr(z, "_known", None)
        if known is None or known.run is not self.token or not z.requires_grad:
            return
        if self.input is not None or (self.output is not None and not self._views(z)):
            raise Unsupported("several outputs are marked, or some behind a criterion")
        self.output, self.version = z, version(z)

    def _views(self, x: torch.Tensor) -> bool:
        """Whether a tensor is the output, or a view of all of it, as the model has returned it."""
        z = self.output
        assert z is not None
        if x is z:
            return version(z) == self.version
        if x.numel() != z.numel() or not x.is_contiguous() or not z.is_contiguous() or version(z) != self.version:
            return False
        return storage_of(x) == storage_of(z) and x.storage_offset() == z.storage_offset()

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument of the criterion."""
        return argument(self.func, self.args, self.kwargs, name, default)

    def hessian(self, run: Run, result: torch.Tensor) -> Hessian:
        """The Hessian of the result in what the criterion is of."""
        if self.input is None:
            raise Unsupported("no criterion of torch's is found in f")
        if self.slope is None and result is self.leaf:
            self.slope = torch.ones_like(result)
        elif self.slope is None:
            ones = torch.ones_like(result)
            edges = [u.edge for u in run.uses]
            slope, *others = torch.autograd.grad(
                result,
                [self.leaf, *edges, *run.leaves],
                ones,
                allow_unused=True,
                retain_graph=True,
                create_graph=run.deep,
            )
            if slope is None or any([g is not None for g in others]):
                raise Unsupported("a path from the parameters to the result goes around the criterion")
            self.slope = wide(run.strip(slope) if run.deep else slope.detach())
            self.linear(result, run)
        name = "cross_entropy" if self.func is F.cross_entropy else self.func.__name__
        return self._softmax(run, name) if self.func is F.cross_entropy else self._elementwise(run, name)

    def linear(self, result: torch.Tensor, run: Run) -> None:
        """Check that the result is linear in that of the criterion."""
        if result is self.leaf:
            return
        (slope,) = torch.autograd.grad(result, self.leaf, torch.ones_like(result), create_graph=True, retain_graph=True)
        if slope.requires_grad:
            (more,) = torch.autograd.grad(slope.sum(), self.leaf, allow_unused=True, retain_graph=True)
            if more is not None:
                raise Unsupported("the loss is curved beside its criterion")

    def _softmax(self, run: Run, name: str) -> Softmax:
        """The columns of a cross entropy."""
        k = self.counts(wide(self.args[0]))
        check_sign(k, name)
        return _root(run, wide(self.args[0]), self.axis, k, 1)

    def counts(self, x: torch.Tensor) -> torch.Tensor:
        """The weight of the targets at each position, in the scale of the result."""
        target = self.arg("target")
        if x.ndim < 2 or self.kwargs.get("size_average") is not None or self.kwargs.get("reduce") is not None:
            raise Unsupported("cross entropy of a single row, or with deprecated flags")
        assert self.slope is not None
        weight, ignored, mean = (
            self.arg("weight"),
            self.arg("ignore_index", -100),
            self.arg("reduction", "mean") == "mean",
        )
        if weight is None and not target.is_floating_point():  # all that are not ignored count the same
            met = target != ignored
            return torch.where(met, self.slope / met.sum() if mean else self.slope, 0)
        met, size = self._weights(x, target, weight, ignored)
        return torch.where(met == 0, 0, self.slope / size * met) if mean else self.slope * met

    def _weights(self, x: torch.Tensor, target: torch.Tensor, weight: Any, ignored: int) -> tuple[torch.Tensor, Any]:
        """What each target counts, and what a mean is divided by."""
        classes, smoothing = x.shape[1], self.arg("label_smoothing", 0.0)
        w = x.new_ones(classes) if weight is None else weight.to(x.dtype)
        if target.is_floating_point():
            met = torch.tensordot((target * (1 - smoothing) + smoothing / classes).movedim(1, -1).to(w.dtype), w, 1)
            return met, met.numel()
        valid = target != ignored
        picked = torch.where(valid, w[torch.where(valid, target, 0)], 0)
        return picked * (1 - smoothing) + torch.where(valid, w.sum() * smoothing / classes, 0), picked.sum()

    def _elementwise(self, run: Run, name: str) -> Elementwise:
        """The diagonal of the Hessian, entry by entry."""
        x, weight, mean = wide(self.args[0]), self.arg("weight"), self.arg("reduction", "mean") == "mean"
        assert self.slope is not None
        k = self.slope / x.numel() if mean else self.slope
        k = k if weight is None else k * weight
        if self.func is F.mse_loss:
            h = 2 * k
        else:
            p, y, more = x.sigmoid(), self.arg("target"), self.arg("pos_weight")
            h = k * (p * (1 - p) if more is None else p * (1 - p) * (1 + (more - 1) * y))
        h = h.expand(x.shape)
        check_sign(h, name)
        kind = "normal" if self.func is F.mse_loss else "bernoulli"
        return Elementwise(0, front(h, self.axis, run.n).flatten(1), kind, front(x, self.axis, run.n).flatten(1))


def _root(run: Run, x: torch.Tensor, axis: Axis, k: torch.Tensor, dim: int) -> Softmax:
    """The columns of `k (diag p - p p^T)` of logits with the samples in dim 0 and the classes in another one."""
    exposed = front(x.movedim(dim, 1), axis, run.n)  # [n, more, C, ...]
    logits = exposed.movedim(2, 1).flatten(2)
    shape, rest = x.movedim(dim, 1).shape, exposed.shape[3:]

    def layout(columns: torch.Tensor) -> torch.Tensor:
        v, n, c, _ = columns.shape
        return columns.reshape(v, n, c, -1, *rest).movedim(2, 3).reshape(v, -1, *shape[1:]).movedim(2, 1 + dim)

    return Softmax(0, logits, k.expand(shape[:1] + shape[2:]).reshape(run.n, -1), layout)


LOGARITHMS = called("log_softmax")


def softmax_root(run: Run, func: Any, args: tuple, kwargs: dict, axis: Axis, slope: Any) -> Softmax | None:
    """The columns of a cross entropy or a log_softmax of any slope; None of another operation."""
    if func is not F.cross_entropy and func not in LOGARITHMS:
        return None
    call = Criterion(run.token)
    call.func, call.args, call.kwargs, call.slope = func, (run.strip(args[0]), *args[1:]), kwargs, wide(slope)
    x, dim = wide(call.args[0]), 1 if func is F.cross_entropy else call.arg("dim")
    if x.ndim < 2 or dim is None or dim % x.ndim == 0 or (run.n > 1 and (axis[0] != -x.ndim or axis[1] != 1)):
        return None
    k = call.counts(x) if func is F.cross_entropy else -call.slope.sum(dim)
    return _root(run, x, axis, k, dim % x.ndim)


def criterion_of(run: Run, func: Any, args: tuple, kwargs: dict[str, Any], data: list) -> torch.Tensor | None:
    """The result of a criterion of the outputs of the model, where one is looked for; None of any other call."""
    criterion = run.criterion
    if criterion is None or not args or not isinstance(args[0], torch.Tensor) or not args[0].requires_grad:
        return None
    if func in OTHERS:
        raise Unsupported("f calls a loss that is not known here")
    if func not in CRITERIA:
        return None
    axis = next((axis for x, axis in data if x is args[0]), None)
    if axis is None or any(x.requires_grad and x is not args[0] for x, _ in data):
        raise Unsupported("the criterion is not of samples alone")
    at, outer, inner = axis
    if run.n > 1 and (at != -args[0].ndim or outer != 1 or (inner != 1 and func is not F.cross_entropy)):
        raise Unsupported("the samples are not in dim 0 of the outputs")
    return criterion.meet(run, func, args, kwargs, axis)
