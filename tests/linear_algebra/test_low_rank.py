"""Matrices of low rank over all parameters, against dense ones."""

import pytest
import torch
from torch.func import vmap

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import LowRank
from tests.matrices import assert_near, flat
from tests.strategies import Numbers

VECTORS = {"w": Numbers(0)(3, 2, 4), "b": Numbers(1)(3)}


@pytest.mark.quick
class TestProduct:
    def test_is_that_of_the_matrix(self):
        u = torch.cat([x.reshape(3, -1) for x in VECTORS.values()], 1)
        v = {"w": Numbers(2)(5, 6, 2, 4), "b": Numbers(3)(5, 6)}
        every = torch.cat([v["w"].flatten(2), v["b"][..., None]], 2)
        for weights, scale in ((None, 0.0), (Numbers(4)(3), 2.0), (Numbers(4)(3), torch.tensor(0.5).double())):
            matrix = u.T @ (torch.ones(3) if weights is None else weights).double().diag() @ u + scale * torch.eye(9)
            given = LowRank(VECTORS, weights, scale)
            found = given @ v
            assert_near(torch.cat([found["w"].flatten(2), found["b"][..., None]], 2), every @ matrix, 1e-12)
            one = {"b": v["b"][0, 0], "w": v["w"][0, 0]}
            assert [*(given @ one)] == ["b", "w"]
            assert_near(flat({name: (given @ one)[name] for name in VECTORS}), matrix @ every[0, 0], 1e-12)

    def test_of_no_vectors_is_that_of_the_scale(self):
        v = {"w": torch.ones(2, 4), "b": torch.ones(())}
        given = LowRank({"w": torch.zeros(0, 2, 4), "b": torch.zeros(0)}, scale=2.0)
        assert all(torch.equal(x, torch.full_like(x, 2.0)) for x in tree.leaves(given @ v))

    def test_has_the_dtype_of_the_vector(self):
        narrow = tree.map_tensors(lambda x: x.bfloat16(), VECTORS)
        v = {"w": torch.ones(2, 4).bfloat16(), "b": torch.ones(()).bfloat16()}
        found = LowRank(narrow, Numbers(4)(3), 2.0) @ v
        wide = tree.map_tensors(torch.Tensor.double, narrow)
        wanted = LowRank(wide, Numbers(4)(3), 2.0) @ tree.map_tensors(torch.Tensor.double, v)
        assert all(x.dtype == torch.bfloat16 for x in tree.leaves(found))
        assert_near(flat(tree.map_tensors(torch.Tensor.double, found)), flat(wanted), 1e-2)

    def test_goes_through_transforms(self):
        given = LowRank(VECTORS, Numbers(4)(3), 2.0)
        assert len(tree.tensors(given)) == 3 and repr(given) == "LowRank(rank 3 of 9, scale=2.0, dtype=torch.float64)"
        v = {"w": Numbers(2)(5, 2, 4), "b": Numbers(3)(5)}
        assert_near(flat(vmap(given.__matmul__)(v)), flat(given @ v), 1e-12)


def test_refusals():
    with pytest.raises(ArgumentError, match=r"vectors\['b'\] has shape \[2\], but has to have 3 vectors along axis 0"):
        LowRank({**VECTORS, "b": torch.ones(2)})
    with pytest.raises(ArgumentTypeError, match=r"vectors\['b'\] is of type NoneType, but has to be a tensor"):
        LowRank({**VECTORS, "b": None})
    with pytest.raises(ArgumentError, match=r"weights has shape \[2\], but has to have \[3\]"):
        LowRank(VECTORS, torch.ones(2))
    with pytest.raises(ArgumentTypeError, match=r"scale is of type str"):
        LowRank(VECTORS, scale="1")
    with pytest.raises(ArgumentError, match=r"vectors has an entry vectors\['b'\], but v has none"):
        LowRank(VECTORS) @ {"w": torch.ones(2, 4)}
    with pytest.raises(ArgumentError, match=r"v\['w'\] has shape \[4, 2\], but has to have \[2, 4\]"):
        LowRank(VECTORS) @ {"w": torch.ones(4, 2), "b": torch.ones(())}
    with pytest.raises(ArgumentError, match=r"v\['b'\] has shape \[4\], but has to have \[5\]"):
        LowRank(VECTORS) @ {"w": torch.ones(5, 2, 4), "b": torch.ones(4)}
