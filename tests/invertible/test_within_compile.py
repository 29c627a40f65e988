"""A chain of blocks within torch.compile: one operation of one graph, whose backward pass inverts block after block."""

import warnings
from contextlib import contextmanager
from itertools import product
from shutil import which

import pytest
import torch
from torch import nn

from invfunc import Invertible, InvFuncWarning, additive_coupling, chain, invertible_checkpoint, repeated, tree
from invfunc.errors import InexactWarning, InverseError, ReplayError
from invfunc.testing import assert_trees_close
from tests.invertible.test_composition import backward
from tests.invertible_cases import FLOOR, RTOL, Sizes, twins
from tests.strategies import Numbers

pytestmark = pytest.mark.slow

EXACT = 1e-10
FORMS = [
    "additive on one tensor",
    "leapfrog",
    "functions of a dict",
    "no inverse",
    "keep=(1,)",
    "check=True",
    "repeated, stacked, anchored",
    "nested",
]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@contextmanager
def told():
    """The warnings of this library."""
    with warnings.catch_warnings(record=True) as all_of_them:
        warnings.simplefilter("always")
        found = []
        yield found
    found += [str(w.message) for w in all_of_them if issubclass(w.category, (InvFuncWarning, InexactWarning))]


def once(f, backend="aot_eager"):
    return torch.compile(f, backend=backend, fullgraph=True)


def squared(y):
    return sum(t.sin().sum() for t in tree.tensors(y) if t.is_floating_point())


def slopes(f, x, of):
    return torch.autograd.grad(squared(f(x)), of)


def through(blocks):
    """Blocks, as without a chain."""

    def net(x):
        for block in blocks:
            x = block(x)
        return x

    return net


def modules(*more):
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), *(one() for one in more)).double() for _ in range(4)]


def of_modules(nets):
    """Two couplings, and the parameters that they close over."""
    pairs = [additive_coupling(*nets[:2]), additive_coupling(*nets[2:])]
    return chain(*pairs), through(pairs), [p for net in nets for p in net.parameters()]


def state(n=5):
    return Numbers(1)(n, 3), Numbers(2)(n, 3).requires_grad_()


class TestIsWhatItIsOutside:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.filterwarnings("ignore:an invertible block within torch.compile:invfunc.InvFuncWarning")
    def test_value_and_gradients(self, form):
        pair = twins(form, Sizes(depth=2)).to(torch.float64, "cpu")
        blocks = pair.g if isinstance(pair.g, Invertible) else repeated(pair.g.__closure__[0].cell_contents)
        found, wanted = backward(once(blocks), pair.x, pair.params), backward(pair.f, pair.x, pair.params)
        assert_trees_close(found, wanted, RTOL[torch.float64], FLOOR)

    def test_of_modules_that_are_closed_over(self):
        blocks, plain, params = of_modules(modules())
        x, of = state(), params
        with told() as found:
            ours = slopes(once(blocks, "eager"), x, [*of, x[1]])
        assert_trees_close(ours, slopes(plain, x, [*of, x[1]]), EXACT)
        assert not found

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.skipif(not which("g++"), reason="no g++")
    def test_by_inductor(self):
        pair = Invertible(lambda x, w: x.sinh() * w, lambda y, w: (y / w).asinh())
        w, x, blocks = (1 + Numbers(0)(3) / 9).requires_grad_(), Numbers(1)(4, 3), chain(pair, pair)
        plain = through([lambda x: pair(x, w)] * 2)
        assert_trees_close(slopes(once(lambda x: blocks(x, [w, w]), "inductor"), x, [w]), slopes(plain, x, [w]), EXACT)

    def test_of_what_is_another_one_later(self):
        """Sizes, parameters, what closures hold, and numbers among the arguments."""
        (net, *_), held = modules(), {"act": torch.sin}
        pair = additive_coupling(lambda b, p, s: net(b) * s, lambda a, p, s: held["act"](a) * s)
        blocks = chain(pair, pair)
        compiled = once(lambda x, s: blocks(x, [((), ())] * 2, s))
        for k, n in enumerate((5, 7, 9)):
            held["act"] = (torch.sin, torch.cos)[k > 1]
            net[0].weight = nn.Parameter(net[0].weight * 2)
            params, s = [*net.parameters()], 1.0 + k
            plain = through([lambda x, s=s: pair(x, ((), ()), s)] * 2)
            found = slopes(lambda x, s=s: compiled(x, s), state(n), params)
            assert_trees_close(found, slopes(plain, state(n), params), EXACT)

    def test_of_attention_with_a_mask(self):
        """Torch makes numbers of it that no graph has seen."""
        mask = torch.ones(5, 5, dtype=torch.bool).tril()

        def attend(b, w):
            q = (b @ w)[None]
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)[0]

        pair = additive_coupling(attend, attend)
        blocks, w = chain(pair, pair), Numbers(0)(3, 3).requires_grad_()
        plain = through([lambda x: pair(x, (w, w))] * 2)
        found = slopes(once(lambda x: blocks(x, [(w, w)] * 2)), state(5), [w])
        assert_trees_close(found, slopes(plain, state(5), [w]), EXACT)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_under_autocast(self, backend):
        ws = [(Numbers(k)(32, 32) / 6).float().requires_grad_() for k in range(2)]
        pair = Invertible(
            lambda x, w: (x[1], x[0] + (x[1] @ w).tanh().float()), lambda y, w: (y[1] - (y[0] @ w).tanh().float(), y[0])
        )
        blocks, x = chain(pair, pair), (Numbers(3)(8, 32).float(), Numbers(4)(8, 32).float())

        def run(f):
            with torch.autocast("cpu"):
                y = f(x)
            return torch.autograd.grad(squared(y), ws)

        plain = through([lambda x, w=w: pair(x, w) for w in ws])
        assert_trees_close(run(once(lambda x: blocks(x, ws), backend)), run(plain), 1e-5)


class TestSavesMemory:
    """Saved states of a chain do not grow with depth; those of the same blocks without it do."""

    @staticmethod
    def run(depth, made):
        """The bytes that are kept behind a call, and the most that are held by call and backward pass, in states."""
        block = additive_coupling(lambda b, w: (b @ w).sin().tanh(), lambda a, w: (a @ w).sin().tanh())
        ws = [(Numbers(k)(8, 8).requires_grad_(), Numbers(-k)(8, 8).requires_grad_()) for k in range(depth)]
        x = Numbers(1)(4096, 8), Numbers(2)(4096, 8)
        blocks = (
            repeated(block) if made == "chain" else lambda x, ws: through([lambda x, w=w: block(x, w) for w in ws])(x)
        )
        compiled = once(lambda x: squared(blocks(x, ws)))
        torch.autograd.grad(compiled(x), tree.tensors(ws))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            y = compiled(x)
            with torch.profiler.record_function("behind the call"):
                pass
            torch.autograd.grad(y, tree.tensors(ws))
        events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        now = most = kept = 0
        for event in events:
            now += event.nbytes() if event.name() == "[memory]" else 0
            most, kept = max(most, now), now if event.name() == "behind the call" else kept
        state = sum(t.nbytes for t in x)
        return kept / state, most / state

    def test_whatever_the_depth(self):
        (kept, most), (deep_kept, deep_most) = (self.run(depth, "chain") for depth in (2, 6))
        plain_kept, plain_most = self.run(6, "plain")
        assert kept <= 1.1 and deep_kept <= 1.1 < 6 < plain_kept
        assert deep_most <= 1.1 * most < plain_most / 2


class TestWhatCannotBeEvaluatedAgain:
    """It is compiled as it is, and a warning tells."""

    @pytest.mark.parametrize("kind", [nn.Dropout, lambda: nn.BatchNorm1d(3)], ids=["dropout", "batch norm"])
    def test_is_compiled_as_it_is(self, kind):
        nets = modules(kind)
        blocks, plain, params = of_modules(nets)
        compiled, x, found = once(blocks), state(), []
        with told() as said:
            for f in (compiled, compiled, plain):
                for buffer in (b for net in nets for b in net.buffers()):
                    buffer.zero_()
                torch.manual_seed(0)
                found.append((slopes(f, x, params), [b.clone() for net in nets for b in net.buffers()], torch.rand(1)))
        assert_trees_close(found[0], found[2], EXACT)
        assert_trees_close(found[1], found[2], EXACT)
        assert any("torch.compiler.disable" in one for one in said)

    def test_inside_of_torch_func(self):
        blocks = chain(*[Invertible(lambda x, w: x.sinh() * w, lambda y, w: (y / w).asinh())] * 2)
        x, w = state()[0], Numbers(0)(3)

        def slope(w):
            return torch.func.grad(lambda w: torch.vmap(lambda x: squared(blocks(x, [w, w])))(x).sum())(w)

        with told() as said:
            compiled = once(slope)(w)
        assert_trees_close(compiled, slope(w), EXACT)
        assert any("saves no memory" in one for one in said)


class TestInverses:
    """Of blocks whose inverse is off."""

    @staticmethod
    def blocks(off, check="warn"):
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        pair = Invertible(lambda x: x * w, lambda y: y / w * off)
        return once(invertible_checkpoint(chain(pair, pair), check=check)), w

    def test_that_are_wrong_are_errors(self):
        f, w = self.blocks(1.5)
        with pytest.raises(InverseError, match="gives x back"):
            slopes(f, state()[0], [w])

    def test_are_looked_at_as_the_option_says(self):
        f, w = self.blocks(1 + 1e-6, "error")
        with pytest.raises(InverseError):
            slopes(f, state()[0], [w])
        for check in ("off", 1e-3):
            f, w = self.blocks(1 + 1e-6, check)
            with told() as said:
                slopes(f, state()[0], [w])
            assert not said

    def test_of_another_shape_are_errors(self):
        f = once(chain(Invertible(lambda x: x * 2, lambda y: y[:2])))
        with pytest.raises(Exception, match="another shape"):
            f(state()[1])

    @pytest.mark.parametrize(("check", "of"), [*product(["warn", "off"], ["w", "x", "w and x"])])
    def test_second_derivatives_are_errors(self, check, of):
        """Also those in a sum with what has some, where torch takes what it does not know of for zero. In one of two
        backends: each check is tried in both, and each derivative."""
        backend = "eager" if (check == "off") == (of == "x") else "aot_eager"
        w, x = Numbers(0)(3).exp().requires_grad_("w" in of), Numbers(1)(4, 3).requires_grad_("x" in of)
        pair = Invertible(lambda x: (x * w).sinh(), lambda y: y.asinh() / w)
        blocks = invertible_checkpoint(chain(pair, pair), check=check)
        f, asked = once(lambda x: squared(blocks(x)), backend), [t for t in (w, x) if t.requires_grad]
        with pytest.raises((ReplayError, RuntimeError), match="first derivatives only|double backward"):
            found = torch.autograd.grad(f(x), asked, create_graph=True)
            torch.autograd.grad(squared([*found, *asked]), asked, allow_unused=True)
