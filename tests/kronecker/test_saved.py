"""torch.save and torch.load with their default settings keep factors, in this process and in another one."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import ekfac, functional, kfac, kronecker, tree
from invfunc.kronecker import Kronecker, LowRank, kfra
from invfunc.products.eigenpairs import Eigenpairs
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


def computed(make, layers, shape, **options):
    """Factors of a small network."""
    model = nn.Sequential(*layers(), nn.Flatten()).double()
    f, params = functional(model)
    rand, x = Numbers(1), Numbers(2)(5, *shape)
    return make(f, F.mse_loss, **options)(
        {n: rand(*p.shape) for n, p in params.items()}, x, Numbers(3)(*f(params, x).shape)
    )


def dense():
    return [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)]


MADE = {
    "kfac": lambda: computed(kfac, dense, (2,), generator=torch.Generator().manual_seed(0)),
    "exact kfac, joint": lambda: computed(partial(kfac, fisher="exact"), dense, (2,), joint=True),
    "exact kfac in groups, joint": lambda: computed(
        partial(kfac, fisher="exact"), lambda: [nn.Conv1d(2, 4, 2, groups=2)], (2, 2), joint=True
    ),
    "exact kfac, diagonals": lambda: computed(partial(kfac, fisher="exact"), dense, (2,), max_factor_dim=2),
    "kfra": lambda: computed(kfra, dense, (2,)),
    "ekfac": lambda: computed(ekfac, dense, (2,), fisher="exact"),
}


def forms(factors):
    """All of it that is no tensor."""
    return [(path, None if K is None else described(K)) for path, K in tree.named_parts(factors, Kronecker)[0]]


def described(K):
    return K.groups, K.shape, K.blocks, {**vars(K.origin)}


@pytest.mark.quick
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_factors_are_loaded_as_they_were(made):
    factors, file = made(), io.BytesIO()
    torch.save({"factors": factors, "epoch": 3}, file)
    file.seek(0)
    found = torch.load(file, map_location="cpu")["factors"]
    assert_trees_close(found, factors, 0)
    assert forms(found) == forms(factors)


def test_nothing_else_becomes_safe():
    ours = {
        kind for kind in torch.serialization.get_safe_globals() if getattr(kind, "__module__", "").startswith("invfunc")
    }
    assert ours == {Kronecker, kronecker.Joint, kronecker.Origin, Eigenpairs, LowRank}
