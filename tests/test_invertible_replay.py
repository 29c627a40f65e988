"""What is evaluated again: random numbers, autocast, state, and arguments that have been written since."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacrev, vjp, vmap

from invfunc import InvFuncError, ModifiedError, ReplayError, additive_coupling, invertible_checkpoint
from tests.invertible_same import assert_same, f, f_inv, g, gradients, leaves, squares


@pytest.fixture
def same(dtype, device):
    return partial(assert_same, dtype, device)


def masked(b):
    return F.dropout(b.sin(), 0.5) + b.cos() * torch.rand_like(b)


def drawn(x, w):
    return x * w.exp() + torch.rand_like(x) * w.tanh() * w


def undrawn(y, w):
    return (y - torch.rand_like(y) * w.tanh() * w) * (-w).exp()


def counted(x, w, generator):
    return x * w.exp() + torch.rand(3, generator=generator, dtype=x.dtype) * w.tanh() * w


def uncounted(y, w, generator):
    return (y - torch.rand(3, generator=generator, dtype=y.dtype) * w.tanh() * w) * (-w).exp()


COUPLING = additive_coupling(masked, masked)
PAIRS = {
    "coupling": (COUPLING, invertible_checkpoint(COUPLING), lambda h, x, w: h(h((x * w, x)))),
    "generic": (drawn, invertible_checkpoint(drawn, undrawn), lambda h, x, w: h(h(x, w), w)),
    "kept": (drawn, invertible_checkpoint(drawn, undrawn, keep=True), lambda h, x, w: h(h(x, w), w)),
    "no inverse": (drawn, invertible_checkpoint(drawn, None), lambda h, x, w: h(h(x, w), w)),
}


def double(loss, w):
    return grad(lambda w: grad(loss)(w).square().sum())(w)


def each(randomness):
    return lambda loss, w: vmap(grad(loss), randomness=randomness)(torch.stack([w, w.sin()]))


def whole(randomness):
    return lambda loss, w: grad(lambda w: vmap(loss, randomness=randomness)(torch.stack([w, w.cos()])).sum())(w)


TRANSFORMS = {
    "grad": lambda loss, w: grad(loss)(w),
    "grad of grad": double,
    "jacrev": lambda loss, w: jacrev(lambda w: torch.stack([loss(w), loss(w.sin())]))(w),
    "vmap(grad), different": each("different"),
    "vmap(grad), same": each("same"),
    "grad(vmap), different": whole("different"),
    "grad(vmap), same": whole("same"),
}


@pytest.mark.parametrize(("plain", "h", "call"), PAIRS.values(), ids=PAIRS)
class TestRandomNumbers:
    def test_are_drawn_once(self, same, plain, h, call):
        """The gradients are those of the same masks, and the generator goes on from where f left it."""

        def run(h, x, w):
            y = call(h, x, w)
            after = torch.get_rng_state()
            torch.rand(3)
            during = torch.get_rng_state()
            found = gradients(y, x, w, create_graph=True)
            found += gradients(found, x, w, retain_graph=True) + gradients(y, x, w)
            assert torch.equal(torch.get_rng_state(), during)
            return found, after

        same(run, plain, h)

    @pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
    def test_inside_of_torch_func(self, same, plain, h, call, transform):
        def run(h, x, w):
            return transform(lambda w: squares(call(h, x.detach(), w)), w.detach()), torch.get_rng_state()

        same(run, plain, h)

    def test_are_the_users_again_after_an_error_in_backward(self, plain, h, call):
        x, w = leaves()
        y, before = call(h, x * 1, w), torch.get_rng_state()
        x.register_hook(lambda gradient: [][0])
        with pytest.raises(IndexError):
            gradients(y, x)
        assert torch.equal(torch.get_rng_state(), before)


class TestGenerators:
    @pytest.mark.parametrize("by_name", [True, False])
    def test_that_are_arguments(self, same, by_name):
        h = invertible_checkpoint(counted, uncounted)

        def call(h, x, w, generator):
            return h(x, w, generator=generator) if by_name else h(x, w, generator)

        def run(h, x, w):
            generator = torch.Generator().manual_seed(3)
            y = call(h, call(h, x, w, generator), w, generator)
            found = gradients(y, x, w, retain_graph=True), gradients(y, x, w)
            inside = grad(lambda w: squares(call(h, call(h, x.detach(), w, generator), w, generator)))(w.detach())
            return found, inside, generator.get_state(), torch.get_rng_state()

        same(run, counted, h, invertible_checkpoint(counted, None))

    def test_that_are_closed_over_are_replayed_or_refused(self, same):
        for call in (lambda h, x, w: h((x * w, x)), lambda h, x, w: h(h((x * w, x)))):

            def run(wrap, x, w, call=call):
                generator = torch.Generator().manual_seed(0)
                draw = partial(torch.rand, 2, 3, generator=generator, dtype=x.dtype)
                pair = additive_coupling(lambda b: b.tanh() * draw() * b, lambda b: b.sin() * draw() * b)
                return gradients(call(wrap(pair), x, w), x, w)

            same_or_refused(same, run, lambda pair: pair, invertible_checkpoint, why="enerator")


class TestTransformsOfTheGradient:
    """What is vmapped after forward has drawn gets the numbers that it drew."""

    @pytest.mark.parametrize("randomness", ["error", "same", "different"])
    @pytest.mark.parametrize(("plain", "h", "call"), PAIRS.values(), ids=PAIRS)
    def test_of_a_pulled_back_batch(self, same, plain, h, call, randomness):
        def run(h, x, w):
            _, pull = vjp(lambda w: call(h, x.detach(), w), w.detach())
            batch = torch.stack([x, x.sin()]).detach()
            return vmap(pull, randomness=randomness)((batch, batch.cos()) if h in PAIRS["coupling"] else batch)

        same(run, plain, h)

    @pytest.mark.parametrize(("plain", "h", "call"), PAIRS.values(), ids=PAIRS)
    def test_of_batched_gradients(self, same, plain, h, call):
        def run(h, x, w):
            y = call(h, x, w)
            batch = torch.stack([x, x.sin()]).detach()
            return torch.autograd.grad(y[0] if h in PAIRS["coupling"] else y, (x, w), batch, is_grads_batched=True)

        same(run, plain, h)


def test_without_preserving_the_state_an_f_that_draws_nothing_is_the_same(same):
    h = invertible_checkpoint(f, f_inv, preserve_rng_state=False)

    def run(h, x, w):
        y = h(h(x, w), w)
        before = torch.get_rng_state()
        found = gradients(y, x, w)
        assert torch.equal(torch.get_rng_state(), before)
        return found

    same(run, f, h)


def test_without_preserving_the_state_an_f_that_draws_draws_again():
    def moves(preserve):
        h = invertible_checkpoint(drawn, None, preserve_rng_state=preserve)
        x, w = leaves()
        y, before = h(x, w), torch.get_rng_state()
        gradients(y, x, w)
        return not torch.equal(torch.get_rng_state(), before)

    assert (moves(False), moves(True)) == (True, False)


class TestState:
    NORMS = {
        "batch norm": lambda: nn.BatchNorm1d(3),
        "without tracking": lambda: nn.BatchNorm1d(3, track_running_stats=False),
        "in eval mode": lambda: nn.BatchNorm1d(3).eval(),
        "instance norm": lambda: nn.Sequential(nn.Unflatten(0, (2, 3)), nn.InstanceNorm1d(3, track_running_stats=True)),
        "frozen": lambda: nn.BatchNorm1d(3).requires_grad_(False),
    }

    @pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
    @pytest.mark.parametrize("options", [{}, {"keep": True}, {"check": True}], ids=str)
    def test_running_statistics_are_updated_once(self, same, make, options):
        def run(wrap, x, w):
            norm = make().to(x)
            pair = additive_coupling(lambda b: norm(b).view(6, 3).tanh(), lambda a: norm(a).view(6, 3).sin())
            y = wrap(pair)(wrap(pair)((torch.cat([x, x.sin(), x * w]), torch.cat([x * x, x.cos(), x + w]))))
            state = [b.clone() for b in norm.buffers()]
            first = gradients(y, x, w, *(p for p in norm.parameters() if p.requires_grad), create_graph=True)
            return first, gradients(first, x, w), state, list(norm.buffers())

        same(run, lambda pair: pair, partial(invertible_checkpoint, **options))

    def test_running_statistics_that_are_arguments_are_refused(self):
        def part(b, p):
            return F.batch_norm(b, *p, training=True)

        state = (torch.zeros(3).double(), torch.ones(3).double())
        x = leaves()[0]
        with pytest.raises(ReplayError, match="writes into a further argument"):
            invertible_checkpoint(additive_coupling(part, part))((x, x), (state, state))

    def test_state_that_is_read_and_written_is_refused(self):
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).double()
        average = nn.BatchNorm1d(3, momentum=None).double()
        count = torch.zeros(3, dtype=torch.float64)
        x, w = leaves()
        for part in (spectral, average, lambda b: b * count.add_(1), lambda b: (b * count, count.mul_(2))[0]):
            with pytest.raises(ReplayError, match="reads and writes a tensor of shape"):
                invertible_checkpoint(additive_coupling(lambda b, m=part: m(b), lambda b: b.sin()))((x, x * w))

    def test_written_arguments_are_refused(self):
        x, w = leaves()
        for change, which in [
            (lambda x, w: x.mul_(2), "x"),
            (lambda x, w: x.view(-1)[1:].zero_(), "x"),
            (lambda x, w: w.add_(1), "a further argument"),
            (lambda x, w: w.__setitem__(0, 1.0), "a further argument"),
        ]:

            def writes(x, w, change=change):
                change(x, w)
                return f(x, w)

            for h in (invertible_checkpoint(writes, f_inv), invertible_checkpoint(writes, None)):
                with pytest.raises(ReplayError, match=f"writes into {which} "):
                    h(x * 1, w * 1)

    def test_an_inverse_that_writes_is_refused_or_harmless(self, same):
        for write in (
            lambda y, w: y.sub_(w.tanh()).mul_((-w).exp()),
            lambda y, w: (y - w.tanh()) * w.neg_().exp(),
            lambda y, w: (y.view(-1).mul_(2), f_inv(y / 2, w))[1],
        ):

            def run(h, x, w, write=write):
                y, value, v = h(x * 1, w), h(x * 1, w).detach(), w.detach().clone()
                found = gradients(y.sin(), x, w, retain_graph=True), gradients(y.sin(), x, w)
                assert torch.equal(y, value) and torch.equal(w, v)
                return found

            same_or_refused(same, run, f, invertible_checkpoint(f, write), why="the inverse writes")


def same_or_refused(same, run, *functions, why="modified"):
    """A number is the right one; an error says why."""
    try:
        same(run, *functions)
    except InvFuncError as error:
        assert why in str(error)


def closed(f, w):
    return lambda x, unused: f(x, w)


class TestWrittenSince:
    """Parameters that are written between forward and backward: an error, never a number of the new ones."""

    @pytest.mark.parametrize("where", ["argument", "closed over", "shared", "of a dropped block", "kept"])
    @pytest.mark.parametrize("partial", [False, True], ids=["at once", "after a partial gradient"])
    def test_is_an_error(self, where, partial):
        x, w = leaves()
        h, args = g, (w,)
        if where == "closed over":
            h, args = invertible_checkpoint(closed(f, w), closed(f_inv, w)), (None,)
        elif where == "kept":
            h = invertible_checkpoint(f, None)
        elif where == "shared":
            coupling = additive_coupling(lambda b, p: (b * p).tanh(), lambda a, q: (a * q).sin())
            h, args = invertible_checkpoint(coupling), ((w, w),)
        y = h((x * 1, x * 2) if where == "shared" else x * 1, *args)
        if where == "of a dropped block":
            h(y, *args)
        s = squares(y)
        del y
        if partial:
            torch.autograd.grad(s, w, retain_graph=True)
        with torch.no_grad():
            w.mul_(3)
        with pytest.raises((ModifiedError, RuntimeError), match="modified by an inplace operation"):
            torch.autograd.grad(s, (x, w))

    @pytest.mark.parametrize("is_argument", [True, False])
    def test_data_that_takes_the_place_of_a_parameters(self, same, is_argument):
        """As `vector_to_parameters` does: the version stays as it is."""

        def run(wrap, x, w):
            h, args = (wrap(f, f_inv), (w,)) if is_argument else (wrap(closed(f, w), closed(f_inv, w)), (None,))
            s = squares(h(x * 1, *args))
            w.data = w.data * 3
            return torch.autograd.grad(s, (x, w))

        same_or_refused(same, run, lambda f, f_inv: f, invertible_checkpoint)

    @pytest.mark.parametrize("write", [lambda y: y.add_(1), lambda y: y[0].zero_(), lambda y: y.detach().mul_(2)])
    @pytest.mark.parametrize("inside", [False, True])
    def test_outputs_that_are_written_before_the_next_block(self, same, write, inside):
        """Without a gradient, so that the graph stays as it is; also inside of torch.func."""

        def run(h, x, w):
            if inside:
                return grad(lambda w: squares(self.twice(h, x.detach(), w, write)))(w.detach())
            return gradients(self.twice(h, x * 1, w, write), w)

        same_or_refused(same, run)

    @staticmethod
    def twice(h, x, w, write):
        y = h(x, w)
        with torch.no_grad():
            write(y)
        return h(y, w)
