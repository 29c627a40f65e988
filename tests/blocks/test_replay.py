"""A second evaluation draws the same random numbers."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.func import grad, jacrev, vjp, vmap

from invfunc import additive_coupling, invertible_checkpoint, tree
from invfunc.errors import InverseError
from tests.invertible_cases import gradients, leaves, squares
from tests.strategies import Numbers


def masked(b):
    return F.dropout(b.sin(), 0.5) + b.cos() * torch.rand_like(b)


def drawn(x, w):
    return x * w.exp() + torch.rand_like(x) * w.tanh() * w


def undrawn(y, w):
    return (y - torch.rand_like(y) * w.tanh() * w) * (-w).exp()


def counted(x, w, generator):
    return x * w.exp() + torch.rand(3, generator=generator, dtype=x.dtype, device=x.device) * w.tanh() * w


def uncounted(y, w, generator):
    return (y - torch.rand(3, generator=generator, dtype=y.dtype, device=y.device) * w.tanh() * w) * (-w).exp()


COUPLING = additive_coupling(masked, masked)
PAIRS = {
    "coupling": (COUPLING, invertible_checkpoint(COUPLING), lambda h, x, w: h(h((x * w, x)))),
    "generic": (drawn, invertible_checkpoint(drawn, undrawn), lambda h, x, w: h(h(x, w), w)),
    "kept": (drawn, invertible_checkpoint(drawn, undrawn, keep=True), lambda h, x, w: h(h(x, w), w)),
    "no inverse": (drawn, invertible_checkpoint(drawn, None), lambda h, x, w: h(h(x, w), w)),
}


def cotangents(y):
    """Two of them."""
    return torch.stack([y, y.sin()]).detach()


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


def or_error(same, device, *given):
    """As `same`; on a device, where vmap has dropout draw other numbers than without it, or an error that says so."""
    try:
        same(*given)
    except InverseError:
        assert device.type != "cpu"


@pytest.mark.quick
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
    def test_inside_of_torch_func(self, same, plain, h, call, transform, device):
        def run(h, x, w):
            return transform(lambda w: squares(call(h, x.detach(), w)), w.detach()), torch.get_rng_state()

        or_error(same, device, run, plain, h)

    def test_are_the_users_again_after_an_error_in_backward(self, plain, h, call):
        x, w = leaves()
        y, before = call(h, x * 1, w), torch.get_rng_state()
        x.register_hook(lambda gradient: [][0])
        with pytest.raises(IndexError):
            gradients(y, x)
        assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.quick
class TestGenerators:
    @pytest.mark.parametrize("by_name", [True, False])
    def test_that_are_arguments(self, same, by_name):
        h = invertible_checkpoint(counted, uncounted)

        def call(h, x, w, generator):
            return h(x, w, generator=generator) if by_name else h(x, w, generator)

        def run(h, x, w):
            generator = torch.Generator(x.device).manual_seed(3)
            y = call(h, call(h, x, w, generator), w, generator)
            found = gradients(y, x, w, retain_graph=True), gradients(y, x, w)
            inside = grad(lambda w: squares(call(h, call(h, x.detach(), w, generator), w, generator)))(w.detach())
            return found, inside, generator.get_state(), torch.get_rng_state()

        same(run, counted, h, invertible_checkpoint(counted, None))

    def test_that_are_closed_over_are_replayed(self, same):
        for call in (lambda h, x, w: h((x * w, x)), lambda h, x, w: h(h((x * w, x)))):

            def run(wrap, x, w, call=call):
                generator = torch.Generator(x.device).manual_seed(0)
                draw = partial(torch.rand, 2, 3, generator=generator, dtype=x.dtype, device=x.device)
                pair = additive_coupling(lambda b: b.tanh() * draw() * b, lambda b: b.sin() * draw() * b)
                return gradients(call(wrap(pair), x, w), x, w)

            same(run, lambda pair: pair, invertible_checkpoint)


@pytest.mark.quick
class TestTransformsOfTheGradient:
    """A gradient that is vmapped after the forward pass uses the numbers that the forward pass drew."""

    @pytest.mark.parametrize("randomness", ["error", "same", "different"])
    @pytest.mark.parametrize(("plain", "h", "call"), PAIRS.values(), ids=PAIRS)
    def test_of_a_pulled_back_batch(self, same, plain, h, call, randomness, device):
        def run(h, x, w):
            y, pull = vjp(lambda w: call(h, x.detach(), w), w.detach())
            return vmap(pull, randomness=randomness)(tree.map_leaves(cotangents, y))

        or_error(same, device, run, plain, h)

    @pytest.mark.parametrize(("plain", "h", "call"), PAIRS.values(), ids=PAIRS)
    def test_of_batched_gradients(self, same, plain, h, call):
        def run(h, x, w):
            y = tree.leaves(call(h, x, w))
            return torch.autograd.grad(y, (x, w), [*map(cotangents, y)], is_grads_batched=True)

        same(run, plain, h)


@pytest.mark.quick
def test_without_preserving_the_state_an_f_that_draws_draws_again():
    def moves(preserve):
        h = invertible_checkpoint(drawn, None, preserve_rng_state=preserve, check="off")
        x, w = leaves()
        y, before = h(x, w), torch.get_rng_state()
        gradients(y, x, w)
        return not torch.equal(torch.get_rng_state(), before)

    assert (moves(False), moves(True)) == (True, False)


@pytest.mark.quick
def test_fake_tensors_go_through():
    """Memory estimators run whole steps on them; nothing is drawn."""
    before = torch.get_rng_state()
    with FakeTensorMode():
        layer, x = nn.Linear(3, 3), torch.empty(2, 3, requires_grad=True)
        block = invertible_checkpoint(additive_coupling(lambda b: F.dropout(layer(b)).tanh(), lambda a: layer(a).sin()))
        gradients(block(block((x * 1, x * 2))), x, layer.weight)
    assert torch.equal(torch.get_rng_state(), before)


# Graphs that are made and run backwards in several threads.


def in_threads(*runs):
    """The results of functions that run at the same time."""
    results, barrier = {}, threading.Barrier(len(runs))

    def one(i, run):
        barrier.wait()
        try:
            results[i] = run()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=one, args=item) for item in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return [results[i] for i in range(len(runs))]


class TestThreads:
    def test_forward_in_one_and_backward_in_another(self, same):
        def run(h, x, w):
            (y,) = in_threads(lambda: h(h(x, w), w))
            return in_threads(lambda: gradients(y, x, w))

        same(run)

    def test_each_with_its_own_graph(self, same):
        def run(h, x, w):
            def own():
                return [gradients(h(h(x.sin(), w), w), x, w) for _ in range(20)]

            return in_threads(own, own, own)

        same(run)

    def test_all_with_one_graph(self, same):
        def run(h, x, w):
            y = h(h(h(x.sin(), w), w), w)
            return in_threads(*[lambda: [gradients(y, x, w, retain_graph=True) for _ in range(20)]] * 3)

        same(run)

    def test_random_numbers_of_one_are_not_those_of_another(self):
        """Each thread has its own generator; the global one goes to the thread that comes first."""

        def drawn(x, w, generator):
            return x + (torch.rand(x.shape, generator=generator, dtype=x.dtype) < 0.5) * (x * w).tanh()

        h = invertible_checkpoint(drawn, None)

        def own(seed):
            x, w = Numbers(seed)(50, 50).requires_grad_(), Numbers(1)(50).requires_grad_()
            found = []
            for call in (h, drawn):
                generator = torch.Generator().manual_seed(seed)
                found.append([gradients(call(call(x, w, generator), w, generator), w)[0] for _ in range(20)])
            return sum(not torch.allclose(ours, plain) for ours, plain in zip(*found, strict=True))

        assert in_threads(*(partial(own, i) for i in range(3))) == [0, 0, 0]
