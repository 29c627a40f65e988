"""What changes in a call that is not watched any more is found as before."""

import copy
import gc
import math
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad
from torch.utils.checkpoint import checkpoint

from invfunc import (
    InverseError,
    InvFuncError,
    ModifiedError,
    ReplayError,
    additive_coupling,
    chain,
    invertible_checkpoint,
)
from invfunc._torch.functorch import storage
from tests.recomputation.straight_cases import (
    PAIRS,
    TENSOR,
    WATCHED,
    W,
    X,
    assert_close,
    block_of,
    couple,
    known,
    leaves,
    loss,
    net,
    slope,
    slope_within,
    straight,
    uncouple,
)

# What is another one in a later call

SWITCH = 0.5
INNER = torch.sin


def switched(x, w):
    return INNER(x @ w) * SWITCH


def cell_of(value: Any) -> Any:
    def f(x, w):
        return (x @ w).sin() * value

    cells: Any = f.__closure__
    return f, cells[0]


class TestLater:
    """A function that behaves well for some calls, and then does something else."""

    @staticmethod
    def check(g, f, way=slope):
        for _ in range(3):
            assert_close(way(g), way(f))

    @pytest.mark.parametrize("way", [slope, slope_within])
    def test_a_global_constant(self, way, monkeypatch):
        pair = additive_coupling(switched, net)
        g = known(pair, way)
        monkeypatch.setitem(globals(), "SWITCH", 2.0)
        self.check(g, pair, way)

    @pytest.mark.parametrize("way", [slope, slope_within])
    def test_a_global_function_that_draws(self, way, monkeypatch):
        pair = additive_coupling(switched, net)
        g = known(pair, way)
        monkeypatch.setitem(globals(), "INNER", F.dropout)

        def seeded(f):
            torch.manual_seed(5)
            return way(f)

        self.check(g, pair, seeded)

    def test_a_global_tensor(self, monkeypatch):
        pair = additive_coupling(switched, net)
        g = known(pair)
        monkeypatch.setitem(globals(), "SWITCH", scale := torch.tensor(2.0, dtype=torch.float64, requires_grad=True))
        self.check(g, pair)
        y, wanted = loss(g, *leaves()), loss(pair, *leaves())
        assert_close(torch.autograd.grad(y, scale), torch.autograd.grad(wanted, scale))

    def test_a_function_of_torch(self, monkeypatch):
        g = known(PAIRS["generic"])
        monkeypatch.setattr(F, "linear", lambda x, w: x @ w)
        self.check(g, couple)

    def test_a_cell(self):
        f, cell = cell_of(0.5)
        pair = additive_coupling(f, net)
        g = known(pair)
        cell.cell_contents = 2.0
        self.check(g, pair)
        cell.cell_contents = TENSOR.double()
        self.check(g, pair)

    def test_code_and_defaults(self):
        def f(x, w, scale=0.5):
            return (x @ w).sin() * scale

        pair = additive_coupling(f, net)
        g = known(pair)
        f.__defaults__ = (2.0,)
        self.check(g, pair)
        f.__code__ = (lambda x, w, scale=0.5: (x @ w).cos() * scale).__code__
        self.check(g, pair)

    @pytest.mark.parametrize("change", ["cell", "code"])
    def test_between_a_call_and_its_backward_pass(self, change):
        f, cell = cell_of(0.5)
        g = known(additive_coupling(f, net))
        y = loss(g, *(given := leaves()))
        if change == "cell":
            cell.cell_contents = 2.0
        else:
            f.__code__ = f.__code__.replace(co_name="other")
        with pytest.raises(ReplayError, match="exchanged"):
            torch.autograd.grad(y, given)

    @pytest.mark.parametrize("later", [0, WATCHED])
    def test_between_them_with_other_calls_there(self, later):
        f, cell = cell_of(0.5)
        g = known(additive_coupling(f, net))
        y = loss(g, *(given := leaves()))
        cell.cell_contents = 2.0
        for _ in range(later):
            slope(g)
        with pytest.raises(ReplayError, match="exchanged"):
            torch.autograd.grad(y, given)

    def test_an_argument_that_is_no_tensor(self):
        def f(x, w, often, p, mode="sin"):
            for _ in range(often):
                x = F.dropout(x @ w, p)
            return x.sin() if mode == "sin" else x.cos()

        pair = additive_coupling(f, lambda x, w, *args, **kwargs: x @ w)
        g = invertible_checkpoint(pair)
        for args in [(1, 0.0), (2, 0.0), (True, 0.0), (1, 0), (1, -0.0), (1, 0.5)] * 2:
            for mode in ("sin", "cos"):
                for _ in range(WATCHED):
                    found = []
                    for h in (g, pair):
                        torch.manual_seed(1)
                        given = leaves()
                        y = h((given[0] * 1, given[1] * 1), tuple(given[2:]), *args, mode=mode)
                        found.append(torch.autograd.grad(torch.stack(y).sin().sum(), given))
                    assert_close(*found)

    def test_shapes_and_dtypes(self):
        g = known(PAIRS["additive"])
        for dtype in (torch.float64, torch.float32):
            for n in (4, 2, 1):
                given = [t.to(dtype).clone() for t in (X[0][:n], X[1][:n], *W)]
                self.check(g, PAIRS["additive"], lambda f, given=given: slope(f, [t.requires_grad_() for t in given]))

    def test_strides(self):
        g = known(PAIRS["additive"])
        x = [t.T.contiguous().T for t in X]
        self.check(g, PAIRS["additive"], lambda f: slope(f, leaves(x)))

    def test_autocast(self):
        g = known(PAIRS["additive"])
        given = [t.float().requires_grad_() for t in (*X, *W)]
        for _ in range(WATCHED):
            slope(g, given)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = torch.autograd.grad(loss(PAIRS["additive"], *given), given)
            found = torch.autograd.grad(loss(g, *given), given)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
        y, plain = loss(g, *given), loss(PAIRS["additive"], *given)
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = torch.autograd.grad(y, given), torch.autograd.grad(plain, given)
        assert_close(found, wanted)

    def test_an_attribute_of_a_tensor(self):
        def f(x, w):
            return (x @ w.T) * 2

        pair = additive_coupling(f, net)
        g, w = known(pair), leaves()[2:]
        vars(w[0])["mT_"] = 3
        assert_close(slope(g), slope(pair))

    def test_an_argument_that_is_written(self):
        g = known(PAIRS["additive"])
        given = leaves()
        y = loss(g, *given)
        with torch.no_grad():
            given[2].mul_(2)
        with pytest.raises(ModifiedError):
            torch.autograd.grad(y, given)

    def test_an_argument_whose_memory_is_exchanged(self):
        """Its numbers are those of the call, as in plain autograd of what is saved."""
        g, given = known(PAIRS["additive"]), leaves()
        wanted = slope(PAIRS["additive"], given)
        y = loss(g, *given)
        given[2].data = 5 * given[2].data
        assert_close(torch.autograd.grad(y, given), wanted)

    def test_a_weight_that_is_stepped_in_the_backward_pass(self):
        def double(w):
            w.data = 2 * w.data

        g = known(PAIRS["additive"])
        given = leaves()
        given[2].register_post_accumulate_grad_hook(double)
        loss(g, *given, number=1).backward()
        wanted = leaves()
        loss(PAIRS["additive"], *wanted, number=1).backward()
        assert_close([t.grad for t in given], [t.grad for t in wanted])

    def test_y_that_is_written(self):
        g = known(PAIRS["additive"])
        given = leaves()
        y = g((given[0] * 1, given[1] * 1), tuple(given[2:]))
        out: Any = sum(t.sum() for t in y)
        y[0].detach().mul_(2)
        with pytest.raises(InvFuncError):
            out.backward()

    @pytest.mark.parametrize("way", [slope, slope_within])
    def test_an_inverse_that_is_none_for_large_numbers(self, way):
        def inverse(y, p):
            return tuple(t.clamp(-50, 50) for t in uncouple(y, p))

        g = known((couple, inverse), way)
        x = tuple(1e3 * t for t in X)
        with pytest.raises(InverseError), straight() as count:
            if way is slope:
                slope(g, leaves(x))
            else:
                slope_within(g, x)
        assert count() == 2

    def test_modes_around(self):
        """A statistic or a checkpoint that looks on sees all calls."""
        g = known(PAIRS["additive"])
        given = leaves()
        with straight() as count:
            y: Any = checkpoint(lambda *x: loss(g, *x), *given, use_reentrant=False)
            assert count() == 0
        assert_close(torch.autograd.grad(y, given), slope(PAIRS["additive"]))

    def test_is_not_differentiated_in_its_own_transform(self):
        g = known(PAIRS["additive"], slope_within)

        def twice(given):
            (first,) = torch.autograd.grad(loss(g, *given), given[:1], create_graph=True)
            return first.square().sum()

        with pytest.raises(ReplayError, match="within the transform"):
            grad(twice)((*X, *W))


class TestBlocks:
    def test_copies_are_watched_anew(self):
        g = known(PAIRS["additive"])
        other = copy.deepcopy(g)
        with straight() as count:
            assert_close(slope(other), slope(PAIRS["additive"]))
            assert count() == 0

    def test_options(self):
        options: Any
        for options in ({"check": "off"}, {"check": "error"}, {"keep": True}, {"keep": (0,)}, {"check": True}):
            g = known(PAIRS["additive"], **options)
            assert_close(slope(g), slope(PAIRS["additive"]))

    def test_of_a_chain(self):
        g = chain(*[invertible_checkpoint(PAIRS[name]) for name in ("additive", "affine")])
        given = leaves()

        def run(f):
            y = f((given[0] * 1, given[1] * 1), [tuple(given[2:])] * 2)
            return torch.autograd.grad(torch.stack(y).sin().sum(), given)

        wanted = run(lambda x, p: PAIRS["affine"](PAIRS["additive"](x, p[0]), p[1]))
        for _ in range(2 * WATCHED):
            found = run(g)
        assert_close(found, wanted)

    def test_split_tensors(self):
        pair = additive_coupling(net, net, split_dim=-1)

        def run(f):
            given = leaves()
            y = f(torch.cat(given[:2], -1), tuple(given[2:]))
            return torch.autograd.grad(f(y, tuple(given[2:])).sin().sum(), given)

        g = invertible_checkpoint(pair)
        for _ in range(WATCHED):
            run(g)
        with straight() as count:
            assert_close(run(g), run(pair))
            assert count() == 2

    def test_keep_nothing_alive(self):
        g = known(PAIRS["additive"])
        given = leaves()
        x = given[0] * 1, given[1] * 1
        y = g(x, tuple(given[2:]))
        held = [weakref.ref(t) for t in x] + [weakref.ref(storage(t)) for t in x]
        del x
        gc.collect()
        assert not any(known() for known in held)
        torch.autograd.grad(torch.stack(y).sum(), given)

    @pytest.mark.parametrize("name", ["additive", "generic"])
    def test_let_go_of_what_was_computed_again(self, name):
        """However deep the network is, also without the garbage collector, which sees no graph of autograd."""
        state = [torch.rand(11, 3).double() for _ in "ab"]  # of a shape that nothing else here has

        def alive():
            return sum(type(t) is torch.Tensor and t.shape == state[0].shape for t in gc.get_objects())

        def most(depth):
            found, weights = [], [leaves()[2:] for _ in range(depth)]
            for w in weights:
                w[0].register_hook(lambda _: found.append(alive()))
            y = state[0] * 1, state[1] * 1
            for w in weights:
                y = g(y, tuple(w))
            torch.stack(y).sin().sum().backward()
            return max(found)

        g = known(PAIRS[name])
        most(WATCHED)
        with mock.patch("invfunc.thresholds.GATHERED", 16 * state[0].numel()):  # 16 are held to be looked at together
            few = most(20)
            assert most(60) <= few


FUNCTIONS = {
    "scale": lambda x, w: x @ w * math.pi,
    "linear": F.linear,
    "norm": lambda x, w: F.layer_norm(x, (3,)) + 0 * w.sum(),
    "softmax": lambda x, w: x.softmax(-1) @ w,
    "relu": lambda x, w: F.relu(x) + F.gelu(x @ w),
    "parts": lambda x, w: torch.cat([x[:, :1], x[:, 1:] * 2], 1) @ w,
    "noise": lambda x, w: F.dropout(x @ w, 0.3),
    "sign": lambda x, w: x @ w if float(x.detach().sum()) > 0 else w.mean() - x,
    "closure": lambda x, w: x @ w * TENSOR,
    "write": lambda x, w: (x @ w).tanh_(),
}


@given(st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=2, max_size=2), st.data())
def test_any_call_gives_what_the_function_gives(names, data):
    """Whether it is watched or not, and whichever calls were before it."""
    first, second = (FUNCTIONS[name] for name in names)
    pair = additive_coupling(first, second)
    kinds = (pair, (lambda x, p: pair(x, p), lambda y, p: pair.inverse(*pair.shared, y, p)))
    g = block_of(data.draw(st.sampled_from(kinds)))
    for way in data.draw(st.lists(st.sampled_from([slope, slope_within]), min_size=2, max_size=10)):
        torch.manual_seed(3)
        found = way(g)
        torch.manual_seed(3)
        assert_close(found, way(pair))
