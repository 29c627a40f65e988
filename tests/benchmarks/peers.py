"""Ways of the peers to compute a statistic: a `Peer`, given a problem, builds a call without arguments."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap
from torch.nn import functional as F

import invfunc

OURS, BACKPACK, FUNC, OPACUS = PEERS = ("invfunc", "BackPACK", "torch.func", "Opacus")
INSTALL = {
    BACKPACK: "pip install --no-deps backpack-for-pytorch einops unfoldNd",
    OPACUS: "pip install --no-deps opacus opt_einsum scipy",
}
"""Commands that install the peers that do not come with torch."""

Params = dict[str, Tensor]
Result = Any
"""A tensor, or a dict or a tuple of results."""
Call = Callable[[], Result]


class Problem:
    """A model, the mean of a loss, and a batch; the functions of parameters that they make."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], x: Tensor, y: Tensor):
        self.model, self.loss, self.x, self.y = model, loss, x, y
        self.f, self.params = invfunc.functional(model)

    def loss_fn(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss, a function of the parameters."""
        return self.loss(self.f(params, x), y)

    def to(self, device: torch.device) -> Problem:
        """The same problem on another device."""
        return Problem(self.model.to(device), self.loss, self.x.to(device), self.y.to(device))


Peer = Callable[[Problem], Call]


def has(peer: str) -> bool:
    """True if a peer and its imports are installed."""
    try:
        importlib.import_module({BACKPACK: "backpack", OPACUS: "opacus"}.get(peer, "torch"))
    except ImportError:
        return False
    return True


def plain_gradient(problem: Problem) -> Call:
    """One gradient of the mean loss: the unit of time."""
    names, leaves = zip(*problem.model.named_parameters(), strict=True)

    def call() -> Result:
        loss = problem.loss(problem.model(problem.x), problem.y)
        return dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))

    return call


def transformed(build: Callable[[Problem], Callable[[Params, Tensor, Tensor], Result]]) -> Peer:
    """The transform that `build` makes of a problem's functions, called on its parameters and batch."""

    def peer(problem: Problem) -> Call:
        transform = build(problem)
        return lambda: transform(problem.params, problem.x, problem.y)

    return peer


def by_leaf(fn: Callable[[Tensor], Tensor]) -> Callable[[Params], Params]:
    """A function of a tensor as one of a tree, leaf by leaf."""
    return lambda tree: {name: fn(leaf) for name, leaf in tree.items()}


def vmap_grad(statistic: Callable[[Params], Result]) -> Peer:
    """The statistic of `vmap(grad)`, whose shares sum to the gradient of the mean loss."""

    def build(problem: Problem):
        def share(params: Params, x: Tensor, y: Tensor) -> Tensor:
            return problem.loss_fn(params, x[None], y[None]) / len(problem.x)

        shares = vmap(grad(share), in_dims=(None, 0, 0))
        return lambda *args: statistic(shares(*args))

    return transformed(build)


def vmap_jacrev(chunks: int = 1, over: tuple[int, ...] = (0, 1)) -> Peer:
    """The GGN diagonal from `vmap(jacrev)`: squares of all columns of J^T S, summed over samples and columns."""

    def build(problem: Problem):
        root_transposed, _ = _LOSSES[problem.loss]

        def columns(params: Params, x: Tensor) -> Tensor:
            return root_transposed(problem.f(params, x[None])[0])

        outputs = problem.f(problem.params, problem.x[:1]).numel()
        jacobians = vmap(jacrev(columns, chunk_size=math.ceil(outputs / chunks)), in_dims=(None, 0))
        return lambda params, x, _: {
            name: leaf.square().sum(over) / len(x) for name, leaf in jacobians(params, x).items()
        }

    return transformed(build)


def backpack(*names: str, gradient: bool = False, then: Callable[[Result], Result] | None = None) -> Peer:
    """BackPACK's extensions of those names, in one backward pass, whose gradient comes first where it is wanted."""

    def peer(problem: Problem) -> Call:
        from backpack import backpack, extensions

        model, loss = _extended(problem)

        def call() -> Result:
            error = loss(model(problem.x), problem.y)
            active = [getattr(extensions, name)() for name in names]
            with backpack(*active):
                error.backward()
            result = _collect(model, *["grad"] * gradient, *[extension.savefield for extension in active])
            return then(result) if then else result

        return call

    return peer


def backpack_diag_ggn(chunks: int) -> Peer:
    """BackPACK's GGN diagonal in passes over slices of the outputs, as in its `retain_graph` tutorial."""

    def peer(problem: Problem) -> Call:
        from backpack import backpack, extend, extensions
        from backpack.custom_module.slicing import Slicing

        model, loss = _extended(problem)

        def call() -> Result:
            outputs, target = model(problem.x), problem.y
            size = math.ceil(outputs.shape[1] / chunks)
            total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            for start in range(0, outputs.shape[1], size):
                columns = slice(None), slice(start, start + size)
                more = start + size < outputs.shape[1]
                part = target[columns]
                slicing = extend(Slicing(columns))  # pyright: ignore[reportArgumentType]
                error = loss(slicing(outputs), part)
                with backpack(extensions.DiagGGNExact(), retain_graph=more):
                    error.backward(retain_graph=more)
                for name, leaf in _collect(model, "diag_ggn_exact").items():
                    # The mean is over the slice: its share of the whole mean.
                    total[name] += leaf * (part.numel() / target.numel())
            return total

        return call

    return peer if chunks > 1 else backpack("DiagGGNExact")


def opacus(max_norm: float | None = None) -> Peer:
    """Opacus' fast clipping: the squared norms of the shares of each parameter; or, with a bound, the sum of those that
    are clipped, by a second backward pass, and their norms."""

    def peer(problem: Problem) -> Call:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        model = copy.deepcopy(problem.model)
        names, leaves = zip(*model.named_parameters(), strict=True)
        watched = GradSampleModuleFastGradientClipping(model, loss_reduction="sum")

        def call() -> Result:
            watched.enable_hooks()
            losses = problem.loss(watched(problem.x), problem.y, reduction="none")
            shares = losses.reshape(len(problem.x), -1).mean(1) / len(problem.x)
            torch.autograd.grad(shares.sum(), leaves, retain_graph=max_norm is not None)
            if max_norm is None:
                return {name: p._norm_sample.square() for name, p in zip(names, leaves, strict=True)}
            watched.disable_hooks()
            norms = watched.get_norm_sample()
            total = torch.autograd.grad((max_norm / norms).clamp(max=1) @ shares, leaves)
            return dict(zip(names, total, strict=True)), norms

        return call

    return peer


def _extended(problem: Problem) -> tuple[nn.Module, nn.Module]:
    """A copy of the model and the loss as a module, both prepared for BackPACK."""
    from backpack import extend

    _, loss = _LOSSES[problem.loss]
    return extend(copy.deepcopy(problem.model)), extend(loss())


def _collect(model: nn.Module, *fields: str) -> Result:
    """Take what BackPACK and autograd left on the parameters, so that nothing outlives the call."""
    results = [{name: getattr(p, field) for name, p in model.named_parameters()} for field in fields]
    for p in model.parameters():
        p.grad = None
        for field in set(fields) - {"grad"}:
            delattr(p, field)
    return tuple(results) if len(results) > 1 else results[0]


def _mse_root(z: Tensor) -> Tensor:
    return z * math.sqrt(2 / z.numel())


def _cross_entropy_root(z: Tensor) -> Tensor:
    p = z.detach().softmax(-1)
    return p.sqrt() * (z - p @ z)


# What the peers know of a loss: S^T z for one sample, where S S^T is its Hessian, and BackPACK's module.
_LOSSES: dict[Callable[..., Tensor], tuple[Callable[[Tensor], Tensor], type[nn.Module]]] = {
    F.mse_loss: (_mse_root, nn.MSELoss),
    F.cross_entropy: (_cross_entropy_root, nn.CrossEntropyLoss),
}
