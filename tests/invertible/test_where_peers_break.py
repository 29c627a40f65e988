"""A test for each way in which MemCNN or invtorch break: here it is as without."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap

from invfunc import (
    InverseError,
    ModifiedError,
    additive_coupling,
    functional,
    invertible_checkpoint,
    layers,
)
from tests.invertible_same import f, f_inv, g, gradients, leaves, squares
from tests.strategies import Numbers

READS = {
    "x + g(x)": lambda h, x, w: x + h(x, w),
    "g(x) + x": lambda h, x, w: h(x, w) + x,
    "x * g(x)": lambda h, x, w: x * h(x, w),
    "g(g(x)) - g(x)": lambda h, x, w: h(h(x, w), w) - h(x, w),
    "both outputs": lambda h, x, w: (lambda y: h(y, w) - y)(h(x, w)),
    "print": lambda h, x, w: (lambda y: (repr(x), str(y), y)[2])(h(x, w)),
    "base of a view": lambda h, x, w: (lambda y: y + x.sum())(h(x.view(6).view(2, 3), w)),
    "base of an expanded one": lambda h, x, w: h(x.sum(0, keepdim=True).expand(2, 3), w) * x,
}


WRITES = {
    "relu_": torch.Tensor.relu_,
    "mul_": lambda y: y.mul_(2),
    "a row": lambda y: y[0].fill_(1),
    "a view": lambda y: y.view(-1).add_(1),
    "an index": lambda y: y.__setitem__((0, 1), 0.0),
}


class TestCrashes:
    @pytest.mark.parametrize("read", READS.values(), ids=READS)
    @pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "computed"])
    def test_x_is_read_after_the_call(self, same, read, leaf):
        """Both: the process dies, as the storage of x is gone."""
        same(lambda h, x, w: gradients(read(h, x if leaf else x.sin(), w), x, w))

    def test_identity(self, same):
        """MemCNN: frees the storage that y shares with x."""
        pair = layers.identity()
        same(lambda h, x, w: gradients(h(x * w) + h(h(x)), x, w), pair, invertible_checkpoint(pair))

    def test_under_no_grad_nothing_happens_to_x(self, same):
        """MemCNN: wipes its input even there."""
        for mode in (torch.no_grad, torch.inference_mode):

            def run(h, x, w, mode=mode):
                with mode():
                    y = h(x, w)
                assert y.grad_fn is None
                return y.clone(), x

            same(run)


class TestWrongNumbers:
    def test_gradient_of_a_leaf_is_counted_once(self, same):
        """MemCNN: doubled, by writing `.grad` of the input beside returning its gradient."""

        def run(h, x, w):
            squares(h(x, w)).backward()
            return x.grad, w.grad

        same(run)

    @pytest.mark.parametrize("kind", ["dropout", "dropout1d", "alpha_dropout", "rrelu", "rand_like"])
    @pytest.mark.parametrize("training", [True, False])
    def test_dropout(self, same, kind, training):
        """MemCNN: wrong in every mode, replayed around the inverse only; invtorch: around the recompute only."""

        def part(b):
            if kind == "rand_like":
                return b * torch.rand_like(b).sin() + b
            if kind == "rrelu":
                return F.rrelu(b.sin() - 0.3, 0.1, 0.9, training=training)
            return getattr(F, kind)(b.sin()[None], 0.5, training=training)[0]

        pair = additive_coupling(part, part)
        same(lambda h, x, w: gradients(h(h((x * w, x))), x, w), pair, invertible_checkpoint(pair))

    @pytest.mark.parametrize("change", WRITES.values(), ids=WRITES)
    def test_in_place_on_the_output(self, same, change):
        """Both: a wrong gradient. Here an error, or the right one where x is in memory anyway."""

        def run(h, x, w, before):
            y = h(before(x), w)
            change(y)
            return gradients(y.sin(), x, w)

        same(partial(run, before=lambda x: x))
        for h in (g, lambda x, w: g(g(x, w), w)):
            with pytest.raises(ModifiedError, match=r"of shape \[2, 3\]"):
                run(h, *leaves(), before=torch.sin)

    def test_functional_call(self, same):
        """invtorch: gradients go to the module's own parameters."""

        class Block(nn.Module):
            def __init__(self, wrap):
                super().__init__()
                self.w = nn.Parameter(torch.ones(3, dtype=torch.float64))
                self.wrap = wrap

            def forward(self, x):
                return self.wrap(x, self.w)

        def run(h, x, w):
            module = Block(h).to(x)
            found = gradients(functional_call(module, {"w": w}, (x,)), x, w)
            assert module.w.grad is None
            call, params = functional(module)
            return found, grad(lambda p: squares(call(p, x.detach())))(params)

        same(run)

    def test_a_wrong_inverse_is_found_at_run_time(self):
        """Both: a wrong gradient; their checks have to be called by hand."""
        wrong = invertible_checkpoint(f, lambda y, w: f_inv(y, w) + 0.1, check=True)
        with pytest.raises(InverseError, match="gives x of shape"):
            wrong(Numbers()(2, 3).requires_grad_(), Numbers(1)(3))

    def test_double_backward(self, same):
        """Both: the gradients have no graph."""

        def run(h, x, w):
            first = gradients(h(h(x, w), w), x, w, create_graph=True)
            assert all(t.grad_fn is not None for t in first)
            return first, gradients(first, x, w)

        same(run)

    def test_random_numbers_of_f_and_of_its_inverse(self, same):
        """MemCNN replays around the inverse, invtorch around the recompute: it takes both, each from its start."""

        def drawn(x, w):
            return x * w.exp() + torch.rand_like(x) * w.tanh() * w

        def undrawn(y, w):
            return (y - torch.rand_like(y) * w.tanh() * w) * (-w).exp()

        h = invertible_checkpoint(drawn, undrawn)
        same(lambda h, x, w: gradients(h(h(x, w), w), x, w), drawn, h)
        same(lambda h, x, w: grad(lambda w: squares(h(h(x.detach(), w), w)))(w.detach()), drawn, h)

    def test_autocast(self, same):
        """Both: recompute outside of autocast, bfloat16 gradients off by 1e-2."""

        def part(b, p):
            return F.linear(b, p.outer(p)).tanh()

        def run(h, x, w):
            x, w = x.float(), w.float()
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                y = h((x, x * w), (w, w))
                assert part(x, w).dtype == torch.bfloat16
            return gradients(y, x, w)

        pair = additive_coupling(part, part)
        same(run, pair, invertible_checkpoint(pair, keep=True), rtol=0.0)
        same(run, pair, invertible_checkpoint(pair), rtol=1e-2)

    def test_statistics_of_batch_norm_are_updated_once(self, same):
        """Both: updated in forward, inverse and recompute."""

        def run(wrap, x, w):
            norm = nn.BatchNorm1d(3).to(x)
            pair = additive_coupling(lambda b, p: norm(b) * p, lambda a, q: norm(a).sin() * q)
            x = torch.cat([x, x.cos(), x.sin()])
            first = gradients(wrap(pair)((x, x.exp()), (w, w)), w, create_graph=True)
            return gradients(first, w, *norm.parameters()), dict(norm.named_buffers())

        same(run, lambda pair: pair, invertible_checkpoint, lambda pair: invertible_checkpoint(pair, keep=True))


class TestErrors:
    @pytest.mark.parametrize("op", ["relu", "exp", "sigmoid", "tanh", "sqrt", "softmax"])
    def test_an_op_that_saves_its_output_stands_before(self, same, op):
        """Both (memcnn#70): "modified by an inplace operation", as they free what relu saved."""

        def before(x):
            return x.softmax(-1) if op == "softmax" else getattr(torch, op)(x.abs() if op == "sqrt" else x)

        same(lambda h, x, w: gradients(h(before(h(before(x), w)), w), x, w))

    def test_the_same_input_to_two_blocks(self, same):
        """Both: the second one finds an empty storage."""

        def run(h, x, w):
            y = h(x, w)
            return gradients(h(y, w) * h(y, w.sin()) + h(x, w.cos()), x, w)

        same(run)

    def test_autograd_grad_and_backward_of_some_inputs(self, same):
        """Both: `.backward()` alone is possible."""

        def run(h, x, w):
            s = squares(h(h(x, w), w))
            found = [torch.autograd.grad(s, t, retain_graph=True) for t in (x, w)]
            s.backward(inputs=[w])
            assert x.grad is None
            return found, w.grad

        same(run)

    def test_a_second_backward(self, same):
        """Both (memcnn#36): the input is gone."""

        def run(h, x, w):
            y = h(h(x, w), w)
            return [gradients(y, x, w, retain_graph=True) for _ in range(3)]

        same(run)

    TRANSFORMS = {
        "grad": lambda loss, w: grad(loss)(w),
        "grad of grad": lambda loss, w: grad(lambda w: grad(loss)(w).square().sum())(w),
        "vjp": lambda loss, w: vjp(loss, w)[1](torch.ones_like(w[0])),
        "jvp": lambda loss, w: jvp(loss, (w,), (w.cos(),)),
        "jacrev": lambda loss, w: jacrev(loss)(w),
        "jacfwd": lambda loss, w: jacfwd(loss)(w),
        "hessian": lambda loss, w: jacfwd(jacrev(loss))(w),
        "vmap of grad": lambda loss, w: vmap(grad(loss))(torch.stack([w, w.sin()])),
        "grad of vmap": lambda loss, w: grad(lambda w: vmap(loss)(torch.stack([w, w.sin()])).sum())(w),
    }

    @pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
    def test_torch_func(self, same, transform):
        """Both: refused by every transform; neither does torch.utils.checkpoint (pytorch#146036, #141845, #122729)."""
        same(lambda h, x, w: transform(lambda w: squares(h(h(x.detach(), w), w)), w.detach()))

    def test_kwargs_dicts_numbers_and_masks(self, same):
        """Both, and RevTorch#5: tensors by position alone."""

        def forward(x, params, times, *, mask, mode=None, scale=1.0):
            assert mode == "shift"
            shift = scale * times * torch.where(mask, params["w"].tanh(), 0)
            return {"left": x["left"] * params["w"].exp(), "right": x["right"] + shift}

        def backward(y, params, times, *, mask, mode=None, scale=1.0):
            shift = scale * times * torch.where(mask, params["w"].tanh(), 0)
            return {"left": y["left"] * (-params["w"]).exp(), "right": y["right"] - shift}

        def run(h, x, w):
            y = {"left": x, "right": x.sin()}
            for times in (2, 3):
                y = h(y, {"w": w, "none": None}, times, mask=x > 0, mode="shift", scale=0.5)
            return gradients(tuple(y.values()), x, w)

        same(run, forward, invertible_checkpoint(forward, backward))

    def test_an_unused_parameter(self, same):
        """MemCNN: an error about a tensor that was not used."""
        unused = invertible_checkpoint(lambda x, w, v: f(x, w), lambda y, w, v: f_inv(y, w))

        def run(h, x, w):
            v = w.clone().requires_grad_()
            found = gradients(h(x, w, v), x, w, v, allow_unused=True)
            assert found[2] is None
            return found[:2], grad(lambda v: squares(h(x.detach(), w.detach(), v)))(v.detach())

        same(run, unused.pair, unused)

    @pytest.mark.filterwarnings("ignore:an invertible block within torch.compile:invfunc.InvFuncWarning")
    def test_fullgraph_compile(self, same):
        """Both: graph breaks, refused by fullgraph."""

        def run(h, x, w):
            twice = torch.compile(lambda x, w: h(h(x, w), w), fullgraph=True, backend="eager")
            return gradients(twice(x, w), x, w)

        same(run, f, g)
