"""Graphs that are made and run backwards in several threads."""

import threading
from functools import partial

import torch

from invfunc import invertible_checkpoint
from tests.invertible_same import gradients
from tests.strategies import Numbers


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
