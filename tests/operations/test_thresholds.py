"""Whatever side of a threshold a size, dtype or device is on, the result is the same: that of plain loops."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from invfunc import functional, kfac, thresholds
from invfunc.linear_algebra.contract import contract, joined, outer, patches_gram, summed, unfolded
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.crossed import GATES_OF_PATCHES, HIGHEST, LOWEST, SIDES, sides, thresholds_at
from tests.kfac_loops import loop_kfac
from tests.laws import RTOL, Expectation, expectations
from tests.modules import of_module
from tests.networks import LOSSES
from tests.reductions.test_kfac import SHARINGS, assert_factors
from tests.strategies import Numbers
from tests.test_architecture import FILES, parsed

PROGRAMS: dict[str, tuple[list[nn.Module], tuple[int, ...]]] = {
    "perceptron": ([nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)], (5, 6)),
    "positions": ([nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Flatten(), nn.Linear(20, 3)], (4, 5, 3)),
    "words": ([nn.Embedding(6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)], (5, 4)),
    "one dimension": (
        [nn.Conv1d(2, 3, 3, dilation=2, padding=1), nn.Tanh(), nn.ConvTranspose1d(3, 2, 2), nn.Flatten()]
        + [nn.Linear(10, 3)],
        (4, 2, 6),
    ),
    "convolutions": (
        [nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 2, stride=2), nn.Tanh(), nn.Flatten()]
        + [nn.Linear(8, 3)],
        (5, 2, 4, 4),
    ),
    "three dimensions": (
        [nn.Conv3d(1, 2, 2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(54, 3)],
        (3, 1, 2, 2, 2),
    ),
    "pixels": ([nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 3, 1)], (3, 1, 3, 4)),
    "line": ([nn.Conv1d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv1d(2, 3, 3, padding=1)], (2, 1, 8)),
    "bottlenecks": (
        [nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2), nn.Sigmoid(), nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 6)],
        (3, 6),
    ),
}
programs = pytest.mark.parametrize("called", PROGRAMS)
both = pytest.mark.parametrize("at", [LOWEST, HIGHEST], ids=["lowest", "highest"])
SIDES_OF_ALL = {"lowest": LOWEST, "highest": HIGHEST}
KINDS = st.sampled_from([torch.float64, torch.float32])

GATES_OF_OUTER = [name for name in SIDES if name.startswith(("ADDED", "MIRRORED"))]


def built(called: str) -> tuple[nn.Module, torch.Tensor]:
    layers, shape = PROGRAMS[called]
    x = Numbers().below(6, *shape) if called == "words" else Numbers()(*shape)
    return copy.deepcopy(nn.Sequential(*layers)).double(), x


@cache
def told(called: str) -> list[Expectation]:
    """Statistics of a program by plain loops."""
    return list(expectations(of_module(called, *built(called))))


def assert_all(called: str, kind: torch.dtype, way: Any = lambda t: t) -> None:
    for t in told(called):
        args, others = moved((t.args, t.statistic.others), kind, "cpu")
        assert_trees_close(way(replace(t.statistic, others=others))(*args), t.expected, RTOL[kind], t.floor)


class TestTheFile:
    OTHERS = {"_GROWTH", "_PASSES", "_ORDINARY", "_MOST", "BLOCK", "SMALL", "COLOURS", "HEAP", "FEW", "RESTARTS"}
    """Two tolerances, how many products Lanczos takes at most, how many backward passes that failed, states of
    generators and names of what is closed over are remembered, three sizes of oneDNN's own, one of the heap's, and one
    of MKL's."""

    def test_every_threshold_has_two_sides(self):
        names = {name for name in vars(thresholds) if name.isupper()}
        assert names == {*SIDES, "HESSIAN"}

    def test_every_threshold_says_what_it_is(self):
        body = ast.parse(inspect.getsource(thresholds)).body
        for one, then in zip(body, body[1:], strict=False):
            assert not isinstance(one, ast.Assign) or (
                isinstance(then, ast.Expr) and isinstance(then.value, ast.Constant)
            )

    def test_sizes_are_compared_with_nothing_else(self):
        """Large numbers in comparisons are those of rounding, and the seconds of the option `every`."""
        for file in FILES:
            if file.stem == "thresholds" or "testing" in file.parts or file.stem == "__main__":
                continue
            body = [n for n in parsed(file).body if isinstance(n, ast.Assign) and large(n.value)]
            named = {ast.unparse(n.targets[0]) for n in body} - self.OTHERS
            for n in ast.walk(parsed(file)):
                if isinstance(n, ast.Compare) and not re.search("eps|tolerance|fraction_bits|every", ast.unparse(n)):
                    within = list(ast.walk(n))
                    names = {x.id for x in within if isinstance(x, ast.Name)}
                    assert not any(map(large, within)) and not names & named, f"{file}: {ast.unparse(n)}"


def large(node: ast.AST) -> bool:
    """True for a number from 16 on, also as a product or a power."""
    try:
        value = eval(ast.unparse(node), {"__builtins__": {}})
    except Exception:
        return False
    return isinstance(value, int | float) and abs(value) >= 16


class TestStatistics:
    @programs
    @pytest.mark.parametrize("side", SIDES_OF_ALL)
    def test_equal_the_loop(self, called, side):
        """In one of two dtypes: each program is tried in both, and each side."""
        turn = list(PROGRAMS).index(called) + list(SIDES_OF_ALL).index(side)
        with thresholds_at(**SIDES_OF_ALL[side]):
            assert_all(called, [torch.float32, torch.float64][turn % 2])

    @programs
    def test_equal_the_loop_in_blocks_of_rows(self, called):
        with thresholds_at(**LOWEST | {"CACHE": {"cpu": 100}}):
            assert_all(called, torch.float64)

    @programs
    @settings(max_examples=3)
    @given(at=sides(), kind=KINDS)
    def test_equal_the_loop_with_each_threshold_on_a_side(self, called, at, kind):
        with thresholds_at(**at):
            assert_all(called, kind)


@cache
def factors(called: str, sharing: str) -> tuple[tuple, Any]:
    """Arguments of a program, and its K-factors by loops."""
    module, x = built(called)
    params = functional(module)[1]
    args = (params, x, LOSSES[1].target(Numbers(1), len(x)))
    return args, loop_kfac(module, LOSSES[1], weight_sharing=sharing)(*args)


class TestKFactors:
    LAYERS = [name for name in PROGRAMS if name not in ("pixels", "line", "bottlenecks")]  # whose outputs are [N, 3]

    @pytest.mark.parametrize("called", LAYERS)
    @pytest.mark.parametrize("sharing", SHARINGS)
    @settings(max_examples=8)
    @given(at=sides(*GATES_OF_OUTER, *GATES_OF_PATCHES, "APART", "CACHE"), kind=KINDS)
    def test_equal_the_loop(self, called, sharing, at, kind):
        f, _ = functional(built(called)[0])
        args, wanted = factors(called, sharing)
        with thresholds_at(**at):
            for t in (partial(kfac, fisher="exact"), partial(kfac, fisher="exact")):
                found = t(f, LOSSES[1], weight_sharing=sharing)(*moved(args, kind, "cpu"))
                assert_factors(found, wanted, RTOL[kind], 1e-2)


class TestKernels:
    @settings(max_examples=60)
    @given(data=st.data(), at=sides(*GATES_OF_OUTER), kind=KINDS)
    def test_a_gram_matrix_is_its_sum(self, data, at, kind):
        b, k, r, g = (data.draw(st.integers(1, most)) for most in (4, 9, 4, 2))
        kind_of = data.draw(st.sampled_from(["alone", "alone", "paired", "grouped", "grouped and paired", "graph"]))
        grouped, paired, graph = (word in kind_of for word in ("grouped", "paired", "graph"))
        x = Numbers()(*((b, g, k, r) if grouped else (b, k, r))).to(kind)
        y = Numbers(1)(*x.shape).to(kind) if paired else None
        wanted = torch.einsum("b...kr,b...lr->...kl", x.double(), (x if y is None else y).double())
        with thresholds_at(**at):
            found = outer(x.requires_grad_(graph), y)
            inside = torch.vmap(lambda x: outer(x, y))(x.detach()[None])[0]
        assert found.dtype == kind and found.requires_grad is graph
        for each in found, inside:
            torch.testing.assert_close(each.detach().double(), wanted, rtol=0, atol=100 * torch.finfo(kind).eps * b * r)

    @settings(max_examples=60)
    @given(data=st.data(), at=sides("ORDERS"), kind=KINDS)
    def test_a_contraction_is_its_einsum(self, data, at, kind):
        sizes = {c: data.draw(st.integers(0, 3)) for c in "VNopi"}
        labels = data.draw(st.lists(st.sets(st.sampled_from("VNopi"), min_size=1), min_size=1, max_size=3))
        inputs = ["".join(data.draw(st.permutations(sorted(some)))) for some in labels]
        there = sorted(set().union(*labels))
        output = "".join(data.draw(st.permutations(there))[: data.draw(st.integers(0, len(there)))])
        terms = []
        for i, some in enumerate(inputs):  # in memory in another order
            held = data.draw(st.permutations(some))
            x = Numbers(i)(*(sizes[c] for c in held)).to(kind)
            terms.append((some, x.permute([held.index(c) for c in some])))
        wanted = torch.einsum(",".join(inputs) + "->" + output, *(x.double() for _, x in terms))
        with thresholds_at(**at):
            found = contract(terms, output)
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e4 * torch.finfo(kind).eps)

    def test_products_of_no_samples_are_products(self):
        found = contract([("Nto", Numbers(0)(0, 4, 2)), ("Nti", Numbers(1)(0, 4, 3))], "Noi")
        assert found.shape == (0, 2, 3)

    def test_shares_of_few_positions_lie_in_memory_in_their_order(self):
        """A reduction would copy them otherwise, which takes longer than to form them."""
        sent, read = Numbers(0)(9, 4, 12, 32), Numbers(1)(4, 12, 16)
        assert contract([("VNto", sent), ("Nti", read)], "NVoi").is_contiguous()

    @given(count=st.integers(1, 4), graph=st.booleans())
    def test_sums_leave_what_they_add_as_it_was(self, count, graph):
        addends = [Numbers(i)(2, 3).requires_grad_(graph and i == 1) for i in range(count)]
        before = [x.detach().clone() for x in addends]
        torch.testing.assert_close(summed(iter(addends)), torch.stack(addends).sum(0), rtol=0, atol=1e-14)
        assert all(torch.equal(x, y) for x, y in zip(addends, before, strict=True))

    @both
    @pytest.mark.parametrize("dim", [0, 1])
    def test_joined_parts_are_there_one_after_the_other(self, at, dim):
        parts = [Numbers(i)(2, 2) for i in range(3)]
        with thresholds_at(**at):
            assert torch.equal(joined(parts, dim), torch.cat(parts, dim))

    @settings(max_examples=50)
    @given(at=sides(*GATES_OF_PATCHES), kind=KINDS)
    def test_products_of_patches_are_those_of_the_patches(self, at, kind):
        x, options = Numbers()(2, 3, 5, 6), ((3, 2), [(1, 0), (2, 1)], (1, 2))
        read = unfolded(x, options[0], (1, 1), *options[1:])
        with thresholds_at(**at):
            found = patches_gram(x.to(kind), *options)
        if found is not None:
            wanted = torch.einsum("bip,bjp->ij", read, read)
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e4 * torch.finfo(kind).eps)
