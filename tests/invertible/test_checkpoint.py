"""Functions of any kind, and many of them: checkpointed they are what they are without."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacrev, vmap
from torch.utils.checkpoint import checkpoint

from invfunc import ClosedOverError, ReplayError, additive_coupling, chain, invertible_checkpoint, leapfrog, momentum
from invfunc.testing import assert_trees_close
from tests.invertible_same import assert_same, f, f_inv, g, gradients, leaves, squares


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


class Old(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


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

    DIFFERENTIATING = {
        "grad": grad(lambda b, w: (w * b.cos()).sum()),
        "vmap of grad": lambda b, w: vmap(grad(lambda r: (r * w).sin().sum()))(b),
        "jacrev": lambda b, w: b * jacrev(lambda r: (r * w).sin())(b[0]).diagonal(),
        "dropout": grad(lambda b, w: (F.dropout(b, 0.5) * w).sin().sum()),
    }

    @pytest.mark.parametrize("force", DIFFERENTIATING.values(), ids=DIFFERENTIATING)
    @pytest.mark.parametrize("make", [lambda force: leapfrog(force, 0.1), lambda force: momentum(force, 0.5)])
    def test_that_use_torch_func_themselves(self, same, force, make):
        pair = make(force)

        def run(h, x, w):
            first = gradients(h(h((x, x.sin()), w), w), x, w, create_graph=True)
            state = x.detach(), x.detach().cos()
            return first, gradients(first, x, w), grad(lambda w: squares(h(h(state, w), w)))(w.detach())

        same(run, pair, invertible_checkpoint(pair))

    @pytest.mark.parametrize("first", [True, False])
    def test_that_use_torch_func_beside_hooks_of_tensors_have_first_derivatives_only(self, first):
        """The second ones lacked the hook."""
        weight, x = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64, requires_grad=True)

        def hooked(b):
            h = b @ weight
            if h.requires_grad:
                h.register_hook(lambda g: g / 2)
            return h.tanh()

        def force(b):
            return grad(lambda c: c.sin().square().sum())(b)

        parts = [force, hooked] if first else [hooked, force]

        def slopes(blocks, create_graph):
            y = (x * 1, x * 2)
            for block in blocks:
                y = block(y)
            found = torch.autograd.grad(squares(y), x, create_graph=create_graph)
            return torch.autograd.grad(squares(found), x)[0] if create_graph else found[0]

        pair, apart = additive_coupling(*parts), [additive_coupling(p, torch.zeros_like) for p in parts]
        torch.testing.assert_close(slopes([invertible_checkpoint(pair)], False), slopes([pair], False))
        with pytest.raises(ReplayError, match="a block of its own"):
            slopes([invertible_checkpoint(pair)], True)
        torch.testing.assert_close(slopes(map(invertible_checkpoint, apart), True), slopes(apart, True))

    @pytest.mark.parametrize("kind", ["checkpoint", "function", "backward hook"])
    @pytest.mark.parametrize("first", [True, False])
    def test_that_use_torch_func_beside_what_it_refuses_are_told(self, same, kind, first):
        """A checkpoint gave its tensors back in another order: wrong gradients where they are of the same shape."""
        layer = nn.Linear(3, 3).double()
        if kind == "backward hook":
            layer.register_full_backward_hook(lambda module, of_inputs, of_outputs: None)

        def part(b):
            return checkpoint(layer, b, use_reentrant=False) if kind == "checkpoint" else layer(b)

        def other(b):
            return Old.apply(part(b)) if kind == "function" else part(b).tanh()

        def force(b):
            return grad(lambda c: c.sin().square().sum())(b)

        x = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
        pairs = [force, other] if first else [other, force]
        together = invertible_checkpoint(additive_coupling(*pairs))
        with pytest.raises(ReplayError, match="blocks of their own"):
            gradients(together((x * 1, x * 2)), x)

        def run(wrap):
            blocks = [wrap(additive_coupling(p, torch.zeros_like)) for p in pairs]
            a, b = blocks[0]((x * 1, x * 2))
            return gradients(blocks[1]((b, a)), x, *layer.parameters())

        assert_trees_close(run(invertible_checkpoint), run(lambda pair: pair), rtol=1e-9)

    def test_that_differentiate_by_autograd_are_told_to_use_torch_func(self):
        def force(b):
            with torch.enable_grad():
                b = b if b.requires_grad else b.detach().requires_grad_()
                return torch.autograd.grad(b.sin().sum(), b, create_graph=True)[0]

        x, _ = leaves()
        with pytest.raises(ReplayError, match="within itself by torch.autograd; let it use torch.func"):
            gradients(invertible_checkpoint(leapfrog(force, 0.1))((x * 1, x * 2)), x)

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("where", ["around", "inside", "around g and inside of f"])
    def test_beside_torchs_checkpoint(self, same, reentrant, where):
        torchs = partial(checkpoint, use_reentrant=reentrant)
        inner = invertible_checkpoint(partial(torchs, f) if "inside" in where else f, f_inv)

        def run(h, x, w):
            call = partial(torchs, h) if h is inner and "around" in where else h
            squares(call(call(x * 1, w), w)).backward()
            return x.grad, w.grad

        same(run, f, inner)

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

        same(run, make(f), invertible_checkpoint(make(inner), back), lambda x, w: chain(make(inner))(x, [w]), rtol=1e-5)

    def test_that_read_tensors_of_outside(self, same):
        def run(wrap, x, w):
            return gradients(wrap(lambda x: f(x, w), lambda y: f_inv(y, w))(x), x, w)

        same(run, lambda f, f_inv: f, invertible_checkpoint)

    @pytest.mark.parametrize("of", ["level", "leaf"])
    def test_that_read_tensors_of_outside_in_torch_func(self, of):
        """They are made arguments."""
        x, w = leaves()
        found = []
        for wrap in (lambda f, f_inv: f, invertible_checkpoint):

            def loss(x, w, wrap=wrap):
                return squares(wrap(lambda x: f(x, w), lambda y: f_inv(y, w))(x))

            each = grad(loss, argnums=(0, 1) if of == "level" else 0)(x, w)
            in_w = gradients(each, w)
            found.append((each, in_w, vmap(grad(loss), (0, None))(x.detach(), w)))
        assert_trees_close(found[1], found[0], 1e-9)

    def test_that_read_another_tensor_each_time_in_torch_func(self):
        x, w = leaves()
        weights = iter([w, w + 1, w + 2, w + 3])
        with pytest.raises(ClosedOverError, match="is not an argument"):
            grad(lambda x: squares(invertible_checkpoint(lambda x: x * next(weights), None)(x)))(x)

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


class TestTraining:
    def test_in_five_steps(self, same):
        def run(h, x, w):
            optimizer = torch.optim.SGD([x, w], 1e-2, momentum=0.9)
            for _ in range(5):
                optimizer.zero_grad()
                squares(h(h(x, w), w)).backward()
                optimizer.step()
            return x.detach(), w.detach()

        same(run)

    def test_with_a_step_inside_of_the_backward_pass(self, same):
        """Each parameter is written as soon as its gradient is there."""

        def run(h, x, w):
            ws = [(w * i / 3).detach().requires_grad_() for i in range(4)]

            def step(p):
                with torch.no_grad():
                    p.add_(p.grad, alpha=-1e-3)
                p.grad = None

            for p in ws:
                p.register_post_accumulate_grad_hook(step)
            for _ in range(3):
                y = x.sin()
                for p in ws:
                    y = h(y, p)
                squares(y).backward()
            return [p.detach() for p in ws]

        same(run)

    def test_with_other_modes_of_autocast_in_forward_inside_and_backward(self, same):
        def part(b, p):
            with torch.autocast("cpu", enabled=False):
                t = (b.float() * p.float()).tanh()
            return torch.outer(p, p).matmul(t.T).T.float().sin()

        def run(h, x, w):
            x, w = x.float(), w.float()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = h((x, x * w), (w, w))
            with torch.autocast("cpu", dtype=torch.float16):
                return gradients(y, x, w)

        pair = additive_coupling(part, part)
        same(run, pair, invertible_checkpoint(pair, keep=True), rtol=0.0)
        same(run, pair, invertible_checkpoint(pair), rtol=1e-2)


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


def test_blocks_are_freed_without_the_garbage_collector():
    def keep_alive(kind):
        h = invertible_checkpoint(
            lambda x, w: (x[0] * w.exp(), f(x[1], w)), lambda y, w: (y[0] / w.exp(), f_inv(y[1], w))
        )
        x, w = leaves()
        a, b = h((x * 1, x * 2), w)
        y = h((a, a) if kind == "twice" else (a, a.view(-1).view(2, 3)) if kind == "view" else (a, b), w)
        freed = weakref.ref(a.grad_fn.metadata["invfunc.slots"][0][0]())
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
