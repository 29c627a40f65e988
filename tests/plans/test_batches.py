"""Plans of the batches of a data set: the result is that of the data set without plans, to the last place."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import compiled, distributed, explain, streamed, tree
from invfunc.testing.oracles import assert_trees_close
from tests.data_sets.test_streamed import AT_ONCE, batches, linear, losses
from tests.networks import LOSSES, NETWORKS, network
from tests.plans.calls import hits, quietly, whys
from tests.rows import CASES, MODEL, made_of
from tests.strategies import Numbers, seeded

EXACT = 1e-12
FAMILIES = list(NETWORKS)
BY_BATCHES = [case for case in CASES if not case.startswith(("gram", *AT_ONCE))]
EDGES = [2, 4, 4, 6]
"""Of seven samples: batches of two, one that is empty, and a last one of one sample."""


def made(case):
    """A statistic with generators of its own, its parameters and all samples."""
    row, form = CASES[case]
    net = network(FAMILIES[list(CASES).index(case) % len(FAMILIES)], 7)
    if form == MODEL:
        return row.make(net.f), net.params, (net.x,)
    return made_of(row, net.f, LOSSES[0], form), net.params, (net.x, LOSSES[0].target(Numbers(0), 7))


def outcome(call, *args):
    try:
        return call(*args)
    except invfunc.InvFuncError as error:
        return type(error).__name__


@pytest.fixture
def data():
    rand = Numbers(0)
    params = {"w": rand(4, 5), "b": rand(5)}
    return params, rand(7, 4), torch.arange(7) % 5


@pytest.mark.parametrize("case", BY_BATCHES)
def test_is_the_data_set_without_plans(case):
    """At other parameters, too, in a call after the other; generators go on as they do without."""
    (t, params, args), (own, _, _) = made(case), made(case)
    plain, c = streamed(t), streamed(compiled(own))
    for k in range(2):
        params = tree.map_tensors(lambda p, k=k: p * (1 + 0.1 * k), params)
        parts = batches(EDGES, *args)
        wanted, found = outcome(plain, params, parts), quietly(outcome, c, params, parts)
        if isinstance(wanted, str):
            assert found == wanted
            return
        assert_trees_close(found, wanted, EXACT)
    assert hits(c.plans) >= 4 or "draws from a generator" in str(whys(c.plans)), whys(c.plans)


PRODUCTS = {
    "hvp": lambda: invfunc.hvp(losses),
    "ggnvp": lambda: invfunc.ggnvp(linear, F.cross_entropy),
    "blocks": lambda: invfunc.ggnvp(linear, F.cross_entropy, blocks=True),
    "ggnvp drawn": lambda: invfunc.ggnvp(linear, F.cross_entropy, mc_samples=2, generator=seeded(3), fisher="mc"),
}


@pytest.mark.quick
@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_those_of_the_data_set(make, data):
    params, *args = data
    t, c = streamed(make()), streamed(compiled(make()))
    parts, lead = batches(EDGES, *args), [2] * t.lead
    for k in range(2):
        v = tree.map_tensors(lambda p, k=k: Numbers(k)(*lead, *p.shape), params)
        assert_trees_close(c(params, v, parts), t(params, v, parts), EXACT)
        (a, b) = (of.linearize(params, parts) for of in (c, t))
        for _ in range(2):
            assert_trees_close(a(v), b(v), EXACT)
    assert hits(c.plans) == 2 * 3 * 4 - 2


@pytest.mark.quick
class TestWays:
    def test_of_one_process(self, data):
        params, *args = data
        for make in (
            lambda: invfunc.diag_ggn(linear, F.cross_entropy, mc_samples=2, generator=seeded(3)),
            lambda: invfunc.ekfac(linear, F.cross_entropy, generator=seeded(3)),
        ):
            wanted = streamed(make())(params, batches(EDGES, *args))
            c, by_loader = distributed(compiled(make())), distributed(streamed(compiled(make())))
            assert repr(by_loader) == f"distributed(streamed(compiled({make()!r})))"
            assert_trees_close(by_loader(params, batches(EDGES, *args)), wanted, EXACT)
            assert hits(by_loader.plans) > 0
            c(params, *args)
            assert repr(c) == f"distributed(compiled({make()!r}))"
        p, v = invfunc.ggnvp(linear, F.cross_entropy), tree.map_tensors(torch.cos, params)
        c = distributed(compiled(p))
        for _ in range(2):
            assert_trees_close(c(params, v, *args), p(params, v, *args), EXACT)
        assert hits(c.plans) == 1

    def test_a_checkpoint_is_that_of_the_statistic(self, data, tmp_path):
        """Begun without plans and ended by them, or the other way round."""
        params, *args = data
        parts, make = batches(EDGES, *args), lambda: invfunc.ekfac(linear, F.cross_entropy, generator=seeded(3))
        wanted, file = streamed(make())(params, parts), tmp_path / "state.pt"
        for first, second in ((make(), compiled(make())), (compiled(make()), make())):
            seen = []

            def loader(seen=seen):
                seen.append(0)
                yield from parts[:3]
                if len(seen) == 2:
                    raise KeyboardInterrupt
                yield from parts[3:]

            with pytest.raises(KeyboardInterrupt):
                streamed(first, checkpoint=file, every=0)(params, loader)
            assert_trees_close(streamed(second, checkpoint=file)(params, parts), wanted, EXACT)

    def test_rows_go_out(self, data):
        params, *args = data
        t, out = invfunc.batch_grad(losses), tree.map_tensors(lambda p: p.new_zeros(7, *p.shape), data[0])
        c = compiled(t)
        streamed(c, out=out)(params, batches(EDGES, *args))
        assert_trees_close(out, t(params, *args), EXACT)
        assert hits(c.of_batches) == 2  # the plans of all that is made of c

    def test_what_has_no_plan_runs_without_and_says_so_once(self, data):
        params, *args = data
        t = invfunc.variance(lambda p, x, y: losses(p, x, y) * float(x.detach().numpy().shape[1]))
        c, parts = streamed(compiled(t)), batches(EDGES, *args)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                assert_trees_close(c(params, parts), streamed(t)(params, parts), EXACT)
        assert [str(w.message) for w in said if "numpy" in str(w.message)][0].startswith("compiled(variance(<lambda>))")
        assert len(said) == 1 and said[0].filename == __file__

    def test_an_f_that_mixes_samples_or_has_factors_is_refused(self, data):
        params, *args = data
        for f in (lambda p, x, y: losses(p, x, y) / len(x), lambda p, x, y: losses(p, x - x.mean(0), y)):
            for make in (invfunc.sum_grad_squared, invfunc.hvp):
                c = streamed(compiled(make(f)))
                v = (tree.map_tensors(torch.cos, params),) if make is invfunc.hvp else ()
                for _ in range(2):
                    with pytest.raises(invfunc.errors.SampleAxisError):
                        c(params, *v, batches(EDGES, *args))

    def test_explain_tells_of_the_plan_of_the_first_batch(self, data):
        params, *args = data
        c = streamed(compiled(invfunc.kfac(linear, F.cross_entropy, generator=seeded(3))))
        before = c.t.drawing.generator.get_state()
        found = explain(c)(params, batches(EDGES, *args))
        assert torch.equal(c.t.drawing.generator.get_state(), before)
        assert found.name == "streamed(compiled(kfac(linear, cross_entropy)))"
        assert "a plan of" in str(found) and "torch.ops.aten" in found.code
