"""streamed: the statistic of a data set that comes batch by batch."""

from collections import UserDict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import invfunc
from invfunc import distributed, streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, SampleAxisError
from invfunc.kronecker import Kronecker
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.networks import CLASSES, LOSSES, networks, samples_loss
from tests.rows import BOTH, LOSS, MODEL, PRODUCTS, ROWS
from tests.strategies import Numbers, seeded

EXACT, FLOOR = 1e-12, 1e-9
AT_ONCE = {"kfra"}
"""Statistics that average cotangents in the backward pass, so that they need all samples at once."""
SAMPLED = [loss for loss in LOSSES if loss.called != "log cosh of outputs"]
CASES = [(name, form) for name, row in ROWS.items() for form in row.forms if not row.drawn]


def linear(params, x):
    return x @ params["w"] + params["b"]


def losses(params, x, y):
    return F.cross_entropy(linear(params, x), y, reduction="none")


@pytest.fixture
def data():
    rand = Numbers(0)
    params = {"w": rand(4, CLASSES), "b": rand(CLASSES)}
    return params, rand(9, 4), LOSSES[0].target(rand, 9)


def batches(edges, *data):
    """The data, divided at these places; where two are the same there is an empty batch."""
    edges = [0, *sorted(edges), len(tree.tensors(data)[0])]
    return [tree.map_tensors(lambda x: x[a:b], data) for a, b in zip(edges[:-1], edges[1:], strict=True)]  # noqa: B023


def in_one_memory(parts):
    """A loader that writes each batch where the one before was."""
    most = max(len(x) for x, *_ in parts)

    def loader():
        room = [x.new_empty(most, *x.shape[1:]) for x in parts[0]]
        for part in parts:
            yield [kept[: len(x)].copy_(x) for kept, x in zip(room, part, strict=True)]

    return loader


def dense(result):
    """With matrices in place of those that are given by eigenvectors, which have signs of their own."""
    parts, _ = tree.named_parts(result, Kronecker)
    if not any(isinstance(x, Kronecker) and x.values is not None for _, x in parts):
        return result
    return [x.dense() if isinstance(x, Kronecker) else x for _, x in parts]


@pytest.mark.parametrize("name, form", CASES)
@settings(max_examples=6)
@given(
    net=networks(low=2),
    loss=st.sampled_from(LOSSES),
    reduction=st.sampled_from(["none", "mean", "sum"]),
    edges=st.lists(st.integers(0, 5), max_size=3),
)
def test_batches_give_what_all_samples_at_once_do(name, form, net, loss, reduction, edges):
    y = loss.target(Numbers(1), net.n)
    if form == LOSS:
        functions, args = (samples_loss(net, loss),), (net.x, y)
    elif form == MODEL:
        functions, args = (net.f,), (net.x,)
    else:
        functions, args = (net.f, lambda z, y: loss(z, y, reduction)), (net.x, y)
        if reduction == "none" and loss(net.f(net.params, net.x), y, "none").ndim > 1:
            functions = net.f, lambda z, y: loss(z, y, "none").sum(1)
    t = ROWS[name].make(*functions)
    if name in AT_ONCE:
        with pytest.raises(ArgumentError, match="at once"):
            streamed(t)
        return
    parts = batches([min(e, net.n) for e in edges], *args)
    try:
        wanted = t(net.params, *args)
    except ArgumentError as error:
        assert "K-factors" in str(error) or "Kronecker factors" in str(error)
        return
    assert_trees_close(*map(dense, (streamed(t)(net.params, parts), wanted)), EXACT, FLOOR)


def test_every_statistic_is_in_the_law():
    assert {name.split()[0] for name, _ in CASES} == {name.split()[0] for name in ROWS}
    assert ("kfac empirical", BOTH) in CASES


class TestScale:
    def test_at_the_minimum_of_the_loss(self, data):
        params, x, _ = data
        t = invfunc.diag_ggn(linear, F.mse_loss)
        y = linear(params, x)
        assert_trees_close(streamed(t)(params, batches([2, 7], x, y)), t(params, x, y), EXACT)

    @pytest.mark.parametrize("options", [{"weight": torch.arange(1.0, CLASSES + 1)}, {"ignore_index": 0}])
    def test_what_divides_by_weights_of_the_batch_is_refused(self, data, options):
        params, x, _ = data
        y = torch.tensor([0, 1, 2] * 3) % CLASSES
        options = {k: v.to(x) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        t = streamed(invfunc.diag_ggn(linear, lambda z, y: F.cross_entropy(z, y, **options)))
        with pytest.raises(ArgumentError, match=r"neither the sum .*ignore_index"):
            t(params, batches([2], x, y.to(x.device)))

    @pytest.mark.parametrize(
        "t",
        [
            invfunc.sum_grad_squared,
            invfunc.batch_grad,
            invfunc.diag_hessian,
            lambda f: invfunc.compiled(invfunc.variance(f)),
            lambda f: invfunc.chunked(invfunc.variance(f), 2),
        ],
    )
    def test_losses_with_a_factor_of_the_batch_are_refused(self, data, t):
        params, *rest = data
        t = streamed(t(lambda params, x, y: losses(params, x, y) / len(x)))
        with pytest.raises(SampleAxisError, match="uses the length of the batch"):
            t(params, batches([1, 4], *rest))

    @pytest.mark.parametrize(("zeros", "compiled"), [(4, False), (7, True), (8, False)])
    def test_with_a_factor_are_refused_behind_losses_that_are_zero(self, data, zeros, compiled):
        """Of labels that are ignored: a factor does not change them."""
        params, x, y = data
        y, x = torch.cat([y, y[:1]]), torch.cat([x, x[:1]])
        y[:zeros] = -1

        def f(params, x, y, factor):
            lost = F.cross_entropy(linear(params, x), y, reduction="none", ignore_index=-1)
            return lost / len(x) if factor else lost

        def stream(factor, sizes):
            t = invfunc.sum_grad_squared(partial(f, factor=factor))
            return streamed(invfunc.compiled(t) if compiled else t)(params, batches(sizes, x, y))

        assert_trees_close(stream(False, [8]), invfunc.sum_grad_squared(partial(f, factor=False))(params, x, y), EXACT)
        with pytest.raises(SampleAxisError, match="uses the length of the batch"):
            stream(True, [8])

    def test_rounding_of_losses_of_nearly_nothing_is_no_factor(self, data):
        """As trained classifiers have for most samples, which other numbers of samples round otherwise."""
        params, *rest = data

        def f(params, x, y, sure):
            return torch.where(sure, 1e-17 * len(x), losses(params, x, y))

        batch = (*(t[:8] for t in rest), torch.arange(8, device=rest[0].device) != 6)
        found = streamed(invfunc.sum_grad_squared(f))(params, [batch])
        assert_trees_close(found, invfunc.sum_grad_squared(f)(params, *batch), EXACT)

    @pytest.mark.parametrize("mixed", ["parameters", "autocast"])
    def test_rounding_of_half_precision_is_no_factor_of_the_batch(self, data, mixed):
        """Losses in float32 of what was computed in bfloat16 differ between batches by its few digits."""
        params, *rest = data
        low = torch.bfloat16 if mixed == "parameters" else torch.float32
        params, rest = tree.map_tensors(lambda t: t.to(low), params), [rest[0].to(low), rest[1]]

        def rounded(params, *batch):
            return losses(params, *batch).float()

        with torch.autocast(rest[0].device.type, enabled=mixed == "autocast"):
            t = streamed(invfunc.batch_l2_grad(rounded))
            assert all(x.isfinite().all() for x in tree.leaves(t(params, batches([5], *rest))))
            with pytest.raises(SampleAxisError, match="uses the length of the batch"):
                streamed(invfunc.batch_l2_grad(lambda *a: rounded(*a) / len(a[1])))(params, batches([5], *rest))

    @pytest.mark.parametrize("make", [invfunc.diag_ggn, partial(invfunc.kfac, fisher="exact")])
    def test_weights_are_seen_of_a_loader_that_reuses_its_memory(self, data, make):
        params, x, _ = data
        parts = batches([3, 6], x, (torch.arange(9, device=x.device) >= 4).long())
        weighted = partial(F.cross_entropy, weight=torch.arange(1.0, CLASSES + 1).to(x))
        with pytest.raises(ArgumentError, match="neither the sum"):
            streamed(make(linear, lambda z, y: weighted(z, y)))(params, in_one_memory(parts))
        t = make(linear, F.cross_entropy)
        whole = [torch.cat(z) for z in zip(*parts, strict=True)]
        found = streamed(t)(params, in_one_memory(parts))
        assert_trees_close(dense(found), dense(t(params, *whole)), EXACT)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_large_batch_behind_a_small_one(self, data, dtype):
        """Beside one sample, those of a large batch count nearly as much in a mean as in a sum."""
        params, x = tree.map_tensors(lambda z: z.to(dtype), (data[0], data[1].repeat(50, 1)))
        y = data[2].repeat(50)
        t = invfunc.diag_ggn(linear, lambda z, y: F.cross_entropy(z, y, reduction="sum"))
        assert_trees_close(streamed(t)(params, batches([1], x, y)), t(params, x, y), 0.02)
        y = y.index_fill(0, torch.arange(1, 200, device=y.device), -100)
        with pytest.raises(ArgumentError, match="neither the sum"):
            streamed(invfunc.diag_ggn(linear, F.cross_entropy))(params, batches([1], x, y))

    def test_a_scalar_that_cannot_be_looked_at_is_refused(self, data):
        t = streamed(invfunc.variance(lambda *args: losses(*args).mean()))
        with pytest.raises(ArgumentError, match=r"Return the \[N\] losses") as error:
            t(data[0], batches([2], *data[1:]))
        assert error.value.__notes__ == ["This is batch 0 of the loader."]

    @pytest.mark.parametrize("by", [1e6, 1e-9])
    def test_with_a_factor_are_refused_beyond_the_range_of_half_precision(self, data, by):
        params, *rest = data
        params, rest = tree.map_tensors(torch.Tensor.half, params), [rest[0].half(), rest[1]]

        def f(params, *batch, factor):
            lost = by * losses(params, *batch).float()
            return lost / len(batch[0]) if factor else lost

        streamed(invfunc.batch_l2_grad(partial(f, factor=False)))(params, batches([5], *rest))
        with pytest.raises(SampleAxisError, match="uses the length of the batch"):
            streamed(invfunc.batch_l2_grad(partial(f, factor=True)))(params, batches([5], *rest))


def test_losses_that_draw_are_not_compared_with_those_of_half_a_batch(data):
    def f(params, x, y):
        return F.cross_entropy(F.dropout(linear(params, x)), y, reduction="none")

    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = streamed(invfunc.sum_grad_squared(f))(data[0], batches([4], *data[1:]))
        torch.manual_seed(0)
        first, second = (invfunc.sum_grad_squared(f)(data[0], *batch) for batch in batches([4], *data[1:]))
    assert_trees_close(found, {name: first[name] + second[name] for name in first}, EXACT)


class TestOtherOutputs:
    """Samples of one batch have outputs of another shape than those of another, as sequences of other lengths."""

    @staticmethod
    def ragged():
        rand = Numbers(0)
        params = {"w": rand(4, CLASSES), "b": rand(CLASSES)}
        return params, [(rand(n, t, 4), torch.arange(n * t).reshape(n, t) % CLASSES) for n, t in ((2, 3), (3, 2))]

    @pytest.mark.parametrize("make", [invfunc.diag_ggn, invfunc.diag_hessian, invfunc.ggn_trace])
    def test_sums_are_added(self, make):
        params, parts = self.ragged()
        t = make(linear, lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum"))
        each, structures = zip(*(tree.flatten(t(params, *part)) for part in parts), strict=True)
        wanted = tree.unflatten([a + b for a, b in zip(*each, strict=True)], structures[0])
        assert_trees_close(streamed(t)(params, parts), wanted, EXACT)

    @pytest.mark.parametrize("t", [invfunc.diag_ggn, invfunc.hvp])
    def test_means_are_refused(self, t):
        params, parts = self.ragged()
        lead = [params] if t is invfunc.hvp else []
        t = t(linear, lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()))
        with pytest.raises(ArgumentError, match=r"is a mean, and a sample has outputs of shape \[3, \d\]"):
            streamed(t)(params, *lead, parts)

    def test_axes_of_outputs_are_of_the_same_ones(self, data):
        params, x, _ = data
        first = {"a": x[:3], "b": x[3:6]}

        def f(params, x):
            return {name: linear(params, z) for name, z in x.items()}

        for other in (dict(reversed(first.items())), {"a": x[:3]}):
            with pytest.raises(ArgumentError, match="outputs of one sample have shapes .*in the same order"):
                streamed(invfunc.batch_jacobian(f))(params, [first, other])


class TestLoaders:
    def test_what_gives_batches(self, data):
        params, *rest = data
        t = streamed(invfunc.grad_and_variance(losses))
        wanted = invfunc.grad_and_variance(losses)(*data)
        parts = batches([3, 5], *rest)
        loader = DataLoader(TensorDataset(*rest), batch_size=4)
        for each in (parts, tuple(parts), (part for part in parts), map(list, parts), loader):
            assert_trees_close(t(params, each), wanted, EXACT)

    @pytest.mark.parametrize("kind", [dict, UserDict])
    def test_a_mapping_is_one_argument(self, data, kind):
        params, *rest = data
        t = invfunc.batch_grad(lambda params, batch: losses(params, batch["x"], batch["y"]))
        parts = [kind(x=x, y=y) for x, y in batches([0, 3], *rest)]
        assert_trees_close(streamed(t)(params, parts), invfunc.batch_grad(losses)(*data), EXACT)

    @pytest.mark.parametrize("t", [invfunc.variance, invfunc.gram, invfunc.hvp])
    def test_that_changes_the_parameters_or_whose_batches_f_changes(self, data, t):
        params, *rest = data
        lead, parts = [params] if t is invfunc.hvp else [], batches([3, 6], *rest)
        kept = tree.map_tensors(torch.clone, params)

        def training():
            for part in parts:
                yield part
                kept["w"].add_(1)

        def writes(params, x, y):
            return losses(params, x.mul_(2), y)

        with pytest.raises(ArgumentError, match="the parameters were written in place while"):
            streamed(t(losses))(kept, *lead, training)
        with pytest.raises(invfunc.InvFuncError, match="f writes into"):
            streamed(t(writes))(params, *lead, [tuple(x.clone() for x in part) for part in batches(range(1, 9), *rest)])

    def test_nothing_in_it(self, data):
        t = streamed(invfunc.variance(losses))
        used_up = iter(batches([], *data[1:]))
        t(data[0], used_up)
        for loader in ([], used_up, [(data[1][:0], data[2][:0])]):
            with pytest.raises(ArgumentError, match="no samples|0 samples"):
                t(data[0], loader)

    def test_what_is_none(self, data):
        t = streamed(invfunc.variance(losses))
        for loader in (data[1], {"x": data[1]}, 3):
            with pytest.raises(ArgumentTypeError, match="has to give batches"):
                t(data[0], loader)
        with pytest.raises(ArgumentTypeError, match="is the class DataLoader"):
            t(data[0], DataLoader)
        with pytest.raises(ArgumentTypeError, match="got 3 positional"):
            t(*data)

    @pytest.mark.parametrize("given", [lambda x, y: ((x, y),), lambda x, y: ([x, y],), lambda x, y: (x, y)])
    def test_a_batch_is_none(self, data, given):
        params, *batch = data
        with pytest.raises(ArgumentTypeError, match=r"a loader gives batches, .* \[\(x, y\)\] of one batch"):
            streamed(invfunc.variance(losses))(params, *given(*batch))

    def test_an_error_says_which_batch(self, data):
        parts = [*batches([3], *data[1:]), (data[1][:3], data[2][:2])]
        with pytest.raises(ArgumentError, match="has 3 samples but") as error:
            streamed(invfunc.variance(losses))(data[0], parts)
        assert error.value.__notes__ == ["This is batch 2 of the loader."]


class TestComposes:
    def test_aux_is_a_list(self, data):
        t = invfunc.variance(lambda *args: (losses(*args), len(args[1])), has_aux=True)
        assert streamed(t)(data[0], batches([2, 2, 4], *data[1:]))[1] == [2, 2, 5]

    def test_a_parameter_that_one_batch_does_not_reach(self, data):
        def f(params, x, y):
            return losses(params, x, y) if len(x) > 3 else losses({**params, "w": params["w"].detach()}, x, y)

        for make in (invfunc.batch_grad, invfunc.variance, invfunc.sum_grad_squared):
            found = streamed(make(f))(data[0], batches([2], *data[1:]))
            shares = invfunc.batch_grad(losses)(*data)
            shares["w"][:2] = 0
            wanted = {
                invfunc.batch_grad: lambda g: g,
                invfunc.variance: lambda g: g.var(0, correction=0),
                invfunc.sum_grad_squared: lambda g: g.square().sum(0),
            }[make]
            assert_trees_close(found, tree.map_tensors(wanted, shares), EXACT)

    def test_it_is_of_everything(self, data):
        t = streamed(invfunc.variance(losses))
        with pytest.raises(ArgumentTypeError, match="Chunk the statistic inside"):
            invfunc.chunked(t, 2)
        with pytest.raises(ArgumentError, match=r"torch\.func"):
            torch.func.grad(lambda p: t(p, [data[1:]])["w"].sum())(data[0])
        with pytest.raises(ArgumentTypeError, match="has to be a statistic"):
            streamed(losses)
        with pytest.raises(ArgumentError, match="samples="):
            streamed(invfunc.variance(losses, samples=[0]))
        assert repr(t) == "streamed(variance(losses))"


SUMMED = [
    invfunc.variance,
    invfunc.diag_ggn,
    partial(invfunc.kfac, fisher="exact"),
    partial(invfunc.ekfac, fisher="exact"),
]
OF_EACH = [partial(invfunc.diag_ggn, per_sample=True), invfunc.sqrt_ggn]
TIMES = [make for name, make in PRODUCTS.items() if "blocks" not in name]


@pytest.mark.parametrize("make", [*SUMMED, *OF_EACH, *TIMES])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_memory_is_that_of_one_batch(make, reduction):
    """Of sums over the samples, of rows that go elsewhere, and of products."""
    rand = Numbers(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, CLASSES))
    f, params = invfunc.functional(model.to(rand(1)))
    loss = partial(F.cross_entropy, reduction=reduction)
    t = make(f, loss) if make in OF_EACH else make(lambda p, x, y: F.cross_entropy(f(p, x), y, reduction="none"))

    def batch(seed):
        return Numbers(seed)(64, 30), LOSSES[0].target(Numbers(seed), 64)

    rows = tree.map_tensors(torch.empty_like, t(params, *batch(0))) if make in OF_EACH else {}

    def peak(count):
        loader, out = partial(map, batch, range(count)), None
        if make in OF_EACH:
            out = tree.map_tensors(lambda x: torch.cat([x] * count, t.reduction.each[0]), rows)
        with nothing_collected(), Meter() as meter:
            s = streamed(t, out=out)
            v = tree.map_tensors(torch.ones_like, params)
            result = s.linearize(params, loader)(v) if make in TIMES else s(params, loader)
        return meter.peak() if make in OF_EACH else meter.peak(result)

    peak(1)
    few, many = peak(3), peak(12)
    assert many <= 1.1 * few and (not rows or few < 6 * sum(x.nbytes for x in tree.tensors((rows,))))


class TestTwoSweeps:
    """Eigenvalues are those in the basis of all samples, which have to be seen before."""

    @pytest.fixture
    def t(self):
        return invfunc.ekfac(linear, F.cross_entropy, fisher="exact")

    def test_over_what_gives_its_batches_again(self, data, t):
        params, *rest = data
        parts, seen = batches([2, 2, 5], *rest), []
        wanted = dense(t(*data))

        def generator():
            seen.append(0)
            yield from parts

        shuffled = DataLoader(TensorDataset(*rest), batch_size=4, shuffle=True)
        for loader in (parts, generator, lambda: iter(parts), shuffled):
            assert_trees_close(dense(streamed(t)(params, loader)), wanted, EXACT, FLOOR)
        assert len(seen) == 2

    def test_not_over_what_gives_them_once(self, data, t):
        params, *rest = data
        seen = []
        for each in (t, invfunc.together(invfunc.diag_ggn(linear, F.cross_entropy), t)):
            once = (seen.append(part) or part for part in batches([2], *rest))
            with pytest.raises(ArgumentTypeError, match=r"once, but \w+ looks at all samples twice.*the function that"):
                streamed(each)(params, once)
        assert not seen

    def test_of_other_samples_are_an_error(self, data, t):
        sizes = iter([9, 7])

        def loader():
            n = next(sizes)
            yield tuple(x[:n] for x in data[1:])

        with pytest.raises(ArgumentError, match="7 samples the second time, and 9 the first time"):
            streamed(t)(data[0], loader)

    def test_together_with_what_needs_one(self, data, t):
        ts = invfunc.variance(losses), invfunc.ekfac(losses, fisher="exact"), invfunc.kfac(losses, fisher="exact")
        found = streamed(invfunc.together(*ts))(data[0], batches([2, 2, 5], *data[1:]))
        for one, wanted in zip(found, invfunc.together(*ts)(*data), strict=True):
            assert_trees_close(dense(one), dense(wanted), EXACT, FLOOR)

    @pytest.mark.parametrize(
        "make", [partial(invfunc.kfac, fisher="exact"), partial(invfunc.ekfac, fisher="exact")], ids=["exact", "ekfac"]
    )
    def test_parameters_without_factors(self, data, make):
        def f(params, x):
            return x @ params["w"].exp() + params["b"]

        params, *rest = data
        parts = batches([2, 2, 5], *rest)
        with pytest.raises(ArgumentError, match="no Kronecker factors"):
            streamed(make(f, F.cross_entropy))(params, parts)
        assert streamed(make(f, F.cross_entropy, unsupported="skip"))(params, parts)["w"] is None
        t = make(f, F.cross_entropy, unsupported="diagonal")
        assert_trees_close(dense(streamed(t)(params, parts)), dense(t(*data)), EXACT, FLOOR)


class TestDrawn:
    """Each sample draws by itself: from the key that the generator gives, and its place in the data set."""

    @pytest.mark.parametrize(
        "name, form", [(n, f) for n, row in ROWS.items() for f in row.forms if row.drawn and n not in AT_ONCE]
    )
    @settings(max_examples=6)
    @given(
        net=networks(low=2),
        loss=st.sampled_from(SAMPLED),
        reduction=st.sampled_from(["mean", "sum"]),
        edges=st.lists(st.integers(0, 5), max_size=3),
    )
    def test_how_the_data_are_divided_makes_no_difference(self, name, form, net, loss, reduction, edges):
        args = net.x, loss.target(Numbers(1), net.n)
        functions = (samples_loss(net, loss),) if form == LOSS else (net.f, lambda z, y: loss(z, y, reduction))
        found = []
        for parts in ([args], batches([min(e, net.n) for e in edges], *args)):
            try:
                found.append(streamed(ROWS[name].make(*functions))(net.params, parts))
            except ArgumentError as error:
                assert "K-factors" in str(error) or "Kronecker factors" in str(error)
                return
        assert_trees_close(*map(dense, found), EXACT, FLOOR)

    @pytest.mark.parametrize("loss", SAMPLED, ids=repr)
    @pytest.mark.parametrize("sample", [None, lambda z, g: torch.rand(z.shape, generator=g, dtype=z.dtype).to(z)])
    def test_it_is_the_sum_of_what_each_sample_gives(self, data, loss, sample):
        params, x, _ = data
        y = x[:, :CLASSES] if sample else loss.target(Numbers(0), len(x))

        def of(generator):
            each = lambda z, y: (z - y).square().sum(1) if sample else loss(z, y, "sum")  # noqa: E731
            return invfunc.diag_ggn(linear, each, mc_samples=2, generator=generator, sample=sample)

        found = streamed(of(seeded(3)))(params, batches([2, 2, 7], x, y))
        key = int(torch.randint(2**31, (), generator=seeded(3)))
        parts = enumerate(batches(range(1, 9), x, y))
        each = [of(seeded(key + i))(params, *part) for i, part in parts]
        assert_trees_close(found, {name: sum(one[name] for one in each) for name in params}, EXACT)

    def test_statistics_of_the_same_generator_are_independent_unless_they_draw_the_same(self, data):
        generator = seeded()
        of = partial(invfunc.diag_ggn, linear, F.cross_entropy, generator=generator)
        a, b, c = streamed(invfunc.together(of(mc_samples=1), of(mc_samples=1), of(mc_samples=2)))(data[0], [data[1:]])
        assert_trees_close(a, b, EXACT)
        assert (a["w"] - c["w"]).abs().max() > 1e-3
        again = streamed(of(mc_samples=1))(data[0], [data[1:]])
        assert (a["w"] - again["w"]).abs().max() > 1e-3  # the generator goes on
        before = torch.get_rng_state()
        streamed(of(mc_samples=1))(data[0], [data[1:]])
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.quick
class TestReduction:
    """A loss that is one number, of which the caller says that it is a sum."""

    @pytest.mark.parametrize(
        "make",
        [
            invfunc.variance,
            invfunc.diag_ggn,
            invfunc.batch_grad,
            invfunc.hvp,
            partial(invfunc.kfac, fisher="exact"),
            partial(invfunc.ekfac, fisher="exact"),
        ],
        ids=["variance", "diag_ggn", "batch_grad", "hvp", "kfac", "ekfac"],
    )
    def test_it_is_that_of_all_samples(self, data, make):
        t, params, rest = make(lambda *args: losses(*args).sum()), data[0], data[1:]
        v = [params] if hasattr(t, "linearize") else []
        wanted, parts = t(params, *v, *rest), batches([2, 5], *rest)
        assert_trees_close(streamed(t, reduction="sum")(params, *v, parts), wanted, EXACT, FLOOR)
        assert_trees_close(distributed(streamed(t, reduction="sum"))(params, *v, parts), wanted, EXACT, FLOOR)

    def test_what_it_is_not_of(self, data):
        parts = [data[1:]]
        with pytest.raises(ArgumentError, match="For a mean, return the sum"):
            streamed(invfunc.variance(losses), reduction="mean")
        with pytest.raises(ArgumentError, match=r"takes the \[N\] losses"):
            streamed(invfunc.gram(losses), reduction="sum")
        for t, v in ((invfunc.variance(losses), []), (invfunc.hvp(losses), [data[0]])):
            with pytest.raises(ArgumentError, match="Leave reduction out"):
                streamed(t, reduction="sum")(data[0], *v, parts)


# Losses and outputs that cannot be joined over batches are refused, in statistics of a model and its loss, too

PARAMS = {"w": torch.eye(3) + 0.1}
BATCHES = [(Numbers(i)(8, 3).float().index_fill(0, torch.tensor([0]), 3.0 + i), torch.arange(8) % 3) for i in range(2)]


def total(z, y):
    return F.cross_entropy(z, y, reduction="sum")


@pytest.mark.parametrize("make", [invfunc.diag_ggn, invfunc.diag_hessian, invfunc.ggnvp])
@pytest.mark.parametrize(
    "f",
    [lambda p, x: x @ p["w"] / len(x), lambda p, x: x / x.abs().max() @ p["w"], lambda p, x: (x - x.mean(0)) @ p["w"]],
    ids=["divided by the number", "divided by the largest", "mixed"],
)
def test_outputs_of_a_model_that_depend_on_the_batch(make, f):
    t = streamed(make(f, total))
    with pytest.raises(SampleAxisError, match="in a smaller batch"):
        t(PARAMS, PARAMS, BATCHES) if make is invfunc.ggnvp else t(PARAMS, BATCHES)


@pytest.mark.parametrize("largest", [0, 7])
def test_losses_that_are_divided_by_the_largest(largest):
    """Beside which all stay as they are."""

    def f(p, x, y):
        losses = F.cross_entropy(x @ p["w"], y, reduction="none")
        return losses / losses.detach().max()

    x, y = Numbers(1)(8, 3).float(), torch.arange(8) % 3
    x[largest] = -9.0 * F.one_hot(y[largest], 3)
    with pytest.raises(SampleAxisError, match="in a smaller batch"):
        streamed(invfunc.variance(f))(PARAMS, [(x, y)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_learnt_by_heart_is_taken(dtype):
    """Of which all losses are nothing but rounding."""
    q, x = torch.linalg.qr(Numbers(0)(64, 64))[0].to(dtype), Numbers(1)(66, 64).to(dtype)

    def f(p, x):
        return F.mse_loss(x @ p @ p.T, x, reduction="none").mean(1)

    batches = [(x[:33],), (x[33:],)]
    streamed(invfunc.variance(f))(q, batches)
    streamed(invfunc.hvp(f))(q, q, batches)


def test_outputs_without_entries():
    t = streamed(invfunc.ggnvp(lambda p, x: (x @ p["w"], x[:, :0]), lambda z, y: total(z[0], y)))
    t(PARAMS, PARAMS, BATCHES)
