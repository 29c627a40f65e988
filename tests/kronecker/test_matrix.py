"""Kronecker: its algebra against that of the dense matrix, and what torch.func does with it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.kronecker import Kronecker
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.laws import RTOL
from tests.strategies import Numbers

EXACT = RTOL[torch.float64]
DAMPED = {"none": {}, "damping": {"damping": 0.3}, "pi": {"damping": 0.3, "split": "pi"}}
damped = pytest.mark.parametrize("options", DAMPED.values(), ids=DAMPED)
dampings = st.sampled_from([0.0, 1e-3, 2.0])


def factor(rand, k, diagonal=False):
    """Positive definite, with a condition number of no more than 4."""
    values = 0.5 + 1.5 * torch.sigmoid(rand(k))
    vectors = torch.linalg.qr(rand(k, k)).Q
    return values if diagonal else vectors * values @ vectors.mT


@st.composite
def kroneckers(draw, values=True, count=None, blocks=True):
    """Any groups of dims, also mixed or empty ones, with matrices and diagonals over them, perhaps in blocks."""
    if blocks and draw(st.booleans()):
        return draw(in_blocks(values, count or draw(st.integers(1, 2)), draw(st.lists(st.integers(1, 2), max_size=3))))
    rand, shape = Numbers(draw(st.integers(0, 9))), draw(st.lists(st.integers(1, 3), max_size=4))
    count = count or draw(st.integers(1, 3))
    owner = [draw(st.integers(0, count - 1)) for _ in shape]
    groups = tuple(tuple(d for d, o in enumerate(owner) if o == i) for i in range(count))
    sizes = [math.prod(shape[d] for d in group) for group in groups]
    factors = [factor(rand, k, draw(st.booleans())) for k in sizes]
    if not (values and draw(st.booleans())):
        return Kronecker(tuple(factors), groups, torch.Size(shape))
    vectors = [
        torch.ones(k).double() if f.ndim == 1 else torch.linalg.qr(f).Q for k, f in zip(sizes, factors, strict=True)
    ]
    return Kronecker(tuple(vectors), groups, torch.Size(shape), 0.5 + torch.sigmoid(rand(*sizes)))


@st.composite
def in_blocks(draw, values, count, parts):
    """So many blocks along each dim, of products of the same form."""
    alike = kroneckers(values=values, count=count, blocks=False)
    one = draw(alike.filter(lambda K: len(K.shape) == len(parts) and K.shape.numel() < 9))
    each = [tree.map_leaves(lambda f, c=c: f * c, one) for c in range(1, 1 + math.prod(parts))]
    each = [K if one.values is None else replace(one, values=K.values) for K in each]
    factors = tuple(torch.stack(fs) for fs in zip(*(K.factors for K in each), strict=True))
    stacked = None if one.values is None else torch.stack([K.values for K in each])
    shape = torch.Size(n * k for n, k in zip(one.shape, parts, strict=True))
    return Kronecker(factors, one.groups, shape, stacked, tuple(parts))


def small(*kinds, seed=0):
    """Over dims of sizes 2, 3, ...; a kind is "dense", "diagonal" or "values"."""
    rand, sizes = Numbers(seed), range(2, 2 + len(kinds))
    factors = [factor(rand, k, kind == "diagonal") for k, kind in zip(sizes, kinds, strict=True)]
    plain = Kronecker(tuple(factors), tuple((d,) for d in range(len(kinds))), torch.Size(sizes))
    return plain.eigen() if "values" in kinds else plain


def matrix(K):
    """The matrix of a Kronecker: torch.kron, then rows and columns moved to where the parameter has them."""
    if K.blocks is not None:
        part = torch.Size(n // k for n, k in zip(K.shape, K.blocks, strict=True))
        entries, found = torch.arange(K.shape.numel()).reshape(K.shape), K.factors[0].new_zeros([K.shape.numel()] * 2)
        for i, at in enumerate(product(*map(range, K.blocks))):
            rows = entries[tuple(slice(a * n, (a + 1) * n) for a, n in zip(at, part, strict=True))].flatten()
            values = None if K.values is None else K.values[i]
            found[rows[:, None], rows] = matrix(Kronecker(tuple(f[i] for f in K.factors), K.groups, part, values))
        return found
    parts = [f.diag() if f.ndim == 1 else f for f in K.factors]
    kron = reduce(lambda a, b: torch.kron(a.contiguous(), b.contiguous()), parts)  # a view fails in torch
    if K.values is not None:
        kron = kron @ K.values.flatten().diag() @ kron.mT
    order = [d for group in K.groups for d in group]
    place = torch.arange(K.shape.numel()).reshape(K.shape).permute(order).flatten().argsort().to(kron.device)
    return kron[place][:, place]


def split(K, damping):
    """The matrix that is inverted with a split, in each block with that of its own."""
    if K.blocks is not None:
        return _with_a_split(K, damping)
    A, B = (f.diag() if f.ndim == 1 else f for f in K.factors)
    pi = ((A.trace() / len(A)) / (B.trace() / len(B))).sqrt()
    shifts = pi * damping**0.5 * torch.eye(len(A)).to(A), damping**0.5 / pi * torch.eye(len(B)).to(B)
    return matrix(replace(K, factors=(A + shifts[0], B + shifts[1])))


def _with_a_split(K, damping):
    part = torch.Size(n // k for n, k in zip(K.shape, K.blocks, strict=True))
    each = [split(Kronecker(fs, K.groups, part), damping) for fs in zip(*K.factors, strict=True)]
    return matrix(Kronecker((torch.stack(each),), (tuple(range(len(part))),), K.shape, None, K.blocks))


def eye(K):
    return torch.eye(K.shape.numel()).to(K.factors[0])


@pytest.mark.quick
class TestMatrix:
    @given(K=kroneckers())
    def test_is_the_product_of_its_factors(self, K, device, dtype):
        assert_trees_close(moved(K, dtype, device).dense(), matrix(K), RTOL[dtype])

    @given(K=kroneckers(), lead=st.lists(st.integers(0, 3), max_size=2))
    def test_product_is_that_with_the_flat_vectors(self, K, lead, device, dtype):
        v = Numbers(1)(*lead, *K.shape)
        wanted = (v.reshape(*lead, K.shape.numel()) @ matrix(K).mT).reshape(v.shape)
        assert_trees_close(moved(K, dtype, device) @ moved(v, dtype, device), wanted, RTOL[dtype])

    @given(K=kroneckers(), damping=dampings)
    def test_trace_and_logdet_are_those_of_the_matrix(self, K, damping, device, dtype):
        near, dense = moved(K, dtype, device), matrix(K)
        assert_trees_close(near.trace(), dense.trace(), RTOL[dtype])
        assert_trees_close(near.logdet(damping), (dense + damping * eye(K)).logdet(), RTOL[dtype], 1)

    @given(K=kroneckers())
    def test_square_of_the_root_is_itself(self, K, device, dtype):
        root = moved(K, dtype, device).sqrt().dense()
        assert_trees_close(root @ root, matrix(K), RTOL[dtype])
        assert_trees_close(root, root.mT, RTOL[dtype])

    @given(K=kroneckers())
    def test_powers_undo_each_other(self, K, device, dtype):
        fourth, whole = moved(K, dtype, device).power(-0.25, 0.5).dense(), matrix(K) + 0.5 * eye(K)
        assert_trees_close(fourth @ fourth @ fourth @ fourth @ whole, eye(K), 100 * RTOL[dtype])


class TestInverse:
    @given(K=kroneckers(values=False, count=2), damping=dampings)
    def test_with_a_split_is_that_of_damped_factors(self, K, damping, device, dtype):
        inverse = moved(K, dtype, device).inverse(damping, split="pi")
        assert inverse.values is None
        assert_trees_close(inverse.dense(), split(K, damping).inverse(), RTOL[dtype])

    @damped
    @given(K=kroneckers(values=False, count=2))
    def test_solve_is_its_product(self, options, K):
        v = Numbers(1)(3, *K.shape)
        assert_trees_close(K.solve(v, **options), K.inverse(**options) @ v, EXACT)

    @given(rank=st.integers(0, 4), seed=st.integers(0, 20))
    def test_of_a_singular_matrix_needs_damping(self, rank, seed, device, dtype):
        x = moved(Numbers(seed)(rank, 5), dtype, device)
        K = moved(small("dense", "dense", "dense", "dense"), dtype, device)
        K = replace(K, factors=(*K.factors[:3], x.mT @ x))
        for invert in (K.inverse, K.logdet, K.eigen().inverse, K.eigen().logdet):
            with pytest.raises(ArgumentError, match="damping"):
                invert()
        dense = matrix(K).double()
        assert_trees_close(K.inverse(0.1).dense(), (dense + 0.1 * eye(K).to(dense)).inverse(), 10 * RTOL[dtype])
        assert (K.sqrt().values >= 0).all()

    def test_of_scales_far_apart(self):
        """A matrix with large and small entries is not singular."""
        K = Kronecker(
            (torch.tensor([1e10, 1e-10]).double().diag(), torch.tensor([1e-12, 1.0])), ((0,), (1,)), torch.Size([2, 2])
        )
        assert_trees_close(K.solve(K @ torch.ones(2, 2)), torch.ones(2, 2), 1e-6)


class TestPrecision:
    @pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("kinds", [("dense", "dense"), ("diagonal", "values")], ids=str)
    def test_of_half_is_float32_but_in_products(self, half, kinds, device):
        K, v = moved(small(*kinds), half, device), moved(Numbers(1)(2, 3), half, device)
        same, x = moved((K, v), torch.float32, device)
        split = {} if K.values is not None else {"split": "pi"}
        for fn in (
            lambda K: K.dense(),
            lambda K: K.eigen().dense(),
            lambda K: K.sqrt().dense(),
            lambda K: K.inverse(0.1).dense(),
            lambda K: K.inverse(0.1, **split).dense(),
            lambda K: (K.trace(), K.logdet(), K @ x, K.solve(x)),
        ):
            assert {t.dtype for t in tree.tensors(fn(K))} == {torch.float32}
            assert_trees_close(fn(K), fn(same), 1e-6)
        products, wanted = (K @ v, K.solve(v, 0.1)), (same @ x, same.solve(x, 0.1))
        assert products[0].dtype == products[1].dtype == half
        assert_trees_close(products, tree.map_leaves(lambda t: t.to(half), wanted), 0)

    def test_negative_by_rounding_is_zero(self):
        for f in (torch.tensor([1.0, -1e-7]), torch.tensor([1.0, -1e-7]).diag()):
            root = Kronecker((f,), ((0,),), TWO).sqrt().dense()
            assert_trees_close(root, torch.tensor([1.0, 0.0]).diag(), 1e-6)


ONE, NAN = ((0,),), float("nan")


def over(f: Any, shape=(2,), groups: Any = ONE, values: Any = None) -> Any:
    """A Kronecker of what may be wrong."""
    factors: Any = f if isinstance(f, tuple | str) else (f,)
    return Kronecker(factors, groups, torch.Size(shape), values)


INDEFINITE = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
I2, TWO = torch.eye(2), torch.Size([2])
# fmt: off
WRONG = {
    "no tuple": (lambda: over("BA"), ArgumentTypeError, "tuple ... str"),
    "no tensor": (lambda: over((1.0,)), ArgumentTypeError, "floating-point ... float"),
    "integers": (lambda: over(I2.long()), ArgumentTypeError, "floating-point ... torch.int64"),
    "values no tensor": (lambda: over(I2, values=3), ArgumentTypeError, "floating-point ... int"),
    "size": (lambda: over(torch.eye(3)), ArgumentError, "factors[0] ... [3, 3] ... [2, 2] or [2]"),
    "not square": (lambda: over(torch.ones(2, 1)), ArgumentError, "factors[0] ... [2, 1] ... [2, 2] or [2]"),
    "size of values": (lambda: over(I2, values=torch.ones(3)), ArgumentError, "values ... [3] ... [2]"),
    "dim twice": (lambda: over((I2, I2), groups=((0,), (0,))), ArgumentError, "groups ((0,), (0,))"),
    "dim missing": (lambda: over(I2, (2, 3)), ArgumentError, "groups ((0,),) ... 2 dims of shape (2, 3)"),
    "dims out of order": (lambda: over(torch.eye(4), (2, 2), ((1, 0),)), ArgumentError, "((1, 0),) ... in order"),
    "factor missing": (lambda: over(I2, (2, 2), ((0,), (1,))), ArgumentError, "1 factors ... a group for each"),
    "no factor": (lambda: Kronecker((), (), torch.Size([])), ArgumentError, "0 factors"),
    "blocks": (lambda: Kronecker((I2,), ONE, TWO, None, (3,)), ArgumentError, "blocks (3,) ... divisor of each dim"),
    "factor of blocks": (lambda: Kronecker((I2,), ONE, TWO, None, (2,)), ArgumentError, "[2, 1, 1] or [2, 1]"),
    "shape of v": (lambda: over(I2) @ torch.ones(2, 3), ArgumentError, "v has shape [2, 3] ... [*lead, 2]"),
    "too few dims of v": (lambda: over(I2).solve(torch.ones(())), ArgumentError, "v has shape [] ... [*lead, 2]"),
    "damping below 0": (lambda: over(I2).inverse(-1.0), ArgumentError, "damping is -1.0 ... 0 or more"),
    "damping NaN": (lambda: over(I2).logdet(NAN), ArgumentError, "damping is nan ... finite"),
    "damping infinite": (lambda: over(I2).solve(torch.ones(2), math.inf), ArgumentError, "damping is inf ... finite"),
    "damping tensor below 0": (lambda: over(I2).inverse(torch.tensor(-1.0)), ArgumentError, "damping is -1.0"),
    "damping of a split": (lambda: over((I2, I2), (2, 2), ((0,), (1,))).inverse(-1, "pi"), ArgumentError, "is -1,"),
    "several dampings": (lambda: over(I2).inverse(torch.ones(2)), ArgumentTypeError, "1 dims ... 0-d"),
    "damping no number": (lambda: over(I2).inverse("pi"), ArgumentTypeError, "damping is str ... number"),
    "unknown split": (lambda: over(I2).inverse(0.1, "trace"), ArgumentError, "split is 'trace' ... None or 'pi'"),
    "split of one": (lambda: over(I2).inverse(0.1, "pi"), ArgumentError, "split='pi' ... two factors ... split=None"),
    "split of three": (lambda: small("dense", "dense", "dense").inverse(0.1, "pi"), ArgumentError, "two factors"),
    "split of values": (lambda: small("dense", "values").inverse(0.1, "pi"), ArgumentError, "without values"),
    "singular": (lambda: over(torch.ones(2, 2)).inverse(), ArgumentError, "factors[0] ... singular ... damping"),
    "singular diagonal": (lambda: over(torch.tensor([1.0, 0])).inverse(), ArgumentError, "factors[0] ... singular"),
    "singular values": (lambda: over(I2, values=torch.tensor([1.0, 0])).inverse(), ArgumentError, "singular"),
    "logdet of a singular one": (lambda: over(torch.ones(2, 2)).logdet(), ArgumentError, "singular ... damping"),
    "power of a singular one": (lambda: over(torch.ones(2, 2)).power(-0.25), ArgumentError, "singular. Pass damping"),
    "root of an indefinite one": (lambda: over(INDEFINITE).sqrt(), ArgumentError, "factors[0] ... positive semi"),
    "root of a negative one": (lambda: over(-I2).sqrt(), ArgumentError, "factors[0] ... positive semi-definite"),
    "root of a negative diagonal": (lambda: over(-torch.ones(2)).sqrt(), ArgumentError, "factors[0] ... positive semi"),
    "root of negative values": (lambda: over(I2, values=-torch.ones(2)).sqrt(), ArgumentError, "values ... positive"),
    "inverse of an indefinite one": (lambda: over(INDEFINITE).inverse(), ArgumentError, "positive definite"),
    "damped, indefinite": (lambda: over(INDEFINITE).inverse(0.1), ArgumentError, "positive semi-definite"),
    "not symmetric": (lambda: over(torch.ones(2, 2).tril()).eigen(), ArgumentError, "not symmetric ... A.T"),
    "NaN": (lambda: over(NAN * I2).inverse(0.1), ArgumentError, "factors[0] is not finite: 4 of 4 ... inputs"),
    "infinite": (lambda: over(torch.tensor([1.0, math.inf])).inverse(), ArgumentError, "factors[0] ... finite"),
    "infinite above": (lambda: over(torch.tensor([[1.0, math.inf], [0, 1]])).eigen(), ArgumentError, "not finite: 1"),
    "infinite values": (lambda: over(I2, values=torch.tensor([1, math.inf])).eigen(), ArgumentError, "not finite: 1"),
    "NaN in values": (lambda: over(I2, values=NAN * torch.ones(2)).logdet(1), ArgumentError, "values ... finite"),
}
# fmt: on


class TestErrors:
    @pytest.mark.parametrize(("wrong", "kind", "text"), WRONG.values(), ids=WRONG)
    def test_say_what_was_wanted(self, wrong, kind, text):
        with pytest.raises(kind, match=".*".join(map(re.escape, text.split(" ... ")))):
            wrong()

    @pytest.mark.parametrize("use", ["inverse", "logdet", "sqrt"])
    def test_see_values_through_transforms(self, use):
        def fn(f):
            return sum(x.sum() for x in tree.leaves(getattr(over(f), use)()))

        wrong, right = INDEFINITE, 2 * I2
        for composed, pair in ((grad(fn), False), (vmap(fn), True), (vmap(grad(fn)), True)):
            with pytest.raises(ArgumentError, match="positive"):
                composed(torch.stack([right, wrong]) if pair else wrong)
