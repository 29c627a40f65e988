"""streamed: products with the matrix of a data set that comes batch by batch."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import InvFuncError, streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import EXACT, FLOOR, SAMPLED, batches, linear, losses
from tests.networks import CLASSES, LOSSES, networks, samples_loss
from tests.rows import PRODUCTS
from tests.strategies import Numbers, seeded

BLOCKS = [make for name, make in PRODUCTS.items() if "blocks" in name]
WHOLE = {name: make for name, make in PRODUCTS.items() if "blocks" not in name}
each_product = pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)


@pytest.fixture
def data():
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
    def test_a_number_that_does_not_say_its_scale(self, data, make):
        t = streamed(make(lambda *args: losses(*args).mean()))
        with pytest.raises(ArgumentError, match=r"Return the \[N\] losses") as error:
            t(data[0], vector(data[0]), batches([2], *data[1:]))
        assert error.value.__notes__ == ["This is batch 0 of the loader."]
        weighted = lambda z, y: F.cross_entropy(z, y, ignore_index=0)  # noqa: E731
        y = torch.tensor([0, 1, 2] * 3, device=data[1].device) % CLASSES
        with pytest.raises(ArgumentError, match="neither the sum"):
            streamed(make(linear, weighted))(data[0], vector(data[0]), batches([2], data[1], y))

    def test_wrong_arguments(self, data):
        params, *rest = data
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
def test_sums_are_kept_in_more_digits_than_halves_have(data, dtype):
    params, x = tree.map_tensors(lambda z: z.to(dtype), (data[0], data[1].repeat(60, 1)))
    y, v = data[2].repeat(60), tree.map_tensors(lambda z: z.to(dtype), vector(data[0]))
    t = invfunc.ggnvp(linear, lambda z, y: F.cross_entropy(z, y, reduction="sum"))
    found = streamed(t)(params, v, batches(range(9, 540, 9), x, y))
    assert found["w"].dtype == dtype
    assert_trees_close(found, t(params, v, x, y), 0.03 if dtype == torch.bfloat16 else 1e-5)
