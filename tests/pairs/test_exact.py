"""Fixed-point grids: sums that can be undone to the last bit, or an error."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.func import grad, jacrev, jvp, vmap

from invfunc import additive_coupling, chain, invert, invertible_checkpoint, repeated, tree
from invfunc._torch.functorch import innermost
from invfunc.errors import ArgumentError, RangeError
from invfunc.pairs import Grid
from invfunc.testing import assert_trees_close
from tests.pairs.test_couplings import summed
from tests.strategies import Numbers

GRIDS = {"float32": Grid(), "float64": Grid(fraction_bits=32, dtype=torch.float64)}
of_each = pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
grids = st.builds(Grid, st.integers(-2, 20), st.sampled_from([torch.float32, torch.float64]))
N, WIDTH = 3, 4


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Also -0.0 and 0.0 are not the same."""
    as_integers = {4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(as_integers), b.view(as_integers))


@pytest.mark.quick
class TestGrid:
    @given(grid=grids, data=st.data())
    def test_undoes_sums_to_the_last_bit(self, grid, data):
        """For negative numbers, too, as momentumnet's exact integers do not."""
        most = int(grid.limit * 2.0**grid.fraction_bits)
        a, end = (data.draw(st.integers(-most, most)) for _ in range(2))
        start, r = (torch.tensor([n * 2.0**-grid.fraction_bits], dtype=grid.dtype) for n in (a, end - a))
        pair = additive_coupling(lambda b: b + r, lambda a: 0 * a, exact=grid)
        try:
            y = pair((start, 0 * start))
        except RangeError:
            assert most - max(abs(end), abs(a)) <= 1
        else:
            assert same_bits(invert(pair)(y)[0], start) and same_bits(grid.enter(y[0]), y[0])

    @given(grid=grids, x=st.floats(-15, 15, width=32), kind=st.sampled_from("bfloat16 float16 float32 float64".split()))
    @example(grid=Grid(2), x=0.125, kind="float32")
    @example(grid=Grid(2), x=-1e-3, kind="bfloat16")
    def test_enter_gives_the_nearest_number(self, device, grid, x, kind):
        x = torch.tensor([x], dtype=getattr(torch, kind), device=device)
        found, scale = grid.enter(x), Fraction(2) ** grid.fraction_bits
        wanted = round(Fraction(x.item()) * scale) / scale
        assert found.dtype == grid.dtype and same_bits(found, torch.tensor([float(wanted)]).to(found))
        assert same_bits(grid.enter(found), found)

    @of_each
    def test_enter_is_the_identity_for_gradients(self, device, grid):
        x, c = (Numbers(s)(N, WIDTH).to(device, grid.dtype) for s in (0, 1))
        assert_trees_close(grad(lambda x: (c * grid.enter(x)).sum())(x), c, 0)
        assert_trees_close(jvp(grid.enter, (x,), (c,)), (grid.enter(x), c), 0)
        assert_trees_close(vmap(grad(lambda x, c: (c * grid.enter(x)).sum()))(x, c), c, 0)
        half = x.bfloat16().requires_grad_()
        (c * grid.enter(half)).sum().backward()
        assert_trees_close(half.grad, c.bfloat16(), 0)

    @given(bits=st.integers(-4, 22), largest=st.floats(0, 2.0**28))
    def test_takes_the_dtype_that_the_range_asks_for(self, bits, largest):
        grid = Grid(bits, largest=largest)
        assert grid.dtype == (torch.float32 if largest <= 2.0 ** (24 - bits) else torch.float64)
        assert grid.limit == 2.0 ** ({torch.float32: 24, torch.float64: 53}[grid.dtype] - bits) >= largest
        end = torch.tensor([1, -1], dtype=grid.dtype) * (grid.limit - 2.0**-bits)
        assert same_bits(grid.enter(end), end)
        with pytest.raises(RangeError, match="leave the range"):
            grid.enter(end * 1.001)

    def test_refuses_numbers_that_do_not_fit(self):
        with pytest.raises(ArgumentError, match="1000.0 do not fit, the range ends at 256"):
            Grid(16, torch.float32, largest=1000.0)
        with pytest.raises(ArgumentError, match="do not fit"):
            Grid(40, largest=1e9)

    @pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 257.0, -1e30, 3e38])
    def test_enter_refuses_what_is_out_of_range(self, number):
        with pytest.raises(RangeError, match=r"^Grid\(.*leave the range, which ends at 256.*fewer fraction_bits"):
            Grid().enter(torch.tensor([0.0, number]))


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def coupling(grid: Any, F: Callable = mixed, split: bool = False) -> Any:
    return additive_coupling(F, F, exact=grid, split_dim=-1 if split else None)


def entered(grid: Grid, depth: int, seed: int = 0) -> tuple[Any, torch.Tensor]:
    """A state on the grid, and parameters for some couplings."""
    rand = Numbers(seed)
    x = tuple(grid.enter(rand(N, WIDTH)) for _ in range(2))
    return x, (rand(depth, 2, WIDTH, WIDTH) / 2).to(grid.dtype)


def pairs_of(w: torch.Tensor) -> list:
    return [tuple(p.unbind()) for p in w.unbind()]


class TestReconstruction:
    @pytest.mark.slow
    @of_each
    def test_has_no_error_at_depth_1000(self, grid):
        """Peers: 4e-5 at depth 100 in float32; momentumnet overflows in silence after some 300 steps."""
        x, w = entered(grid, 1000)
        net = repeated(coupling(grid))
        y = net(x, pairs_of(w))
        for a, b in zip(invert(net)(y, pairs_of(w)), x, strict=True):
            assert same_bits(a, b)
        assert not torch.equal(y[0], x[0])
        drifts = repeated(coupling(False))
        assert not torch.equal(invert(drifts)(drifts(x, pairs_of(w)), pairs_of(w))[0], x[0])

    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
    def test_has_no_error_for_functions_in_half_precision(self, half):
        """The state of a model in half precision is float32."""
        x, w = entered(GRIDS["float32"], 200)
        x = tuple(Grid().enter(t.to(half)) for t in x)
        net = repeated(coupling(True, lambda b, p: mixed(b.to(half), p)))
        w = pairs_of(w.to(half))
        y = net(x, w)
        assert all(t.dtype == torch.float32 for t in y)
        assert all(same_bits(a, b) for a, b in zip(invert(net)(y, w), x, strict=True))

    @of_each
    def test_has_no_minus_zero(self, grid):
        """-0.0 + r - r is 0.0: a function that asks for the sign would see another number."""
        x = tuple(grid.enter(torch.full((2,), -1e-30)) for _ in range(2))
        pair = additive_coupling(lambda b: -1e-30 * b.exp(), lambda a: -1e-30 * torch.signbit(a).float(), exact=grid)
        assert all(same_bits(a, b) for a, b in zip(invert(pair)(pair(x)), x, strict=True))


def stacked(pair: Any) -> Callable:
    g = invertible_checkpoint(pair)

    def net(x, params):
        for p in params:
            x = g(x, p)
        return x

    return net


WHOLES: dict[str, Callable] = {
    "calls": stacked,
    "repeated": repeated,
    "chain": lambda pair: chain(*[pair] * 6),
    "chains": lambda pair: lambda x, w: chain(repeated(pair), chain(pair, pair))(x, [w[:4], w[4:]]),
}


def plainly(loss: Callable, x: Any, w: torch.Tensor) -> Any:
    """Gradients by torch.autograd, twice from one graph."""
    x, w = tree.map_tensors(lambda t: t.clone().requires_grad_(), (x, w))
    value = loss(x, w)
    torch.autograd.grad(value, w, retain_graph=True)
    return torch.autograd.grad(value, w)[0]


WAYS: dict[str, Callable] = {
    "autograd": plainly,
    "grad": lambda loss, x, w: grad(loss, 1)(x, w),
    "vmap of grad": lambda loss, x, w: vmap(grad(loss, 1), (0, None))(x, w),
    "grad of vmap": lambda loss, x, w: grad(lambda w: vmap(loss, (0, None))(x, w).sum())(w),
    "jacrev": lambda loss, x, w: jacrev(lambda w: torch.stack([loss(x, w), loss(x, 2 * w)]))(w),
}


class TestGradients:
    @pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
    @pytest.mark.parametrize("whole", WHOLES.values(), ids=WHOLES)
    def test_are_made_at_the_very_same_numbers(self, device, whole, way):
        """Every function sees in the backward pass, bit for bit, what it saw before, under any transform."""
        x, w = entered(Grid(), 6)
        x, w = tree.map_tensors(lambda t: t.to(device), (x, w))
        seen: list[torch.Tensor] = []

        def spied(b, p):
            seen.append(innermost(b.detach()).clone())
            return mixed(b, p)

        def loss(pair):
            net = whole(pair)
            return lambda x, w: summed(lambda: net(x, pairs_of(w)))()

        found = way(loss(coupling(True, spied)), x, w)
        count = 12 * (2 if way is WAYS["jacrev"] else 1)
        there, back = seen[:count], seen[count:]
        assert len(back) >= count
        assert all(any(same_bits(b, a) for a in there if a.shape == b.shape) for b in back)
        plain = way(lambda x, w: summed(lambda: loop(coupling(True), x, w))(), x, w)
        assert_trees_close(found, plain, 1e-5)


def loop(pair: Any, x: Any, w: torch.Tensor) -> Any:
    for p in pairs_of(w):
        x = pair(x, p)
    return x


class TestErrors:
    @pytest.mark.parametrize("number", [300.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("way", [lambda loss, x, w: loss(x, w), *WAYS.values()], ids=["value", *WAYS])
    def test_of_numbers_out_of_range(self, way, number):
        """Never wrapped in silence; a single entry of a batch is enough, at any depth."""
        x, w = entered(Grid(), 6)
        far = torch.zeros(N, WIDTH)
        far[1, 2] = number

        def pushed(b, p):
            return mixed(b, p) + (far if b.dim() > 1 else far[1]) * (p[0, 0] == w[4, 1, 0, 0])

        for whole in WHOLES.values():
            with pytest.raises(RangeError, match="numbers between .* leave the range, which ends at 256"):
                way(lambda x, w, whole=whole: summed(lambda: whole(coupling(True, pushed))(x, pairs_of(w)))(), x, w)

    @pytest.mark.parametrize("leaf", [0, 1])
    def test_of_states_that_were_not_put_on_the_grid(self, leaf):
        x, w = entered(Grid(), 1)
        for other, told in [
            (x[leaf] + 2.0**-18, "the state is not on the grid; put it there with Grid.enter"),
            (x[leaf].double(), "a state of torch.float64 is not on the grid"),
            (x[leaf].round().bfloat16(), "a state of torch.bfloat16 is not on the grid"),
        ]:
            state = list(x)
            state[leaf] = other
            for call in (coupling(True), invertible_checkpoint(coupling(True)), vmap(coupling(True), (0, None))):
                with pytest.raises(RangeError, match=told):
                    call(tuple(state), pairs_of(w)[0])
