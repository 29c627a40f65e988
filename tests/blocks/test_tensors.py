"""Tensors of any kind, in any tree, from any thread: what comes out and its gradients are those of f."""

import ast
import copy
import io
import pickle
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

import invfunc
from invfunc import additive_coupling, invertible_checkpoint, tree
from tests.invertible_cases import assert_same, f, g, gradients, leaves, squares

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


# Calls that write to the user's tensors, gradients or random numbers are not in the library's text

PACKAGE = Path(invfunc.__file__).parent
BANNED = {"resize_", "set_", "detach_", "manual_seed", "seed", "untyped_storage", "storage", "resize_as_"}
ALLOWED = {
    ("_torch/functorch.py", "untyped_storage"),  # its address is read
    ("invertible/checks.py", "manual_seed"),  # of a generator of its own
    ("loss/drawn.py", "manual_seed"),  # of generators of its own
    ("reductions/gradients.py", "manual_seed"),  # of generators of its own
    ("spectra.py", "manual_seed"),  # of a generator of its own
    ("laplace.py", "manual_seed"),  # of a generator of its own
    ("certified.py", "manual_seed"),  # of a generator of its own
    ("core/probe.py", "manual_seed"),  # of a generator that is put back
    ("certified.py", "seed"),  # which the error tells
}


def used(file):
    """Names in a file: `(name, True if it is assigned to)`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr, isinstance(node.ctx, (ast.Store, ast.Del))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+", node.value):
            yield node.value, False


def found(path):
    return [
        (name, stored)
        for name, stored in used(PACKAGE / path)
        if name in BANNED or (name in ("grad", "data") and stored) or name.endswith("set_rng_state")
    ]


def test_tensors_gradients_and_random_numbers_of_the_user_are_never_written():
    seen = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith("testing/") and not path.startswith("__main__"):
            seen |= {(path, name): stored for name, stored in found(path)}
    states = {place for place in seen if place[1] == "set_rng_state"}
    assert {path for path, _ in states} == {"_torch/generators.py"}
    assert set(seen) - states == ALLOWED
