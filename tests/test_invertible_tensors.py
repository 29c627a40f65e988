"""Tensors of any kind, in any tree, from any thread: what comes out and its gradients are those of f."""

import copy
import gc
import io
import pickle
import threading
import weakref
from collections import namedtuple
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from invfunc import ClosedOverError, additive_coupling, chain, invertible_checkpoint, tree
from tests.invertible_same import assert_same, f, f_inv, g, gradients, leaves, squares
from tests.strategies import Numbers


@pytest.fixture
def same(dtype, device):
    return partial(assert_same, dtype, device)


Pair = namedtuple("Pair", ["left", "right"])
LEAVES = {
    "computed": lambda x: x.sin(),
    "leaf": lambda x: x,
    "data": lambda x: x.detach().cos(),
    "integers": lambda x: torch.arange(4, device=x.device),
    "bool": lambda x: x.detach() > 0,
    "transposed": lambda x: x.T,
    "expanded": lambda x: x.sum(0, keepdim=True).expand(4, 3),
    "strided": lambda x: x[:, ::2],
    "view of a view": lambda x: x.view(-1)[1:5].view(2, 2),
    "0-dim": lambda x: x.sum(),
    "empty": lambda x: x[:0],
    "complex": lambda x: torch.complex(x, x.cos()),
    "conjugate": lambda x: torch.complex(x, x.cos()).conj(),
    "half": lambda x: x.to(torch.float16),
    "bfloat16": lambda x: x.to(torch.bfloat16),
    "float32": lambda x: x.float(),
}
CONTAINERS = {
    "tuple": tuple,
    "list": list,
    "dict": lambda parts: {f"part {i}": t for i, t in enumerate(parts)},
    "nested": lambda parts: {"some": (parts[0], [None, "text", 3]), "others": [{"more": t} for t in parts[1:]]},
    "namedtuple": lambda parts: Pair(parts[0], tuple(parts[1:])),
}


def number(t):
    return t.is_floating_point() or t.is_complex()


def scaled(x, w):
    """Powers of two, so that half precision comes back too."""
    return tree.map_tensors(lambda t: t * 2 * w.new_ones(()).to(t.dtype) * one(w, t) if number(t) else t, x)


def unscaled(y, w):
    return tree.map_tensors(lambda t: t / 2 / w.new_ones(()).to(t.dtype) / one(w, t) if number(t) else t, y)


def one(w, t):
    """1, which has the gradient of w."""
    return (w.sum() - w.sum().detach()).to(t.dtype) + 1


def total(y):
    return sum(
        (t.abs().square() if t.is_complex() else t.square()).sum().double() for t in tree.tensors(y) if number(t)
    )


STATES = st.tuples(
    st.sampled_from(list(CONTAINERS)), st.lists(st.sampled_from(list(LEAVES)), min_size=1, max_size=4), st.booleans()
)


class TestStates:
    @given(drawn=STATES)
    def test_of_any_tensors_in_any_tree(self, dtype, device, drawn):
        container, kinds, is_inside = drawn

        def run(h, x, w):
            def loss(w, x):
                y = CONTAINERS[container]([LEAVES[kind](x) for kind in kinds])
                structure = tree.flatten(y)[1]
                for _ in range(3):
                    y = h(y, w)
                assert tree.flatten(y)[1] == structure
                return total(y)

            if is_inside:
                return grad(loss, argnums=(0, 1))(w.detach(), x.detach())
            y = loss(w, x)
            found = torch.autograd.grad(y, (w, x), allow_unused=True) if y.requires_grad else (None, None)
            return [torch.zeros(()) if t is None else t for t in found]

        pair = invertible_checkpoint(scaled, unscaled)
        assert_same(dtype, device, run, scaled, pair, invertible_checkpoint(scaled, unscaled, keep=(), check=True))

    @pytest.mark.parametrize("kind", LEAVES)
    def test_of_one_tensor_under_vmap(self, same, kind):
        def run(h, x, w):
            batch = torch.stack([LEAVES[kind](x).detach()] * 2)
            return vmap(grad(lambda w, t: total(h(h(t, w), w)) + w.sum().double()), (None, 0))(w.detach(), batch)

        same(run, scaled, invertible_checkpoint(scaled, unscaled))

    def test_of_the_same_tensor_twice(self, same):
        def both(x, w):
            return x[0] * w.exp(), x[1] * w.cosh()

        def back(y, w):
            return y[0] * (-w).exp(), y[1] / w.cosh()

        def run(h, x, w):
            t = h((x.sin(), x), w)[0]
            return gradients(h((t, t), w), x, w), grad(lambda x: squares(h((x, x), w.detach())))(x.detach())

        same(run, both, invertible_checkpoint(both, back))

    def test_that_pass_through(self, same):
        """As they are, in another place, or as a view."""

        def swap(x, w):
            return x[1], x[0].view(-1), x[2] * w.exp()

        def back(y, w):
            return y[1].view(2, 3), y[0], y[2] * (-w).exp()

        def run(h, x, w):
            def twice(x, w):
                y = h((x.sin(), x, x * w), w)
                return h((y[0], y[1].view(2, 3), y[2]), w)

            assert (h((x, w, w), w)[0]) is w
            inside = grad(lambda w: squares(twice(x.detach(), w)))(w.detach())
            return gradients(twice(x, w), x, w), inside

        same(run, swap, invertible_checkpoint(swap, back))

    def test_that_f_gives_back_itself(self, same):
        def run(h, x, w):
            y = h(h(x * w))
            return gradients(y * x, x, w), grad(lambda w: squares(h(h(x.detach() * w)) * w))(w.detach())

        same(run, lambda x: x, invertible_checkpoint(lambda x: x, lambda y: y))

    def test_whose_outputs_are_used_twice_or_never(self, same):
        coupling = additive_coupling(lambda b, p: (b * p).tanh(), lambda a, q: (a * q).sin())

        def run(h, x, w):
            a, b = h((x, x * w), (w, w))
            h((a, b), (w, w))
            h((b, a), (w, w))
            c, _ = h((a, a * b), (w, w))
            del b
            return gradients((a * c, c), x, w)

        same(run, coupling, invertible_checkpoint(coupling))

    @pytest.mark.parametrize("needs", [(True, False), (False, True), (False, False)], ids=str)
    def test_of_which_some_need_no_gradient(self, same, needs):
        def run(h, x, w):
            x, w = x.requires_grad_(needs[0]), w.requires_grad_(needs[1])
            y = h(h(x, w), w)
            assert y.requires_grad == any(needs)
            return gradients(y, *(t for t in (x, w) if t.requires_grad)) if any(needs) else y

        same(run)

    def test_in_inference_mode_then_trained(self, same):
        def run(h, x, w):
            with torch.inference_mode():
                data = h(x, w)
            return gradients(h(data.clone(), w), w)

        same(run)


class TestOutputs:
    @pytest.mark.parametrize("inside", [False, True])
    def test_copy_pickle_and_save_as_plain_tensors(self, inside):
        x, w = leaves()
        plain = []
        for h in (f, g):
            y = vmap(h, (0, None))(x, w) if inside else h(x, w)
            plain.append(y.detach())
            file = io.BytesIO()
            torch.save({"y": y, "x": x}, file)
            for copied in (
                copy.deepcopy(y.detach()),
                pickle.loads(pickle.dumps(y)),
                torch.load(io.BytesIO(file.getvalue()), weights_only=True)["y"],
            ):
                assert type(copied) is torch.Tensor and copied.__dict__ == {} and torch.equal(copied, y)
            assert copy.deepcopy(x).requires_grad and x.__dict__ == w.__dict__ == {}
        assert torch.equal(*plain)

    def test_hooks_are_called_once(self, same):
        def run(h, x, w):
            seen = []
            t = x.sin()
            t.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
            y = h(t, w)
            y.retain_grad()
            y.register_hook(lambda gradient: seen.append(gradient))
            w.register_hook(lambda gradient: seen.append(gradient) or 3 * gradient)
            squares(h(y, w)).backward()
            assert len(seen) == 3
            return seen, y.grad, x.grad, w.grad

        same(run)

    @pytest.mark.parametrize("around", ["forward", "backward", "both"])
    def test_inside_of_other_hooks(self, same, around):
        def run(h, x, w):
            t = x.sin()
            with torch.autograd.graph.save_on_cpu() if around != "backward" else torch.enable_grad():
                y = h(h(t, w), w)
            with torch.autograd.graph.save_on_cpu() if around != "forward" else torch.enable_grad():
                return gradients(y, x, w, create_graph=True)

        same(run)


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
        def own(seed):
            masks = []

            def drawn(x, w):
                mask = torch.rand(x.shape, dtype=x.dtype) < 0.5
                masks.append(mask)
                return x + mask * (x * w).tanh()

            h = invertible_checkpoint(drawn, None)
            wrong = 0
            for _ in range(40):
                x, w = Numbers(seed)(60, 60).requires_grad_(), Numbers(1)(60).requires_grad_()
                masks.clear()
                y = h(h(x, w), w)
                t = x
                for mask in masks[:2]:
                    t = t + mask * (t * w).tanh()
                ours, plain = gradients(y, w)[0], gradients(t, w)[0]
                wrong += not torch.allclose(ours, plain)
            return wrong

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
