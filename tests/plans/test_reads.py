"""Numbers that are read, tensors and modules that are closed over, arguments and draws are those of each call."""

import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import invfunc
from invfunc import compiled, tree
from invfunc.plans.calls import numbers
from invfunc.plans.recorder import draws
from invfunc.testing.oracles import assert_trees_close
from tests.plans.calls import EXACT, dropping, given, hits, loss, of, quietly, same
from tests.strategies import Numbers, seeded

# Numbers that are read


def by_item(w, x):
    return loss(w, x) * (2.0 if x.sum().item() > 0 else 3.0)


def by_value(w, x):
    return loss(w, x) * x.amax().item()


def by_branch(w, x):
    return loss(w, x) if (w[0] > 0) & (x[0, 0] > 0) else (x @ w).sin()


def by_equal(w, x):
    return loss(w, x) * (1 if torch.equal(x, x.abs()) else 2)


def by_index(w, x):
    return loss(w, x) * (1, 2, 3)[(x.sum() > 0).long() + (w.sum() > 0).long()]


def by_list(w, x):
    return loss(w, x) * sum((x > 0).tolist()[0])


def by_numpy(w, x):
    return loss(w, x) * float(x.detach().numpy().sum())


def by_new_tensor(w, x):
    return loss(w, x) * torch.tensor([x[0, 0], x[1, 1]], dtype=x.dtype).sum()


def by_text(w, x):
    return loss(w, x) * len(repr(x.detach()))


def by_mask(w, x):
    return loss(w, x) * x[x > 0].mean()


def by_nonzero(w, x):
    return loss(w, x) * len(torch.nonzero(x > 0))


def by_unique(w, x):
    return loss(w, x) * x.round().unique().numel()


def by_sections(w, x):
    return loss(w, x) * torch.tensor_split(x[0], (x[0] > 0).long().cumsum(0))[0].sum()


def by_bincount(w, x):
    return loss(w, x) * torch.bincount((x[:, 0] > 0).long()).amax()


def by_numbers_written_later(w, x):
    flag = x.detach().clone().sum()
    factor = 2.0 if flag > 0 else 3.0
    flag.zero_()
    return loss(w, x) * factor


READS = (by_item, by_value, by_branch, by_equal, by_index, by_list, by_numpy, by_new_tensor, by_text, by_mask)
READS += (by_nonzero, by_unique, by_sections, by_bincount, by_numbers_written_later)


@pytest.mark.quick
@pytest.mark.parametrize("f", READS, ids=[f.__name__ for f in READS])
def test_numbers_that_are_read_are_never_those_of_another_call(f):
    t = invfunc.hvp(lambda w, x: f(w, x).sum())  # which does not mind that samples are mixed
    c = compiled(t)
    for seed in (0, 0, 1, 2, 3, 1, 0, 4):
        w, x = given(seed)
        for factor in (1, -1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                same(c, t, w, w.cos(), factor * x)


def test_a_plan_is_used_while_numbers_are_the_same():
    t, c = of(lambda w, x: loss(w, x) * (2.0 if x.sum() > 0 else 3.0))
    w, x = given()
    for k in range(4):
        same(c, t, w, x.abs() + k)
    assert hits(c) == 3


# Tensors and modules that are closed over


class Layer(nn.Module):
    """A module of the user's, which reads its mode."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.register_buffer("shift", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return (x * self.shift) @ self.w * (3.0 if self.training else 1.0)


CHANGES = {
    "a step": lambda layer: layer.shift.mul_(2),
    "behind its version": lambda layer: layer.shift.data.mul_(2),
    "other memory": lambda layer: setattr(layer.shift, "data", layer.shift.data * 2),
    "other strides": lambda layer: setattr(layer.shift, "data", layer.shift.data.repeat_interleave(2)[::2] * 2),
    "a state": lambda layer: layer.load_state_dict({"w": layer.w.data, "shift": layer.shift * 2}),
    "its mode": lambda layer: layer.eval(),
    "another tensor": lambda layer: layer.register_buffer("shift", layer.shift * 2),
}


@pytest.mark.quick
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("way", ["functional", "functional_call", "a method"])
def test_tensors_and_modules_that_are_closed_over_are_those_of_now(way, change):
    layer = Layer().requires_grad_(False)
    own, _ = invfunc.functional(layer)
    ways = {
        "functional": lambda w, x: own({"w": w}, x).square(),
        "functional_call": lambda w, x: torch.func.functional_call(layer, {"w": w}, x).square(),
        "a method": lambda w, x: (Layer.forward(layer, x) * (x @ w)).square(),
    }
    t, c = of(ways[way])
    for k in range(2):
        same(c, t, *given(k))
    with torch.no_grad():
        change(layer)
    for k in range(2):
        same(c, t, *given(k))
    assert hits(c) >= 2


def test_arguments_that_are_closed_over_too_are_told_apart():
    held = Numbers(3)(3)
    t, c = of(lambda w, x: loss(w, x) * (w * held).sum())
    for w in (held, held + 1, held):
        same(c, t, w, given()[1])
    assert hits(c) == 2


# Arguments and results


@pytest.mark.quick
class TestArguments:
    @pytest.mark.filterwarnings("ignore:.*more than 8 shapes")
    def test_of_other_shapes_trees_and_types_have_plans_of_their_own(self):
        def f(p, x, *more, **named):
            return loss(tree.tensors((p,))[0], x) * (2 if more else 1) * named.get("by", 1)

        t, c = of(f)
        w, x = given()
        for _ in range(2):
            same(c, t, w, x)
            same(c, t, {"w": w}, x)
            same(c, t, w, x[:2])
            same(c, t, w, x.T.contiguous().T)
            same(c, t, w.float(), x.float())
            for by in (2, 2.0, True, -0.0, torch.tensor(3.0)):
                same(c, t, w, x, by=by)
            assert c(w, x, by=float("nan")).isnan().all()
        assert hits(c) == 11

    def test_that_are_the_same_tensor_or_share_memory_are_told_apart(self):
        def f(p, x):
            return loss(p["a"], x) * (1 if p["a"] is p["b"] else 2) + (x @ p["b"])

        t, c = of(f)
        w, x = given()
        both = torch.cat([w, w + 1])
        for _ in range(2):
            for a, b in [(w, w), (w, w.clone()), (both[:3], both[3:]), (both[:3], both[2:5]), (w, w + 1)]:
                same(c, t, {"a": a, "b": b}, x)
        assert hits(c) == 6  # two pairs have a plan in common


@pytest.mark.quick
class TestResults:
    def test_have_memory_of_their_own(self):
        def f(p, x):
            return loss(p["w"], x)

        t = invfunc.together(invfunc.variance(f), invfunc.batch_grad(f))
        c = compiled(t)
        w, x = given()
        params = {"w": w, "unread": w + 1}
        for _ in range(3):
            found = c(params, x)
            places = {leaf.untyped_storage().data_ptr() for leaf in tree.tensors(found)}
            assert len(places) == 4
            assert_trees_close(found, t(params, x), EXACT)
            for leaf in tree.tensors(found):
                leaf.fill_(7)

    def test_with_aux_are_those_of_now(self):
        def f(w, x):
            return loss(w, x), {"mean": x.mean(), "note": "text", "n": len(x)}

        t = invfunc.variance(f, has_aux=True)
        c = compiled(t)
        for k in range(3):
            found, aux = c(*given(k))
            wanted, expected = t(*given(k))
            assert_trees_close((found, aux["mean"]), (wanted, expected["mean"]), EXACT)
            assert aux["note"] == "text" and aux["n"] == 4
        assert hits(c) == 2

    def test_of_constants_and_what_is_written_in_place(self):
        def f(w, x):
            masked = (x @ w).masked_fill(x[:, 0] > 0, float("-inf")).exp() + torch.full_like(x[:, 0], -0.0)
            signs = torch.copysign(torch.ones(4, dtype=x.dtype), torch.tensor([-0.0, 0.0, -1.0, 1.0]))
            total, first = torch.zeros(4, dtype=x.dtype), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
            total.add_(x[:, 0].detach())
            first[1:].mul_(total[1:])
            return masked + signs * loss(w, x).clamp(max=float("inf")) * (total + first)

        t, c = of(f)
        for k in range(3):
            same(c, t, *given(k))
        assert hits(c) == 2


# Random numbers


def forking(w, x):
    with torch.random.fork_rng():
        noise = torch.rand(3)
    return loss(w, x + noise + torch.rand(3))


def seeding(w, x):
    torch.manual_seed(4)
    return loss(w, x + torch.rand(3))


def rewinding(w, x):
    state = torch.get_rng_state()
    first = torch.rand(3)
    torch.set_rng_state(state)
    return loss(w, x + first + torch.rand(3) + torch.randn(3))


def checkpointed(w, x):
    return checkpoint(lambda w: dropping(w, x), w, use_reentrant=False) + dropping(w, x)


@pytest.mark.quick
class TestRandomNumbers:
    @pytest.mark.parametrize("f", [dropping, forking, seeding, rewinding, checkpointed])
    def test_are_those_of_the_call(self, f):
        t, c = of(f)
        for k in range(4):
            torch.manual_seed(k)
            wanted, after = t(*given(k)), torch.rand(2)
            torch.manual_seed(k)
            assert_trees_close((quietly(c, *given(k)), torch.rand(2)), (wanted, after), EXACT)
        assert hits(c) == (0 if f is seeding else 3)

    def test_are_drawn_once_where_a_guard_misses(self):
        t, c = of(lambda w, x: dropping(w, x) * (2 if x.sum() > 0 else 3))
        for k in range(4):
            w, x = given(k)
            for inputs in (x.abs(), -x.abs()):
                torch.manual_seed(k)
                wanted, after = t(w, inputs), torch.rand(2)
                torch.manual_seed(k)
                assert_trees_close((quietly(c, w, inputs), torch.rand(2)), (wanted, after), EXACT)

    @pytest.mark.parametrize("held", ["by the statistic", "by f"])
    def test_of_a_generator_go_on(self, held):
        a, b = seeded(3), seeded(3)

        def drawn(g):
            if held == "by f":
                return invfunc.variance(lambda w, x, y: loss(w, x + torch.rand(3, generator=g)))
            return invfunc.diag_ggn(lambda w, x: x @ w, F.cross_entropy, mc_samples=2, generator=g)

        t, c = drawn(a), compiled(drawn(b))
        w, x, y = Numbers()(3) if held == "by f" else Numbers()(3, 5), Numbers(1)(4, 3), torch.arange(4)
        for _ in range(4):
            assert_trees_close(c(w, x, y), t(w, x, y), EXACT)
            assert torch.equal(a.get_state(), b.get_state())
        assert hits(c) == 3


# Calls by a plan in other modes and threads, and their errors, are those of the call itself


@pytest.mark.quick
class TestModes:
    def test_of_differentiation(self):
        t, c = of(loss)
        w, x = given()
        c(w, x), c(w, x)
        slope = grad(lambda w: c(w, x).sum())(w)
        assert_trees_close(slope, grad(lambda w: t(w, x).sum())(w), EXACT)
        assert_trees_close(vmap(c, (0, None))(torch.stack([w, 2 * w]), x), torch.stack([t(w, x), t(2 * w, x)]), EXACT)
        assert_trees_close(jvp(lambda w: c(w, x), (w,), (w,)), jvp(lambda w: t(w, x), (w,), (w,)), EXACT)
        leaf = w.clone().requires_grad_()
        with pytest.warns(invfunc.InvFuncWarning, match="differentiable"):
            found = c(leaf, x)
        assert_trees_close(torch.autograd.grad(found.sum(), leaf)[0], slope, EXACT)
        with torch.no_grad():
            for _ in range(2):
                found = c(leaf, x)
                assert not found.requires_grad
                assert_trees_close(found, t(w, x), EXACT)
        with torch.inference_mode():
            for _ in range(2):
                assert c(w, x).is_inference() == t(w, x).is_inference()
        assert not c(w, x).is_inference()

    def test_that_find_anomalies_see_the_call_itself(self):
        t, c = of(loss)
        c(*given()), c(*given())
        with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(c, t, *given())
        assert hits(c) == 1

    def test_of_autocast_and_default_dtypes(self):
        def f(w, x):
            return F.linear(x, w).square().sum(1) * torch.tensor(0.1)

        t, c = of(f)
        w, x = torch.randn(2, 3), torch.randn(4, 3)
        for _ in range(2):
            for on in (False, True):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                    same(c, t, w, x)
        assert hits(c) == 2
        plain = c(w.double(), x.double())
        torch.set_default_dtype(torch.float64)
        try:
            exact = c(w.double(), x.double())
            same(c, t, w.double(), x.double())
        finally:
            torch.set_default_dtype(torch.float32)
        assert not torch.equal(plain, exact)

    def test_statistics_and_fake_tensors_around_it(self):
        t, c = of(loss)
        c(*given()), c(*given())
        with torch._subclasses.FakeTensorMode() as mode:
            fake = c(*map(mode.from_tensor, given()))
        assert fake.shape == (3,)
        same(c, t, *given())

    def test_threads(self):
        t, c = of(loss)
        wanted = [t(*given(k)) for k in range(8)]
        found = [None] * 8

        def work(k):
            for _ in range(4):
                found[k] = c(*given(k))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert_trees_close(found, wanted, EXACT)

    def test_closed_over_tensors_that_begin_to_want_gradients(self):
        held = torch.ones(3, dtype=torch.float64)
        t, c = of(lambda w, x: loss(w * held, x))
        c(*given()), c(*given())
        assert hits(c) == 1
        held.requires_grad_()
        assert quietly(c, *given()).requires_grad == t(*given()).requires_grad


@pytest.mark.quick
class TestErrors:
    def test_are_those_of_the_call(self):
        t, c = (wrap(invfunc.variance(lambda w, x, y: F.cross_entropy(x @ w, y))) for wrap in (lambda t: t, compiled))
        w, x = Numbers()(3, 5), Numbers(1)(4, 3)
        good, bad = torch.arange(4), torch.tensor([0, 1, 2, 9])
        same(c, t, w, x, good)
        same(c, t, w, x, good)
        for _ in range(2):
            with pytest.raises(IndexError, match="out of bounds"):
                c(w, x, bad)
            same(c, t, w, x, good)
        with pytest.raises(invfunc.errors.ArgumentTypeError, match=r"variance\(<lambda>\)\(w, x\): f takes"):
            c(w, x)

    def test_of_checks_of_numbers(self):
        """A loss that is convex at some outputs only."""
        t = invfunc.diag_ggn(lambda w, x: x @ w, lambda z, y: invfunc.outputs(z).pow(3).sum())
        c = compiled(t)
        w, x, y = torch.ones(3, 2), torch.ones(4, 3), torch.zeros(4)
        same(c, t, w, x, y)
        same(c, t, w, x, y)
        assert hits(c) == 1
        for call in (t, c):
            with pytest.raises(invfunc.errors.ConvexityError):
                call(w, -x, y)
        same(c, t, w, 2 * x, y)

    def test_of_singular_matrices(self):
        c = compiled(invfunc.variance(lambda w, x: (x @ torch.linalg.inv(w)).square().sum(1)))
        w, x = torch.eye(3) + 0.1, torch.ones(4, 3)
        c(w, x), c(w, x)
        assert hits(c) == 1
        with pytest.raises(torch.linalg.LinAlgError):
            c(torch.zeros(3, 3), x)


# Operations that draw random numbers: attention's kernels do where they leave something out

ATEN = torch.ops.aten
Q = torch.zeros(1, 1, 2, 4)
EFFICIENT, FLASH = (
    ATEN._scaled_dot_product_efficient_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
)
CALLS = {
    "by position": (EFFICIENT, (Q, Q, Q, None, True, 0.1), {}, True),
    "by position, nothing": (EFFICIENT, (Q, Q, Q, None, True, 0.0), {}, False),
    "by name": (FLASH, (Q, Q, Q), {"dropout_p": 0.1}, True),
    "by name, nothing": (FLASH, (Q, Q, Q), {"dropout_p": 0.0}, False),
    "left out": (FLASH, (Q, Q, Q), {"is_causal": True}, False),
    "a derivative": (ATEN._scaled_dot_product_efficient_attention_backward.default, (Q,) * 9 + (0.1,), {}, False),
    "dropout": (ATEN.native_dropout.default, (Q, 0.0, True), {}, True),
    "a generator that is not given": (ATEN.bernoulli.p, (Q, 0.5), {}, True),
    "a product": (ATEN.mm.default, (Q[0, 0], Q[0, 0].T), {}, False),
}


@pytest.mark.parametrize(("func", "args", "kwargs", "wanted"), CALLS.values(), ids=CALLS)
def test_what_draws(func, args, kwargs, wanted):
    assert draws(func, args, kwargs) is wanted


def test_of_strided_tensors_also_of_empty_ones():
    x = torch.arange(6).view(3, 2)
    assert numbers([x[:0, 0], x[::2, 0]]) == numbers([torch.tensor([0, 4])])
