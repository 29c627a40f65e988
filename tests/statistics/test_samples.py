"""samples=: the statistic of some of the shares, each with the scale that it has in the whole batch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import invfunc
from invfunc import chunked, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, SampleAxisError
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.compare import plain as unwrapped
from tests.laws import FLOOR, OF_LOSSES, STATISTICS, arranged
from tests.networks import LOSSES, network, networks
from tests.rows import BOTH, FACTORS, LOSS, MODEL, ROWS
from tests.strategies import Numbers

EXACT = 1e-10
N = 4
statistics = pytest.mark.parametrize("statistic", STATISTICS)
losses = st.sampled_from(LOSSES)


@st.composite
def choices(draw, n, fewest=1):
    """Indices of samples as people write them: repeated, negative, in any order, as a list or as a tensor."""
    chosen = draw(st.lists(st.integers(-n, n - 1), min_size=fewest, max_size=5))
    as_tensor = st.sampled_from([torch.int64, torch.int32, torch.uint8 if min(chosen) >= 0 else torch.int8])
    return torch.tensor(chosen, dtype=draw(as_tensor)) if draw(st.booleans()) else chosen


def plain(chosen):
    return chosen.tolist() if isinstance(chosen, torch.Tensor) else chosen


@statistics
class TestEveryStatistic:
    @pytest.mark.quick
    @given(st.data(), networks(), losses)
    def test_is_that_of_the_shares_that_were_chosen(self, statistic, data, net, loss):
        chosen = data.draw(choices(net.n, STATISTICS[statistic].fewest))
        kind, functions, args = arranged(statistic, net, loss)
        found = kind.make(*functions, samples=chosen)(*args)
        assert_trees_close(found, kind.loop(*functions, samples=plain(chosen))(*args), EXACT, FLOOR)

    @given(st.data(), networks(low=2), losses)
    def test_does_not_depend_on_chunks(self, statistic, data, net, loss):
        """Over samples too: the order is that of the choice, not of the chunks."""
        chosen = data.draw(choices(net.n, STATISTICS[statistic].fewest))
        kind, functions, args = arranged(statistic, net, loss)
        t = divided = kind.make(*functions, samples=chosen)
        for over in data.draw(st.lists(st.sampled_from(kind.axes), min_size=1, max_size=2)):
            divided = chunked(divided, data.draw(st.integers(1, 6)), over=over)
        assert_trees_close(divided(*args), t(*args), EXACT, FLOOR)

    def test_may_be_refused_for_one_batch_alone(self, statistic):
        kind, functions, args = arranged(statistic, network("perceptron", 3), LOSSES[0])
        t = kind.make(*functions, samples=torch.tensor([3, 3]))
        with pytest.raises(ArgumentError, match="samples"):
            t(*args)
        kind, functions, args = arranged(statistic, network("perceptron", 4), LOSSES[0])
        assert_trees_close(t(*args), kind.loop(*functions, samples=[3, 3])(*args), EXACT, FLOOR)


class TestScale:
    @pytest.mark.parametrize("called", OF_LOSSES)
    @given(st.data(), networks(), losses, st.sampled_from(["sum", "mean"]))
    def test_of_a_share_is_that_in_the_whole_batch(self, called, data, net, loss, reduction):
        chosen, kind = data.draw(choices(net.n, OF_LOSSES[called].fewest)), OF_LOSSES[called]
        _, (each,), args = arranged(called, net, loss)
        found = kind.make(lambda *a: getattr(each(*a), reduction)(), samples=chosen)(*args)
        scaled = (lambda *a: each(*a) / net.n) if reduction == "mean" else each
        assert_trees_close(found, kind.loop(scaled, samples=plain(chosen))(*args), EXACT, FLOOR)

    def test_of_weighted_and_ignored_targets_stays(self):
        net, y = network("perceptron", 5), torch.tensor([0, -100, 2, 1, -100])
        weight = torch.tensor([1.0, 2, 3]).double()

        def loss(p, x, y):
            return F.cross_entropy(net.f(p, x), y, weight)

        whole = invfunc.batch_grad(loss)(net.params, net.x, y)
        for over in (None, "samples", "params"):
            t = invfunc.batch_grad(loss, samples=[4, 0, 2, 0])
            if over == "samples":  # of a part of them the weights have another sum
                with pytest.raises(SampleAxisError, match="divide by weights"):
                    chunked(t, 2, over=over)(net.params, net.x, y)
                continue
            found = (t if over is None else chunked(t, 2, over=over))(net.params, net.x, y)
            assert_trees_close(found, tree.map_leaves(lambda g: g[[4, 0, 2, 0]], whole), EXACT, FLOOR)


@statistics
@pytest.mark.parametrize(
    "chosen",
    [
        [N], [-N - 1], torch.tensor([0, N]), [0.0], torch.tensor([0.5]), [[0, 1]], torch.tensor([[0, 1]]),
        torch.tensor(1), 1, [], torch.tensor([], dtype=torch.long), [True, False, True, False],
        torch.tensor([True, False, True, False]), "0", [None],
    ],
    ids=repr,
)  # fmt: skip
def test_what_is_no_choice_is_refused(statistic, chosen):
    kind, functions, args = arranged(statistic, network("perceptron", N), LOSSES[0])
    name = (statistic.split()[0] if statistic[:3] != "NTK" else "gram") + r"\("
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"{name}.*samples"):
        kind.make(*functions, samples=chosen)(*args)


# Options that all statistics share: each gives what the statistic of a function gives that is written for it

TIGHT = 1e-9
A, B = {"w": Numbers()(3, 4)}, [Numbers(1)(4, 2)]
X, Y = Numbers(2)(5, 3), Numbers(3).below(2, 5)
every = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


def model(a, x, b, scale=1.0):
    return (x @ a["w"] * scale).tanh() @ b[0]


def called(row, f, *args, **options):
    """A statistic of a model function with its cross entropy, in the form that says most, at arguments and a target."""
    *given, y = args
    kwargs = options.pop("kwargs", {})
    if row.form == MODEL:
        if "in_dims" in options:
            options["in_dims"] = options["in_dims"][:-1]
        return unwrapped(row.make(f, **options)(*given, **kwargs))
    if row.form == BOTH:
        return unwrapped(row.make(f, F.cross_entropy, **options)(*args, **kwargs))

    def loss(*args, **kwargs):
        *given, y = args
        z = f(*given, **kwargs)
        z, *aux = z if options.get("has_aux") else (z,)
        value = F.cross_entropy(z, y, reduction="none")
        return (value, *aux) if aux else value

    return unwrapped(row.make(loss, **options)(*args, **kwargs))


@every
@pytest.mark.parametrize("argnums", [0, 2, -2, (0, 2), (2, 0), (0,)], ids=str)
def test_parameters_are_those_at_argnums(row, argnums):
    args, several = (A, X, B), isinstance(argnums, tuple)
    count = 4 if row.form == LOSS else 3
    numbers = [k % 4 for k in (argnums if several else (argnums,))]
    argnums = argnums if several or argnums >= 0 else numbers[0] - count
    fixed = [None if k == 0 or k == 2 else 0 for k in range(3) if k not in numbers]

    def written(params, x):
        own = dict(zip(numbers, params if several else (params,), strict=True))
        return model(own.get(0, A), x, own.get(2, B))

    params = tuple(args[k] for k in numbers)
    wanted = called(row, written, params if several else params[0], X, Y)
    assert_trees_close(called(row, model, *args, Y, argnums=argnums, in_dims=(*fixed, 0)), wanted, TIGHT)


@every
@pytest.mark.parametrize("aux", ["a string", None, (), {"deep": [None, (1.5,)], "t": torch.arange(3)}], ids=repr)
def test_aux_is_handed_on_as_the_last_and_keywords_are_constants(row, aux):
    def f(params, x, *, scale, name):
        assert name == "constant"
        return model(params[0], x, params[1], scale), (aux, x.sum())

    kwargs = {"scale": 2.0, "name": "constant"}
    *found, (ours, total) = called(row, f, (A, B), X, Y, has_aux=True, kwargs=kwargs)
    wanted = called(row, lambda p, x: model(p[0], x, p[1], 2.0), (A, B), X, Y)
    assert_trees_close(tree.leaves(found), tree.leaves(wanted), TIGHT)
    assert repr(ours) == repr(unwrapped(aux)) and torch.equal(total, X.sum())


@every
def test_samples_are_found_along_in_dims(row):
    def moved(params, x, scale):
        return model(params[0], x.T, params[1]) * scale

    wanted = called(row, lambda p, x: model(p[0], x, p[1]) * 2, (A, B), X, Y)
    scale = torch.tensor(2.0).double()
    for dim in (1, -1):
        found = called(row, moved, (A, B), X.T, scale, Y, in_dims=(dim, None, 0))
        assert_trees_close(found, wanted, TIGHT)


@pytest.mark.parametrize("row", [row for row in ROWS.values() if row.gives != FACTORS], ids=lambda row: row.gives)
def test_parameters_without_influence_have_zeros(row):
    def f(p, x):
        return model(p, x, [p["v"] + p["cut"].detach() + p["rounded"].sign()])

    more = {name: Numbers(i)(4, 2) for i, name in enumerate(("cut", "rounded", "unused"), 4)}
    with_them = called(row, f, {**A, "v": B[0], **more}, X, Y)
    if isinstance(with_them, dict):
        for name in more:
            rest = tree.tensors(with_them[name])
            assert not any(part.any() for part in rest), name
