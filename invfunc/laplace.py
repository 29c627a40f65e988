"""Backends for the Laplace library (`laplace-torch`), which take the curvature from our statistics.

    from laplace import Laplace
    from invfunc.laplace import InvFuncGGN

    posterior = Laplace(model, "classification", subset_of_weights="all", hessian_structure="kron", backend=InvFuncGGN)
    posterior.fit(loader)

`InvFuncGGN`, `InvFuncEF` and `InvFuncHessian` take the arguments of Laplace's own `CurvlinopsGGN` and so on, and have
its scale: of half of the squared error, or of the cross entropy, summed over a batch. Exact results are the same.

* Diagonals come without Jacobians, that of the Hessian too, in the memory of one batch.
* Every parameter that `kfac` has factors for has them here, where they are of its first dim and of all others together;
  of the others (positions `[1, T, D]`, convolutions in groups or transposed) `kron` is an error that names it.
* With `stochastic=True` columns are drawn from a generator that torch's global one seeds.
* `FunctionalLaplace` takes Laplace's own backends only, and so no other one.

Laplace is of no extra, as it brings torchvision, and PyPI's build of that does not load beside torch's CPU build.

Source: Daxberger et al., "Laplace redux: effortless Bayesian deep learning", NeurIPS 2021.
"""

from __future__ import annotations

from copy import copy
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F

from invfunc._extras import extra
from invfunc.errors import ArgumentError
from invfunc.functional import functional
from invfunc.kronecker.matrix import Kronecker
from invfunc.products.product import hvp
from invfunc.statistics.curvature import batch_jacobian, diag_ggn, diag_hessian, sqrt_ggn
from invfunc.statistics.factors import kfac
from invfunc.statistics.first_order import batch_grad, sum_grad_squared

Curvature = tuple[torch.Tensor, Any]
"""The loss of a batch, and the curvature."""


class _Backend:
    """The part that all backends of Laplace have; its `CurvatureInterface`, the base beside this one, has the
    attributes.
    """

    model: Any
    _model: Any
    lossfunc: Any
    factor: float
    last_layer: bool
    subnetwork_indices: torch.Tensor | None
    params_dict: dict[str, nn.Parameter]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._f = self._linear if self.last_layer else functional(self.model)[0]

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, C, P]`, and the outputs `[N, C]`."""
        return self._jacobians(self._f, enable_backprop, x)

    def selected_output_jacobians(
        self, x: Any, outputs: torch.Tensor, enable_backprop: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, K, P]`, of K outputs of each sample, and all outputs `[N, C]`."""
        chosen = outputs.reshape(len(outputs), -1).to(next(iter(self.params_dict.values())).device)
        return self._jacobians(lambda params, x, k: self._f(params, x).gather(1, k), enable_backprop, x, chosen)

    def _jacobians(self, f: Any, enable_backprop: bool, x: Any, *more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The Jacobian of f, and all outputs."""
        params, x = self._at(x, enable_backprop)
        J, z = self._flat(batch_jacobian(f)(params, x, *more), 2), self._f(params, x)
        return (J, z) if enable_backprop else (J.detach(), z.detach())

    def gradients(self, x: Any, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[N, P]`, and the sum of the losses, both without the factor."""
        params, x = self._at(x)
        return self._flat(batch_grad(self._losses)(params, x, y), 1).detach(), self._losses(params, x, y).sum().detach()

    def _linear(self, params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """A last layer, which is always linear, without the hook that takes its features."""
        return F.linear(x, *({**dict(self._model.named_parameters()), **params}).values())

    def _at(self, x: Any, enable_backprop: bool = False) -> tuple[dict[str, torch.Tensor], Any]:
        """The parameters as they are now, and what f reads: the batch, or its features."""
        if self.last_layer:
            with torch.set_grad_enabled(enable_backprop):
                x = self.model.forward_with_features(x)[1]
        return {name: p if enable_backprop else p.detach() for name, p in self.params_dict.items()}, x

    def _losses(self, params: dict[str, torch.Tensor], x: Any, y: torch.Tensor) -> torch.Tensor:
        """`[N]`, without the factor."""
        each = copy(self.lossfunc)
        each.reduction = "none"
        return each(self._f(params, x), y).reshape(len(y), -1).sum(1)

    def _with_loss(self, params: dict[str, torch.Tensor], x: Any, y: torch.Tensor, curvature: Any) -> Curvature:
        return self.factor * self._losses(params, x, y).sum().detach(), self.factor * curvature

    def _flat(self, found: dict[str, torch.Tensor], lead: int) -> torch.Tensor:
        """All parameters side by side, or those of a subnetwork, behind so many axes."""
        rows = torch.cat([leaf.reshape(*leaf.shape[:lead], -1) for leaf in found.values()], lead)
        return rows if self.subnetwork_indices is None else rows[..., self.subnetwork_indices]

    def _factored(self, of: tuple, x: Any, y: torch.Tensor, N: int, **options: Any) -> Curvature:
        """Laplace's factors of a batch of N samples in all, such that those of all batches add up."""
        params, x = self._at(x)
        factors = kfac(*of, max_factor_dim=None, **options)(params, x, y)  # Laplace takes matrices
        kron = _laplace("laplace.utils").Kron([_pair(name, K, len(y) / N) for name, K in factors.items()])
        return self._with_loss(params, x, y, kron)


class _GGN(_Backend):
    """The GGN, exact, or with `stochastic=True` of drawn columns."""

    stochastic: bool
    num_samples: int

    def full(self, x: Any, y: torch.Tensor, N: int | None = None, mc_samples: int | None = None) -> Curvature:
        params, x = self._at(x)
        S = self._flat(sqrt_ggn(self._f, self.lossfunc, **self._drawing(y, mc_samples))(params, x, y), 2).flatten(0, 1)
        return self._with_loss(params, x, y, S.mT @ S)

    def diag(self, x: Any, y: torch.Tensor, N: int | None = None, mc_samples: int | None = None) -> Curvature:
        params, x = self._at(x)
        ggn = diag_ggn(self._f, self.lossfunc, **self._drawing(y, mc_samples))(params, x, y)
        return self._with_loss(params, x, y, self._flat(ggn, 0))

    def kron(
        self,
        x: Any,
        y: torch.Tensor,
        N: int,
        kfac_approx: Literal["expand", "reduce"] = "expand",
        mc_samples: int | None = None,
    ) -> Curvature:
        options = self._drawing(y, mc_samples) or {"fisher": "exact"}
        return self._factored((self._f, self.lossfunc), x, y, N, weight_sharing=kfac_approx, **options)

    def _drawing(self, y: torch.Tensor, mc_samples: int | None) -> dict[str, Any]:
        """The way columns are drawn, if they are; torch's global generator seeds it."""
        if not self.stochastic:
            return {}
        seed = int(torch.randint(2**62, ()))
        return {"mc_samples": mc_samples or self.num_samples, "generator": torch.Generator(y.device).manual_seed(seed)}


class _EF(_Backend):
    """The empirical Fisher matrix."""

    def full(self, x: Any, y: torch.Tensor, N: int | None = None) -> Curvature:
        params, x = self._at(x)
        G = self._flat(batch_grad(self._losses)(params, x, y), 1)
        return self._with_loss(params, x, y, G.mT @ G)

    def diag(self, x: Any, y: torch.Tensor, N: int | None = None) -> Curvature:
        params, x = self._at(x)
        return self._with_loss(params, x, y, self._flat(sum_grad_squared(self._losses)(params, x, y), 0))

    def kron(self, x: Any, y: torch.Tensor, N: int, kfac_approx: Literal["expand", "reduce"] = "expand") -> Curvature:
        return self._factored((self._losses,), x, y, N, fisher="empirical", weight_sharing=kfac_approx)


class _Hessian(_Backend):
    """The Hessian of the loss, which may have negative eigenvalues."""

    def full(self, x: Any, y: torch.Tensor, N: int | None = None) -> Curvature:
        params, x = self._at(x)
        product = hvp(lambda *args: self._losses(*args).sum()).linearize(params, x, y)
        sizes, like = [p.numel() for p in params.values()], next(iter(params.values()))
        units = torch.eye(sum(sizes), dtype=like.dtype, device=like.device).split(sizes, 1)
        v = {name: part.reshape(-1, *p.shape) for (name, p), part in zip(params.items(), units, strict=True)}
        return self._with_loss(params, x, y, self._flat(torch.vmap(product, chunk_size=_AT_ONCE)(v), 1))

    def diag(self, x: Any, y: torch.Tensor, N: int | None = None) -> Curvature:
        params, x = self._at(x)
        return self._with_loss(params, x, y, self._flat(diag_hessian(self._f, self.lossfunc)(params, x, y), 0))


_AT_ONCE = 64
"""Number of products with the Hessian that are computed at once."""
_laplace = partial(extra, package="laplace-torch")
_BACKENDS: dict[str, tuple[type[_Backend], str]] = {
    "InvFuncGGN": (_GGN, "GGNInterface"),
    "InvFuncEF": (_EF, "EFInterface"),
    "InvFuncHessian": (_Hessian, "CurvatureInterface"),
}
"""Each with the class of Laplace that it is one of."""


def __getattr__(name: str) -> type:
    """A backend, made when it is asked for: it is one of Laplace's classes, which need not be installed."""
    if name not in _BACKENDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own, interface = _BACKENDS[name]
    return _made(name, own, getattr(_laplace("laplace.curvature"), interface))


@cache
def _made(name: str, own: type, base: type) -> type:
    return type(name, (own, base), {"__module__": __name__, "__doc__": own.__doc__})


def _pair(name: str, K: Kronecker, share: float) -> list[torch.Tensor]:
    """The factors of one parameter as Laplace has them: of the first dim, and of all others together."""
    rest = tuple(range(1, len(K.shape)))
    if K.blocks is not None or K.groups != (((0,), rest) if rest else ((0,),)):
        raise ArgumentError(
            f"kron: {name} has {K}, but Laplace takes a factor for the first dim of a parameter and one for all others "
            "together. Pass hessian_structure='diag', or freeze the parameter."
        )
    dense = [factor if factor.ndim == 2 else factor.diag() for factor in K.factors]
    return [share * factor if i == K.origin.read else factor for i, factor in enumerate(dense)]
