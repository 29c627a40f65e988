"""streamed: results with a sample axis go somewhere else batch by batch, and need not fit in memory."""

import io
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import invfunc
from invfunc import InvFuncError, chunked, explain, streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from invfunc.evaluation.batches import Feed, batches_of
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import EXACT, FLOOR, SAMPLED, batches, data, linear, losses  # noqa: F401
from tests.networks import CLASSES, LOSSES, networks, samples_loss
from tests.rows import BOTH, LOSS, PRODUCTS, ROWS
from tests.strategies import Numbers, seeded

EACH = {n: row for n, row in ROWS.items() if len(row.make(F.mse_loss).reduction.each) == 1 and "gram" not in n}
CASES = [(name, form) for name, row in EACH.items() for form in row.forms]


def empty_like(result):
    """Tensors with the shapes of a result, which hold NaN."""
    return tree.map_tensors(lambda x: torch.full_like(x, torch.nan), result)


def test_every_statistic_with_a_sample_axis_is_here():
    names = {name.split()[0] for name in EACH}
    assert names == {
        "batch_grad",
        "batch_l2_grad",
        "diag_ggn",
        "diag_hessian",
        "batch_jacobian",
        "predictive_covariance",
        "sketched_grad",
        "sqrt_ggn",
    }


@pytest.mark.parametrize("name, form", CASES)
@settings(max_examples=3)
@given(
    net=networks(low=2),
    loss=st.sampled_from([loss for loss in LOSSES if loss.called != "log cosh of outputs"]),
    reduction=st.sampled_from(["mean", "sum"]),
    edges=st.lists(st.integers(0, 5), max_size=3),
)
def test_it_is_the_result(name, form, net, loss, reduction, edges):
    args = (net.x, loss.target(Numbers(1), net.n))
    functions = {LOSS: (samples_loss(net, loss),), BOTH: (net.f, lambda z, y: loss(z, y, reduction))}.get(form)
    functions, args = (functions, args) if functions else ((net.f,), (net.x,))
    parts = batches([min(e, net.n) for e in edges], *args)
    wanted = streamed(ROWS[name].make(*functions))(net.params, parts)
    out = empty_like(wanted)
    found = streamed(ROWS[name].make(*functions), out=out)(net.params, parts)
    assert_trees_close(found, wanted, EXACT, FLOOR)
    for x, y in zip(tree.tensors((found,)), tree.tensors((out,)), strict=True):
        assert x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and x.shape == y.shape
    if form == BOTH and reduction == "mean" and name != "batch_jacobian":
        with pytest.raises(ArgumentError, match="whose N is known after the last batch"):
            streamed(ROWS[name].make(*functions), out=lambda start, rows: None)(net.params, parts)
        return
    told = []
    assert streamed(ROWS[name].make(*functions), out=lambda *what: told.append(what))(net.params, parts) is None
    sizes = [n for n in (len(tree.tensors(part)[0]) for part in parts) if n]
    assert [start for start, _ in told] == [sum(sizes[:k]) for k in range(len(sizes))]
    axis = ROWS[name].make(*functions).reduction.each[0]
    leaves = zip(*(tree.tensors((rows,)) for _, rows in told), strict=True)
    for x, y in zip(leaves, tree.tensors((wanted,)), strict=True):
        assert_trees_close(torch.cat(x, axis), y, EXACT, FLOOR)


class TestPlaces:
    def test_files(self, data, tmp_path):  # noqa: F811
        params, *rest = data
        wanted = invfunc.batch_grad(losses)(*data)
        size = wanted["w"].numel()
        w = torch.from_file(str(tmp_path / "w"), shared=True, size=size, dtype=wanted["w"].dtype).view(
            wanted["w"].shape
        )
        b = np.memmap(tmp_path / "b", dtype=str(wanted["b"].dtype)[6:], mode="w+", shape=tuple(wanted["b"].shape))
        streamed(invfunc.batch_grad(losses), out={"w": w, "b": torch.from_numpy(b)})(params, batches([2, 7], *rest))
        b.flush()
        again = torch.from_file(str(tmp_path / "b"), size=b.size, dtype=wanted["b"].dtype).view(wanted["b"].shape)
        assert_trees_close({"w": w, "b": again}, tree.map_tensors(torch.Tensor.cpu, wanted), EXACT)


class TestRefused:
    """Before anything is written."""

    @pytest.mark.parametrize(
        "change, text",
        [
            (lambda x: x[:8], r"out\['b'\] has shape \(8, 3\), but there are 9 samples"),
            (lambda x: x.float(), r"out\['b'\] is torch.float32 \(9, 3\), but has to be torch.float64 \(N, 3\)"),
            (lambda x: x[:, :2].clone(), r"out\['b'\] is torch.float64 \(9, 2\), but has to be torch.float64 \(N, 3\)"),
            (lambda x: x[..., None], r"out\['b'\] is torch.float64 \(9, 3, 1\), but"),
            (lambda x: x[:1].expand(9, 3), r"out\['b'\] has no memory of its own"),
            (lambda x: x.numpy(), r"out\['b'\] is of type ndarray.*from_numpy"),
            (lambda x: None, r"out\['b'\] is of type NoneType"),
        ],
    )
    def test_of_what_does_not_fit(self, data, change, text):  # noqa: F811
        params, *rest = tree.map_tensors(lambda x: x.cpu().double() if x.is_floating_point() else x.cpu(), data)
        out = empty_like(invfunc.batch_grad(losses)(params, *rest))
        wrong = {**out, "b": change(out["b"])}
        with pytest.raises((ArgumentError, ArgumentTypeError), match=text):
            streamed(invfunc.batch_grad(losses), out=wrong)(params, batches([2], *rest))
        assert out["w"].isnan().all()

    def test_other_parts_and_shared_memory(self, data):  # noqa: F811
        params, *rest = data
        out = empty_like(invfunc.batch_grad(losses)(*data))
        t = invfunc.batch_l2_grad(losses)
        x = out["b"].new_empty(20)
        with pytest.raises(
            ArgumentError, match=r"other parts than the result, which are out\['b'\], out\['w'\]|out\['w'\]"
        ):
            streamed(t, out={"w": x})(params, [rest])
        for wrong in ({"w": x[:9], "b": x[9:18]}, {"w": x[:9], "b": params["b"]}):
            with pytest.raises(ArgumentError, match="no memory of its own|shape"):
                streamed(t, out=wrong)(params, [rest])

    def test_what_has_no_rows(self, tmp_path):
        out = {"w": torch.ones(1)}
        for t in (
            invfunc.variance(losses),
            invfunc.clipped_grad(losses, max_norm=1.0),
            invfunc.kfac(linear, F.mse_loss, fisher="exact"),
        ):
            with pytest.raises(ArgumentError, match="no result with a sample axis"):
                streamed(t, out=out)
        with pytest.raises(ArgumentError, match="variance has no result"):
            streamed(invfunc.together(invfunc.batch_grad(losses), invfunc.variance(losses)), out=out)
        with pytest.raises(ArgumentError, match="after the last batch"):
            streamed(invfunc.reduced(invfunc.batch_grad(losses), torch.sum), out=out)
        with pytest.raises(ArgumentError, match="product has no sample axis"):
            streamed(invfunc.hvp(losses), out=out)
        with pytest.raises(ArgumentError, match="not in a checkpoint"):
            streamed(invfunc.batch_grad(losses), out=out, checkpoint=tmp_path / "state")


# streamed: where batches are moved, and the bar that shows how many have come

PRODUCT = invfunc.hvp(losses)


def square(params, x):
    return (x @ params["w"]).square()


class TestDevice:
    @pytest.mark.parametrize("device, goal", [("cpu", "cpu"), (torch.device("meta"), "meta"), (None, "meta")])
    def test_batches_go_to_that_of_the_first_parameter_or_another(self, device, goal):
        params, seen = {"a": torch.ones(3, device="meta"), "b": torch.ones(3)}, []

        def visit(args, n):
            seen.append((args[1].device.type, n))
            return len(args[1])

        batches_of([torch.ones(4, 3), torch.ones(1, 3)], params, 0, Feed.of(device, ""))(visit, enumerate)
        assert seen == [(goal, 0), (goal, 4)]

    @pytest.mark.parametrize("t", [invfunc.variance(losses), PRODUCT], ids=["statistic", "product"])
    def test_one_without_parameters_is_refused_before_the_first_batch(self, data, t):  # noqa: F811
        parts = iter(batches([2], *data[1:]))
        v = (data[0],) * (t is PRODUCT)
        with pytest.raises(ArgumentError, match=r"device='meta'.* parameters, which are on cpu.*Move the parameters"):
            streamed(t, device="meta")(data[0], *v, parts)
        assert len(list(parts)) == 2

    @pytest.mark.parametrize("device", ["gpu", 1.5])
    def test_what_is_none(self, device):
        with pytest.raises(ArgumentError, match=r"streamed\(t, device=.*no device"):
            streamed(invfunc.variance(losses), device=device)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.ones(7, 3))


class TestProgress:
    @pytest.mark.parametrize("kind", ["loader", "stream", "function"])
    def test_samples_a_second_and_what_is_left(self, kind, monkeypatch):
        monkeypatch.setattr(sys, "stderr", Terminal())
        data_set = torch.ones(7, 3) if kind == "loader" else Stream()
        loader = DataLoader(data_set, batch_size=2)
        t = streamed(invfunc.sum_grad_squared(square), progress=True)
        t({"w": torch.ones(3)}, loader if kind != "function" else lambda: iter(loader))
        shown = sys.stderr.getvalue().split("\r")[-1]
        assert shown.startswith("streamed(sum_grad_squared(square)): ") and " samples/s]" in shown
        assert ("4/4 [" in shown) == (kind == "loader") and "4batch" in shown.replace("4/4", "4batch")


# explain(streamed(t)): how often the loader is gone through, and what is done with its first batch

STATISTICS = {
    "variance": lambda: invfunc.variance(losses),
    "diag_ggn": lambda: invfunc.chunked(invfunc.diag_ggn(linear, F.cross_entropy), 2),
    "drawn": lambda: invfunc.diag_ggn(linear, F.cross_entropy, mc_samples=2, generator=seeded()),
    "together": lambda: invfunc.together(invfunc.batch_grad(losses), invfunc.diag_hessian(losses)),
    "reduced": lambda: invfunc.reduced(invfunc.batch_grad(losses), torch.sum),
    "ekfac": lambda: invfunc.ekfac(linear, F.cross_entropy, generator=seeded()),
}


@pytest.mark.parametrize("called", STATISTICS)
def test_it_is_that_of_the_first_batch(called, data):  # noqa: F811
    params, *rest = data
    t, parts = STATISTICS[called](), batches([0, 2, 5], *rest)
    found, alone = explain(streamed(t))(params, parts), explain(t)(params, *parts[1])
    sweeps = 2 if called == "ekfac" else 1
    assert found == replace(alone, name=repr(streamed(t)), sweeps=sweeps, batches=4)
    first, second, *others = str(found).splitlines()
    assert first == f"{streamed(t)!r}: {found.why}" and others == str(alone).splitlines()[1:]
    assert second == f"  {['1 sweep', '2 sweeps'][sweeps - 1]} over 4 batches; for the first batch, in all:"


def test_nothing_is_drawn_and_nothing_is_taken_away(data):  # noqa: F811
    params, *rest = data
    generator = seeded()
    t = streamed(invfunc.diag_ggn(linear, F.cross_entropy, mc_samples=1, generator=generator))
    loader = DataLoader(TensorDataset(*rest), batch_size=4, shuffle=True)
    before = torch.get_rng_state(), generator.get_state()
    assert explain(t)(params, loader).batches == 3
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.equal(generator.get_state(), before[1])
    once = iter(batches([3], *rest))
    with pytest.raises(ArgumentTypeError, match=r"^explain\(streamed\(.*gives its batches once"):
        explain(t)(params, once)
    assert len(list(once)) == 2


# streamed: products with the matrix of a data set that comes batch by batch

BLOCKS = [make for name, make in PRODUCTS.items() if "blocks" in name]
WHOLE = {name: make for name, make in PRODUCTS.items() if "blocks" not in name}
each_product = pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)


@pytest.fixture
def drawn():
    rand = Numbers(0)
    params = {"w": rand(4, CLASSES), "b": rand(CLASSES)}
    return params, rand(9, 4), LOSSES[0].target(rand, 9)


def vector(params, *lead):
    rand = Numbers(5)
    return tree.map_tensors(lambda p: rand(*lead, *p.shape), params)


@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
@settings(max_examples=8)
@given(
    net=networks(low=2),
    loss=st.sampled_from(LOSSES),
    reduction=st.sampled_from(["of f", "none", "mean", "sum"]),
    edges=st.lists(st.integers(0, 5), max_size=3),
    once=st.booleans(),
)
def test_batches_give_what_all_samples_at_once_do(make, net, loss, reduction, edges, once):
    args, v = (net.x, loss.target(Numbers(1), net.n)), vector(net.params, *[2] * (make in BLOCKS))
    if reduction == "of f":
        t = make(samples_loss(net, loss))
    elif reduction == "none":
        t = make(net.f, lambda z, y: loss(z, y, "none").reshape(len(z), -1).sum(1))
    else:
        t = make(net.f, lambda z, y: loss(z, y, reduction))
    parts = batches([min(e, net.n) for e in edges], *args)
    try:
        wanted = t(net.params, v, *args)
    except InvFuncError as error:
        with pytest.raises(type(error)):
            streamed(t)(net.params, v, parts)
        return
    assert_trees_close(streamed(t)(net.params, v, iter(parts) if once else parts), wanted, EXACT, FLOOR)


@settings(max_examples=8)
@given(
    net=networks(low=2),
    loss=st.sampled_from(SAMPLED),
    reduction=st.sampled_from(["mean", "sum"]),
    edges=st.lists(st.integers(0, 5), max_size=3),
)
def test_however_the_data_are_divided_the_same_columns_are_drawn(net, loss, reduction, edges):
    args, v = (net.x, loss.target(Numbers(1), net.n)), vector(net.params)
    drawn = {"mc_samples": 2, "generator": seeded(3)}
    found = streamed(invfunc.ggnvp(net.f, lambda z, y: loss(z, y, reduction), fisher="mc", **drawn))(
        net.params, v, batches([min(e, net.n) for e in edges], *args)
    )
    drawn["generator"] = seeded(3)
    root = streamed(invfunc.sqrt_ggn(net.f, lambda z, y: loss(z, y, reduction), **drawn))(net.params, [args])
    along = sum(
        (s * x).reshape(*s.shape[:2], -1).sum(2) for s, x in zip(tree.tensors(root), tree.tensors(v), strict=True)
    )
    wanted = tree.map_tensors(lambda s: (s * along.reshape(*along.shape, *[1] * (s.ndim - 2))).sum((0, 1)), root)
    assert_trees_close(found, wanted, EXACT, FLOOR)


class TestWhatIsRefused:
    @each_product
    def test_a_number_that_does_not_say_its_scale(self, drawn, make):
        t = streamed(make(lambda *args: losses(*args).mean()))
        with pytest.raises(ArgumentError, match=r"Return the \[N\] losses") as error:
            t(drawn[0], vector(drawn[0]), batches([2], *drawn[1:]))
        assert error.value.__notes__ == ["This is batch 0 of the loader."]
        weighted = lambda z, y: F.cross_entropy(z, y, ignore_index=0)  # noqa: E731
        y = torch.tensor([0, 1, 2] * 3, device=drawn[1].device) % CLASSES
        with pytest.raises(ArgumentError, match="neither the sum"):
            streamed(make(linear, weighted))(drawn[0], vector(drawn[0]), batches([2], drawn[1], y))

    def test_wrong_arguments(self, drawn):
        params, *rest = drawn
        t, v = streamed(invfunc.hvp(losses)), vector(params)
        with pytest.raises(ArgumentTypeError, match="takes the parameters, v and a loader, and got 4"):
            t(params, v, *rest)
        with pytest.raises(ArgumentTypeError, match="takes the parameters and a loader, and got 3"):
            t.linearize(params, *rest)
        with pytest.raises(ArgumentTypeError, match="has to give batches"):
            t(params, v, rest[0])
        with pytest.raises(ArgumentError, match=r"v\['w'\] has shape"):
            t(params, {**v, "w": v["w"][:1]}, [rest])
        assert repr(t) == "streamed(hvp(losses))"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_kept_in_more_digits_than_halves_have(drawn, dtype):
    params, x = tree.map_tensors(lambda z: z.to(dtype), (drawn[0], drawn[1].repeat(60, 1)))
    y, v = drawn[2].repeat(60), tree.map_tensors(lambda z: z.to(dtype), vector(drawn[0]))
    t = invfunc.ggnvp(linear, lambda z, y: F.cross_entropy(z, y, reduction="sum"))
    found = streamed(t)(params, v, batches(range(9, 540, 9), x, y))
    assert found["w"].dtype == dtype
    assert_trees_close(found, t(params, v, x, y), 0.03 if dtype == torch.bfloat16 else 1e-5)


# chunked(..., progress=True): a bar of exactly the passes that are made

ONE = {
    "outputs": (lambda: invfunc.diag_ggn(linear, F.cross_entropy), {"n": 2, "over": "outputs"}, 2),
    "samples": (lambda: invfunc.variance(losses), {"n": 4}, 4),
    "a size": (lambda: invfunc.variance(losses), {"chunk_size": 2}, 5),
    "more than there are": (lambda: invfunc.batch_grad(losses), {"n": 20}, 9),
    "params": (lambda: invfunc.diag_ggn(linear, F.cross_entropy), {"n": 2, "over": "params"}, 2),
    "twice": (lambda: invfunc.ekfac(linear, F.cross_entropy, fisher="exact"), {"n": 3, "over": "samples"}, 6),
    "several": (lambda: invfunc.together(invfunc.variance(losses), invfunc.sqrt_ggn(losses)), {"n": 2}, None),
}


def terminal(monkeypatch):
    """The last text that a terminal shows."""
    found = Terminal()
    monkeypatch.setattr(sys, "stderr", found)
    return lambda: found.getvalue().split("\r")[-1]


@pytest.mark.parametrize("called", ONE)
def test_it_ends_with_the_passes_that_were_made(called, data, monkeypatch):  # noqa: F811
    (make, options, passes), shown = ONE[called], terminal(monkeypatch)
    found = chunked(make(), **options, progress=True)(*data)
    title, done, total = re.match(r"(.*): 100%\|.*\| (\d+)/(\d+) \[", shown()).groups()
    assert title == repr(chunked(make(), **options)) and done == total
    assert passes is None or int(done) == passes
    assert int(done) == invfunc.explain(chunked(make(), **options))(*data).pullbacks
    assert_trees_close(found, chunked(make(), **options)(*data), 1e-12)


def test_none_is_shown_but_where_somebody_looks(data, capsys, monkeypatch):  # noqa: F811
    t = chunked(invfunc.variance(losses), 3, progress=True)
    t(*data)
    assert capsys.readouterr().err == ""
    shown = terminal(monkeypatch)
    invfunc.streamed(t)(data[0], [data[1:]])
    invfunc.explain(t)(*data)
    chunked(invfunc.variance(losses), 3)(*data)
    assert shown() == ""


def test_without_tqdm(data, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for t in (invfunc.ekfac(linear, F.cross_entropy, generator=seeded()), linear):
        with pytest.raises(MissingExtraError, match=r"^chunked\(.*tqdm is missing"):
            chunked(t, 2, progress=True)(*data[: 2 + (t is not linear)])
