"""Functions of any kind, many of them, in many threads: checkpointed they are what they are without."""

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
from torch.func import grad, vmap

from invfunc import ClosedOverError, additive_coupling, chain, invertible_checkpoint
from tests.invertible_same import assert_same, f, f_inv, g, gradients, leaves, squares
from tests.strategies import Numbers


@pytest.fixture
def same(dtype, device):
    return partial(assert_same, dtype, device)


class Exp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class TestFunctions:
    def test_that_are_autograd_functions(self, same):
        def forward(x, w):
            return x * Exp.apply(w) + Exp.apply(x.new_ones(3))

        def back(y, w):
            return (y - Exp.apply(y.new_ones(3))) / Exp.apply(w)

        def run(h, x, w):
            inside = vmap(grad(lambda w, x: squares(h(h(x, w), w))), (None, 0))(w.detach(), x.detach())
            return gradients(h(h(x, w), w), x, w), inside

        same(run, forward, invertible_checkpoint(forward, back))

    @pytest.mark.parametrize("inner", [g, invertible_checkpoint(f, None)], ids=["inverse", "checkpoint"])
    def test_that_are_checkpointed_inside(self, same, inner):
        def make(h):
            return lambda x, w: h(h(x, w).sinh(), w.sin())

        def back(y, w):
            return f_inv(f_inv(y, w.sin()).asinh(), w)

        def run(h, x, w):
            first = gradients(h(h(x * 0.1, w), w), x, w, create_graph=True)
            inside = grad(lambda w: squares(h(h(x.detach() * 0.1, w), w)))(w.detach())
            return first, gradients(first, w), inside

        same(run, make(f), invertible_checkpoint(make(inner), back), chain_of(make(inner)), rtol=1e-6)

    def test_that_read_tensors_of_outside(self, same):
        def run(wrap, x, w):
            return gradients(wrap(lambda x: f(x, w), lambda y: f_inv(y, w))(x), x, w)

        same(run, lambda f, f_inv: f, invertible_checkpoint)

    @pytest.mark.parametrize("of", ["level", "leaf"])
    def test_that_read_tensors_of_outside_in_torch_func(self, of):
        x, w = leaves()

        def loss(x, w):
            return squares(invertible_checkpoint(lambda x: f(x, w), lambda y: f_inv(y, w))(x))

        with pytest.raises(ClosedOverError, match="is no argument"):
            grad(loss, argnums=(0, 1) if of == "level" else 0)(x, w)
        with pytest.raises(ClosedOverError, match="is no argument"):
            vmap(grad(loss), (0, None))(x.detach(), w)

    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("when", [1, 2, 3])
    def test_that_fail_leave_nothing_behind(self, error, when):
        calls = []

        def failing(b, w):
            torch.rand(3)
            calls.append(1)
            if len(calls) == when:
                raise error
            return (b * w).tanh()

        def modes():
            return torch._C._len_torch_function_stack(), torch.is_grad_enabled(), torch.get_rng_state().tolist()

        h, (x, w) = invertible_checkpoint(additive_coupling(failing, failing)), leaves()
        before = modes()[:2]
        with pytest.raises(error):
            y = h((x * 1, x * 2), (w, w))
            drawn = modes()[2]
            gradients(y, w)
        assert modes()[:2] == before and (when < 3 or modes()[2] == drawn)
        assert_same(torch.float64, torch.device("cpu"), lambda h, x, w: gradients(h(x, w), x, w))
        if when == 3:
            found = gradients(y, x, w)  # at the second try
            wanted = additive_coupling(lambda b, w: (b * w).tanh(), lambda b, w: (b * w).tanh())
            for ours, plain in zip(found, gradients(wanted((x, x * 2), (w, w)), x, w), strict=True):
                torch.testing.assert_close(ours, plain)


def chain_of(h):
    return invertible_checkpoint(chain(h))


class TestManyBlocks:
    @pytest.mark.parametrize("inside", [False, True])
    def test_do_not_run_into_the_limit_of_recursion(self, same, inside):
        def run(h, x, w):
            def loss(w, x, first=False):
                y, seen = x.sin(), 0
                for i in range(500):
                    y = h(y, w / 500)
                    seen = y if i == 0 else seen
                return squares(seen if first else y)

            if inside:
                return grad(loss)(w.detach(), x.detach()), grad(partial(loss, first=True))(w.detach(), x.detach())
            return torch.autograd.grad(loss(w, x), (w, x)), torch.autograd.grad(loss(w, x, True), x)

        same(run, f, g)

    def test_walk_deep_for_a_partial_gradient(self, same):
        def run(h, x, w):
            first = h(x.sin(), w)
            y = first * 1
            del first
            last, ws = y, [(w / 1000).clone() for _ in range(500)]
            for v in ws:
                last = h(last, v)
            return torch.autograd.grad(squares(last), (ws[0], x))

        same(run, f, g)


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
        """Where each has a generator; the global one goes to whoever comes first."""

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


def test_blocks_are_freed_without_the_garbage_collector():
    def keep_alive(kind):
        h = invertible_checkpoint(
            lambda x, w: (x[0] * w.exp(), f(x[1], w)), lambda y, w: (y[0] / w.exp(), f_inv(y[1], w))
        )
        x, w = leaves()
        a, b = h((x * 1, x * 2), w)
        y = h((a, a) if kind == "twice" else (a, a.view(-1).view(2, 3)) if kind == "view" else (a, b), w)
        freed = weakref.ref(a.grad_fn.metadata["invfunc.slots"][0]())
        if kind == "grad":
            gradients(y, x, w)
        elif kind == "swapped":
            y = h((y[1], y[0]), w)
        elif kind == "graph":
            y = gradients(y, x, w, create_graph=True)
        return freed

    gc.collect()
    gc.disable()
    try:
        for kind in ("plain", "twice", "view", "grad", "swapped", "graph"):
            assert keep_alive(kind)() is None, kind
    finally:
        gc.enable()
