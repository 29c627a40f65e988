"""Eigenvectors of symmetric matrices with derivatives that nest: torch's own are NaN in reverse over forward mode."""

from __future__ import annotations

from typing import Any

import torch

from invfunc._torch.functorch import levels


def spectrum(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eigenvalues and eigenvectors of `[..., k, k]`: `h @ vectors == vectors * values`."""
    jvps = 0 if torch.compiler.is_compiling() else [kind for kind, _ in levels()].count("jvp")
    if jvps == 1:  # torch has no jvp of a jvp of a custom Function
        return _Spectrum.apply(h)  # pyright: ignore[reportReturnType]
    values, vectors = torch.linalg.eigh(h)
    return values, vectors


class _Spectrum(torch.autograd.Function):
    """By perturbation of first order; undefined at equal eigenvalues, as eigenvectors are there."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = torch.linalg.eigh(h)
        return values, vectors

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.set_materialize_grads(False)  # values alone have a derivative at equal eigenvalues, too
        ctx.save_for_backward(*output)
        ctx.save_for_forward(*output)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (of_values, of_vectors), (values, vectors) = cotangents, ctx.saved_tensors
        inner = torch.diag_embed(torch.zeros_like(values) if of_values is None else of_values)
        if of_vectors is not None:
            inner = inner + _over_gaps(values, vectors.mT @ of_vectors)
        found = vectors @ inner @ vectors.mT
        return (found + found.mT) / 2

    @staticmethod
    def jvp(ctx: Any, change: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        values, vectors = ctx.saved_tensors
        inner = vectors.mT @ ((change + change.mT) / 2) @ vectors
        return inner.diagonal(dim1=-2, dim2=-1), vectors @ _over_gaps(values, inner)


def _over_gaps(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Each entry of x over the difference of the eigenvalues of its column and of its row, 0 on the diagonal."""
    own = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    return torch.where(own, 0, x / torch.where(own, 1, gaps))
