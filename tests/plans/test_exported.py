"""A compiled statistic within torch.export: a program of torch's own operations, which tells where it does not fit."""

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import compiled, tree
from invfunc.kronecker.origin import Joint, Origin, read, written
from invfunc.testing.oracles import assert_trees_close
from tests.data_sets.test_streamed import linear, losses
from tests.plans.calls import quietly
from tests.strategies import Numbers, seeded

EXACT = 1e-12


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def data():
    rand = Numbers(0)
    return {"w": rand(4, 5), "b": rand(5)}, rand(7, 4), torch.arange(7) % 5


class Calling(nn.Module):
    """A module that calls a function of what it is given."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *args):
        return self.call(*args)


def program(call, *args, strict=False):
    """The program of a function, as a function."""
    return torch.export.export(Calling(call), args, strict=strict).module()


MADE = {
    "variance": lambda: invfunc.variance(losses),
    "diag_ggn": lambda: invfunc.diag_ggn(linear, F.cross_entropy),
    "together": lambda: invfunc.together(invfunc.batch_grad(losses), invfunc.diag_ggn(losses)),
    "chunked": lambda: invfunc.chunked(invfunc.diag_ggn(linear, F.cross_entropy), 2),
    "gram": lambda: invfunc.gram(losses),
}


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_is_the_statistic_of_other_numbers(make, strict, data):
    params, x, y = data
    c, t = compiled(make()), make()
    c(params, x, y)
    found = program(c, params, x, y, strict=strict)
    for k in range(3):
        at = {name: p + k for name, p in params.items()}, (x - k).cos(), (y + k) % 5
        assert_trees_close(found(*at), t(*at), EXACT)


def test_of_a_model_that_is_part_of_the_module(data):
    """Its parameters and buffers have no numbers while it is exported; those of the program can be loaded."""
    _, x, y = data
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5)).double().eval()
    f, _ = invfunc.functional(model)

    class Watched(nn.Module):
        def __init__(self, t):
            super().__init__()
            self.model, self.t = model, t

        def forward(self, x, y):
            return self.t(dict(self.model.named_parameters()), x, y)

    t, ours = invfunc.diag_ggn(f, F.cross_entropy), Watched(compiled(invfunc.diag_ggn(f, F.cross_entropy)))
    for strict in (False, True):
        with torch.no_grad():
            ours(x, y)
            found = torch.export.export(ours, (x, y), strict=strict).module()
            moved = {name: p + 1 for name, p in model.named_parameters()}
            found.load_state_dict({f"model.{name}": p for name, p in moved.items()}, strict=False, assign=True)
            assert_trees_close(found(x.sin(), y), t(moved, x.sin(), y), EXACT)


def test_what_comes_before_and_behind_it_is_in_the_program(data):
    params, x, y = data
    c, t = compiled(invfunc.hvp(losses)), invfunc.hvp(losses)

    def use(call, params, x, y):
        v = tree.map_tensors(torch.cos, params)
        return tree.map_tensors(torch.sin, call(params, v, x * 2, y))

    use(c, params, x, y)
    found = program(partial(use, c), params, x, y)
    assert_trees_close(found(params, x + 1, y), use(t, params, x + 1, y), EXACT)


WITHOUT_THIS_LIBRARY = """
import sys, torch
at, wanted = torch.load("wanted.pt")
found = torch.export.load("program.pt2").module()(*at)
assert found.keys() == wanted.keys() and "invfunc" not in sys.modules
assert all(torch.allclose(found[k], wanted[k], rtol=1e-12, atol=0) for k in wanted)
try:
    torch.export.load("program.pt2").module()(at[0], -at[1], at[2])
except RuntimeError as error:
    assert "numbers that it reads" in str(error), error
else:
    raise AssertionError("nothing was said of a branch that is not the one of the program")
def load(name):
    return torch.export.load(f"{name}.pt2").module()
try:
    load("factors")
except RuntimeError:
    pass
else:
    raise AssertionError("it is known without invfunc")
assert "invfunc" not in sys.modules
"""
WITH_THIS_LIBRARY = """
import invfunc
at, wanted = torch.load("data.pt")
(grad, noise), factors = load("noise")(*at), load("factors")(*at)
assert isinstance(noise, invfunc.reductions.noise.NoiseScale), noise
assert isinstance(factors["w"], invfunc.kronecker.Kronecker), factors
found = [invfunc.tree.tensors((grad, noise)), invfunc.tree.tensors(factors)]
assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for f, w in zip(found, wanted) for a, b in zip(f, w, strict=True))
assert factors["w"].solve(at[0]["w"], damping=1.0).shape == at[0]["w"].shape and "w" in factors["w"].origin.name
"""


@pytest.mark.slow
def test_loads_in_a_process_without_this_library_and_objects_where_they_are_known(data, tmp_path):
    """Objects in a fresh process after `import invfunc`; a bias with its weight, too."""
    params, x, y = data

    def f(p, x):
        return linear(p, x) * (2 if x.sum() > 0 else 3)

    t, c = invfunc.diag_ggn(f, F.cross_entropy), compiled(invfunc.diag_ggn(f, F.cross_entropy))
    c(params, x.abs(), y)
    torch.export.save(torch.export.export(Calling(c), (params, x.abs(), y)), tmp_path / "program.pt2")
    at = {name: p - 1 for name, p in params.items()}, x.abs() + 1, (y + 1) % 5
    torch.save((at, t(*at)), tmp_path / "wanted.pt")
    objects = {
        "noise": invfunc.noise_scale(losses),
        "factors": invfunc.kfac(linear, F.cross_entropy, fisher="exact"),
    }
    for name, made in objects.items():
        c = compiled(made)
        c(params, x, y)
        with torch.no_grad():
            torch.export.save(torch.export.export(Calling(c), (params, x, y), strict=False), tmp_path / f"{name}.pt2")
    at = params, x + 1, y
    torch.save([at, [tree.tensors(made(*at)) for made in objects.values()]], tmp_path / "data.pt")
    code = WITHOUT_THIS_LIBRARY + WITH_THIS_LIBRARY
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_structure_of_factors_is_written_and_read():
    whole = Joint("b", torch.Size([2, 3]), (0,), (1,), (1, 1))
    for origin in (Origin(), Origin("w", 5, 2.0, 1, None, False, whole)):
        rest = ("groups", ((0,), (1,))), ("shape", torch.Size([2, 3])), ("values", None), ("blocks", (1, 1))
        structure = ("factors",), (*rest, ("origin", origin))
        found = read(written(structure))
        assert found == structure and repr(found) == repr(structure)


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_a_number_that_is_read_is_asserted(strict, data):
    params, x, y = data
    c = compiled(invfunc.variance(lambda p, x, y: losses(p, x, y) * (2 if x.sum() > 0 else 3)))
    c(params, x.abs(), y)
    found = program(c, params, x.abs(), y, strict=strict)
    assert_trees_close(found(params, x.abs() + 1, y), c(params, x.abs() + 1, y), EXACT)
    with pytest.raises(RuntimeError, match=r"numbers that it reads \(at .*test_exported.py:\d+\) are others"):
        found(params, -x.abs(), y)


@pytest.mark.parametrize("was, now", [(0.0, -0.0), (float("nan"), 1.0), (1.0, float("nan"))], ids=str)
def test_numbers_that_only_look_alike_are_others(was, now):
    c = compiled(invfunc.variance(lambda w, x, s: w * x * (1 if repr(s[0].item()) == repr(was) else 2)))
    w, x = Numbers(0)(1), Numbers(1)(4)
    same, other = (torch.full((4,), s, dtype=torch.float64) for s in (was, now))
    c(w, x, same)
    found = program(c, w, x, same)
    assert_trees_close(found(w, x, same), c(w, x, same), EXACT)
    with pytest.raises(RuntimeError, match="numbers that it reads"):
        found(w, x, other)


def test_closed_over_tensors_are_constants_as_they_were(data):
    """Also where memory is not in the order of the axes, and where it is written later."""
    params, x, y = data
    held = Numbers(3)(4, 7).t()
    t, c = (made(invfunc.variance(lambda p, x, y: losses(p, x * held, y))) for made in (lambda t: t, compiled))
    c(params, x, y)
    found, wanted = program(c, params, x, y), t(params, x + 1, y)
    held.zero_()
    assert_trees_close(found(params, x + 1, y), wanted, EXACT)


def test_has_no_derivatives(data):
    """Those of its operations would be others: a result that needs none is told at once by autograd."""
    params, x, y = data
    c = compiled(invfunc.variance(losses))
    c(params, x, y)
    found = program(c, params, x, y)
    asked = tree.map_tensors(lambda p: p.clone().requires_grad_(), params)
    assert not any(r.requires_grad for r in tree.tensors(found(asked, x, y)))
    with pytest.raises(invfunc.errors.ArgumentError, match="within torch.no_grad"):
        program(c, asked, x, y)


class TestIsAClearError:
    def test_before_a_first_call(self, data):
        params, x, y = data
        c = compiled(invfunc.variance(losses))
        with pytest.raises(invfunc.errors.ArgumentError, match="Call it once with such arguments before"):
            program(c, params, x, y)
        c(params, x, y)
        for at in [(params, x[:5], y[:5]), (params, x.t().contiguous().t(), y), (params, x.float(), y)]:
            with pytest.raises(invfunc.errors.ArgumentError, match="Call it once with such arguments before"):
                program(c, *at)
        w = {"w": params["w"], "b": params["w"][0]}
        c(w, x, y)
        assert "shares memory" in str(
            pytest.raises(invfunc.errors.ArgumentError, program, compiled(c.t), w, x, y).value
        )

    def test_where_it_has_changed(self, data):
        params, x, y = data
        held = {"by": 2.0}
        c = compiled(invfunc.variance(lambda p, x, y: losses(p, x, y) * held["by"]))
        c(params, x, y)
        held["by"] = 3.0
        with pytest.raises(invfunc.errors.ArgumentError, match=r"held is another one since the last such call"):
            program(c, params, x, y)
        c(params, x, y)
        assert_trees_close(program(c, params, x, y)(params, x, y), c(params, x, y), EXACT)

    @pytest.mark.parametrize("kind", ["draws", "shapes", "eager"])
    def test_of_what_a_program_cannot_do(self, kind, data):
        params, x, y = data
        t, why = {
            "draws": (invfunc.diag_ggn(linear, F.cross_entropy, mc_samples=1, generator=seeded(0)), "random numbers"),
            "shapes": (invfunc.variance(lambda p, x, y: losses(p, x, y) * x[x > 0].sum()), "depend on numbers"),
            "eager": (invfunc.variance(lambda p, x, y: losses(p, x, y) * float(x.sum().numpy())), "run eagerly"),
        }[kind]
        c = compiled(t)
        quietly(c, params, x, y)
        with pytest.raises(invfunc.errors.ArgumentError, match=why):
            program(c, params, x, y)

    def test_of_what_is_not_compiled(self, data):
        for t in (invfunc.variance(losses), compiled(invfunc.hvp(losses)).linearize):
            with pytest.raises(invfunc.errors.ArgumentError, match="torch.export writes operations"):
                program(t, *data)
