"""streamed: results with a sample axis go somewhere else batch by batch, and need not fit in memory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import EXACT, FLOOR, batches, data, linear, losses  # noqa: F401
from tests.networks import LOSSES, networks, samples_loss
from tests.rows import BOTH, LOSS, ROWS
from tests.strategies import Numbers

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
