"""What a plan relies on, and what comes of it when that changes: the result is always that of the call itself."""

import copy
import gc
import os
import sys
import types
import warnings
import weakref
from contextvars import ContextVar
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import invfunc
from invfunc import compiled, tree
from invfunc.testing.oracles import assert_trees_close
from tests.plans.calls import EXACT, given, hits, loss, of, quietly, same, whys
from tests.strategies import Numbers

# What is read


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


def by_range(w, x):
    total = loss(w, x)
    for _ in range((x[:, 0] > 0).sum()):
        total = total * 1.5
    return total


def by_list(w, x):
    return loss(w, x) * sum((x > 0).tolist()[0])


def by_list_of_numbers(w, x):
    return loss(w, x) * torch.tensor(x.detach()[0].tolist(), dtype=x.dtype).sum()


def by_numpy(w, x):
    return loss(w, x) * float(x.detach().numpy().sum())


def by_array(w, x):
    return loss(w, x) * np.asarray(x.detach())[0, 0]


def by_new_tensor(w, x):
    return loss(w, x) * torch.tensor([x[0, 0], x[1, 1]], dtype=x.dtype).sum()


def by_constructor(w, x):
    return loss(w, x) * torch.Tensor([x[0, 0], x[1, 1]]).sum()


def by_text(w, x):
    return loss(w, x) * len(repr(x.detach()))


def by_copy(w, x):
    return loss(w, x) * copy.deepcopy(x.detach()).sum()


def by_storage(w, x):
    return loss(w, x) * x.detach().untyped_storage().tolist()[3]


def by_mask(w, x):
    return loss(w, x) * x[x > 0].mean()


def by_nonzero(w, x):
    return loss(w, x) * len(torch.nonzero(x > 0))


def by_unique(w, x):
    return loss(w, x) * x.round().unique().numel()


def by_selected(w, x):
    return loss(w, x) * torch.masked_select(x, x > 0).sum()


def by_repeats(w, x):
    return loss(w, x) * torch.repeat_interleave(x[0], (x[0] > 0).long()).sum()


def by_sections(w, x):
    return loss(w, x) * torch.tensor_split(x[0], (x[0] > 0).long().cumsum(0))[0].sum()


def by_bincount(w, x):
    return loss(w, x) * torch.bincount((x[:, 0] > 0).long()).amax()


def by_numbers_written_later(w, x):
    flag = x.detach().clone().sum()
    factor = 2.0 if flag > 0 else 3.0
    flag.zero_()
    return loss(w, x) * factor


def by_gradient(w, x):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            (x,) = ctx.saved_tensors
            return slope * (1 + len([v for v in x.flatten().tolist() if v > 0]))

    return Scaled.apply(loss(w, x))


READS = {
    f.__name__: f
    for f in (
        *(by_item, by_value, by_branch, by_equal, by_index, by_range, by_list, by_list_of_numbers, by_numpy, by_array),
        *(by_new_tensor, by_constructor, by_text, by_copy, by_storage, by_mask, by_nonzero, by_unique, by_selected),
        *(by_repeats, by_sections, by_bincount, by_numbers_written_later, by_gradient),
    )
}


@pytest.mark.quick
class TestNumbersThatAreRead:
    @pytest.mark.parametrize("f", READS.values(), ids=READS)
    def test_are_never_those_of_another_call(self, f):
        t = invfunc.hvp(lambda w, x: f(w, x).sum())  # which does not mind that samples are mixed
        c = compiled(t)
        for seed in (0, 0, 1, 2, 3, 1, 0, 4):
            w, x = given(seed)
            for factor in (1, -1):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    same(c, t, w, w.cos(), factor * x)


# What f closes over


class Scale:
    """What a function reads attributes of."""

    of_class = 2.0

    def __init__(self):
        self.own, self.tensor, self.parts = 2.0, torch.tensor(2.0), {"a": [1.0, 2.0]}

    def method(self):
        return self.own * self.of_class


class Slotted:
    __slots__ = ("own",)

    def __init__(self):
        self.own = 2.0


class Layer(nn.Module):
    """A module of the user's, which reads a global name, an attribute and its mode."""

    def __init__(self):
        super().__init__()
        self.w, self.factor = nn.Parameter(torch.ones(3, dtype=torch.float64)), 2.0
        self.register_buffer("shift", torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return (x * self.shift) @ self.w * self.factor * GLOBAL * (3.0 if self.training else 1.0)


GLOBAL, PLACES = 2.0, {"a": 1.0}
CONFIG = types.ModuleType("config_of_the_test")
CONFIG.scale = 2.0


def reading_global(w, x):
    return loss(w, x) * GLOBAL


def reading_module(w, x):
    return loss(w, x) * CONFIG.scale


def calling_another(w, x):
    return reading_global(w, x)


def with_default(w, x, by=[2.0]):  # noqa: B006
    return loss(w, x) * by[0]


def cell():
    scale = 2.0

    def f(w, x):
        return loss(w, x) * scale

    def change():
        nonlocal scale
        scale = 3.0

    return f, change


def cell_of_a_cell():
    scale = 2.0

    def inner():
        return scale

    def change():
        nonlocal scale
        scale = 3.0

    return (lambda w, x: loss(w, x) * inner()), change


def tensor_in_a_cell(change_of):
    def made():
        held = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)

        def f(w, x):
            return loss(w, x * held)

        def change():
            nonlocal held
            held = change_of(held)

        return f, change

    return made


def attribute(change_of, read=lambda s: s.own):
    def made():
        held = Scale()
        return (lambda w, x: loss(w, x) * read(held)), lambda: change_of(held)

    return made


def set_global(name, value):
    return lambda: globals().__setitem__(name, value)


def module(change_of):
    def made():
        layer = Layer()
        f, params = invfunc.functional(layer)
        return (lambda w, x: f({"w": w}, x).square()), lambda: change_of(layer)

    return made


def set_to(name, value):
    return lambda x: setattr(x, name, value)


def in_place(x):
    x.mul_(2)
    return x


def behind_its_version(x):
    x.data.mul_(2)
    return x


def another_memory(x):
    x.data = x.data * 2
    return x


ARRAY = np.array([1.0, 2.0])


def numpys(w, x):
    return loss(w, x) * float(ARRAY[1])


def slotted():
    held = Slotted()
    return (lambda w, x: loss(w, x) * held.own), lambda: set_to("own", 3.0)(held)


def bound():
    held = {"scale": 2.0}
    get = held.get
    return (lambda w, x: loss(w, x) * get("scale")), lambda: held.update(scale=3.0)


def of_the_function():
    def f(w, x):
        return loss(w, x) * getattr(f, "scale", 2.0)

    return f, lambda: set_to("scale", 3.0)(f)


VARIABLE = ContextVar("VARIABLE", default=2.0)


class Other(Scale):
    def method(self):
        return 5.0


def tagged():
    held = torch.ones(3, dtype=torch.float64)
    held.scale = 2.0
    return (lambda w, x: loss(w, x * held) * held.scale), lambda: set_to("scale", 3.0)(held)


class Named(dict):
    """A dict with attributes."""

    scale = 2.0


def named():
    held = Named(a=1.0)
    return (lambda w, x: loss(w, x) * held.scale * held["a"]), lambda: set_to("scale", 3.0)(held)


CLOSURES = {
    "a method of a dict": bound,
    "an attribute of the function": of_the_function,
    "a context variable": lambda: ((lambda w, x: loss(w, x) * VARIABLE.get()), lambda: VARIABLE.set(3.0)),
    "an attribute of a tensor": tagged,
    "an attribute of a dict": named,
    "a cell": cell,
    "a cell of a function in a cell": cell_of_a_cell,
    "a global name": lambda: (reading_global, set_global("GLOBAL", 3.0)),
    "a global name of another function": lambda: (calling_another, set_global("GLOBAL", 4.0)),
    "a name in a module": lambda: (reading_module, lambda: set_to("scale", 3.0)(CONFIG)),
    "a default that is written": lambda: (with_default, lambda: with_default.__defaults__[0].__setitem__(0, 3.0)),
    "defaults": lambda: (with_default, lambda: setattr(with_default, "__defaults__", ([5.0],))),
    "an array of numpy": lambda: (numpys, lambda: ARRAY.__setitem__(1, 3.0)),
    "an attribute": attribute(set_to("own", 3.0)),
    "an attribute of a class": attribute(lambda s: setattr(Scale, "of_class", 3.0), lambda s: s.of_class),
    "what a method reads": attribute(set_to("own", 3.0), lambda s: s.method()),
    "a method of a class": attribute(lambda s: setattr(Scale, "method", lambda s: 7.0), lambda s: s.method()),
    "the class of an object": attribute(set_to("__class__", Other), lambda s: s.method()),
    "all attributes": attribute(lambda s: setattr(s, "__dict__", {**vars(s), "own": 3.0})),
    "an entry of a list in a dict": attribute(lambda s: s.parts["a"].__setitem__(0, 3.0), lambda s: s.parts["a"][0]),
    "a list that grows": attribute(lambda s: s.parts["a"].append(3.0), lambda s: len(s.parts["a"])),
    "a dict that grows": attribute(lambda s: s.parts.update(b=1), lambda s: len(s.parts)),
    "a slot": slotted,
    "a tensor of an object": attribute(lambda s: setattr(s, "tensor", torch.tensor(3.0)), lambda s: s.tensor),
    "the number in a tensor": attribute(lambda s: s.tensor.fill_(3.0), lambda s: s.tensor.item()),
    "a list of the numbers in a tensor": attribute(lambda s: s.tensor.fill_(3.0), lambda s: s.tensor.tolist()),
    "a tensor": tensor_in_a_cell(lambda x: x + 1),
    "a tensor of another shape": tensor_in_a_cell(lambda x: x[:1].clone()),
    "a tensor written in place": tensor_in_a_cell(in_place),
    "a tensor written behind its version": tensor_in_a_cell(behind_its_version),
    "a tensor with other memory": tensor_in_a_cell(another_memory),
    "the mode of a module": module(lambda m: m.eval()),
    "an attribute of a module": module(set_to("factor", 3.0)),
    "a global name that a module reads": lambda: (module(None)()[0], set_global("GLOBAL", 5.0)),
    "a buffer": module(lambda m: m.shift.mul_(2)),
    "another buffer": module(lambda m: setattr(m, "shift", m.shift + 1)),
    "a hook": module(lambda m: m.register_forward_hook(lambda m, args, out: 3 * out)),
    "a forward of its own": module(lambda m: setattr(m, "forward", lambda x: x @ m.w)),
    "a part that is called": lambda: (partial(with_default, by=(held := [2.0])), lambda: held.__setitem__(0, 9.0)),
}


@pytest.mark.quick
class TestWhatIsClosedOver:
    @pytest.mark.parametrize("made", CLOSURES.values(), ids=CLOSURES)
    def test_is_that_of_now(self, made):
        f, change = made()
        t, c = of(f)
        w, x = given()
        for _ in range(3):
            same(c, t, w, x)
        assert hits(c) and not whys(c)
        change()
        for seed in range(3):
            w, x = given(seed)
            same(c, t, w, x)
        assert hits(c) > 2

    def test_is_not_kept_alive_when_it_is_another(self):
        f, change = tensor_in_a_cell(lambda x: x + 1)()
        c = compiled(invfunc.variance(f))
        (old,) = [weakref.ref(x) for x in tree.tensors(f.__closure__[0].cell_contents)]
        c(*given()), c(*given())
        assert hits(c) == 1
        change()
        gc.collect()
        assert old() is None
        same(c, invfunc.variance(f), *given())

    def test_that_changes_in_each_call_is_not_guessed(self):
        state = {"calls": 0}

        def f(w, x):
            state["calls"] += 1
            return loss(w, x) * state["calls"]

        t, c = of(f)
        for _ in range(8):
            now = state["calls"]
            found = quietly(c, *given())
            state["calls"] = now
            assert_trees_close(found, t(*given()), EXACT)
        assert not hits(c)

    def test_that_cannot_be_watched_is_not_guessed(self):
        steps = iter(range(1, 1000))
        c = compiled(invfunc.variance(lambda w, x: loss(w, x) * next(steps)))
        with pytest.warns(invfunc.InvFuncWarning, match="steps"):
            first = c(*given())
        assert not torch.equal(c(*given()), first)

    def test_that_is_hidden_is_not_guessed(self):
        hidden = []

        hiding = type("Hiding", (), {"__module__": "torch", "__getattr__": lambda self, name: hidden[0]})()
        hidden.append(torch.ones(3, dtype=torch.float64))
        t, c = of(lambda w, x: loss(w, x * hiding.anything))
        for factor in (1, 2, 3):
            hidden[0] = factor * torch.ones(3, dtype=torch.float64)
            assert_trees_close(quietly(c, *given()), t(*given()), EXACT)


# What no closure or global name holds


def by_environment(w, x):
    return loss(w, x) * float(os.environ["PLANNED"])


def by_import(w, x):
    import planned_numbers  # pyright: ignore[reportMissingImports]

    return loss(w, x) * planned_numbers.factor


def by_globals(w, x):
    return loss(w, x) * globals()["FACTOR"]


FACTOR = 1.0


@pytest.mark.parametrize("f", [by_environment, by_import, by_globals])
def test_what_is_found_by_its_name_is_seen_to_change(f, monkeypatch):
    module = types.ModuleType("planned_numbers")
    monkeypatch.setitem(sys.modules, "planned_numbers", module)
    t, c = invfunc.variance(f), compiled(invfunc.variance(f))
    for k in (1.0, 1.0, 3.0, 3.0):
        monkeypatch.setenv("PLANNED", str(k))
        monkeypatch.setitem(globals(), "FACTOR", k)
        module.factor = k  # pyright: ignore[reportAttributeAccessIssue]
        args = Numbers(int(k))(3), Numbers(5)(4, 3)
        assert_trees_close(quietly(c, *args), t(*args), 1e-12)
    assert hits(c) == (0 if f is by_globals else 2)
