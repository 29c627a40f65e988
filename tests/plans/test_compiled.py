"""Calls that are repeated by a plan give what they give without it, of other numbers: every statistic and product."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import compiled, tree
from invfunc.testing.laws.rows import CASES, MODEL
from invfunc.testing.oracles import assert_trees_close
from tests.networks import LOSSES, NETWORKS, network
from tests.plans.calls import EXACT, hits, loss, other, outcome, quietly, whys
from tests.strategies import Numbers
from tests.structures import always

FAMILIES = list(NETWORKS)


def called(row, form, family, seed=0):
    """A statistic of a network, and how it is called."""
    net = network(family, 4, seed)
    if form == MODEL:
        return row.make(net.f), (net.params, net.x)
    return row.of(net.f, LOSSES[0], form), (net.params, net.x, LOSSES[0].target(Numbers(seed), 4))


@pytest.mark.parametrize("case", CASES)
def test_is_the_call_itself_at_other_numbers(case):
    """Of one network each; the next case takes the next one."""
    row, form = CASES[case]
    family = FAMILIES[list(CASES).index(case) % len(FAMILIES)]
    t, args = called(row, form, family)
    c, refused = compiled(called(row, form, family)[0]), False
    for k in (0, 1, 2):
        (wanted, after), (found, ours) = outcome(t, other(args, k)), quietly(outcome, c, other(args, k))
        refused = isinstance(wanted, str)
        if refused:
            assert found == wanted
        else:
            assert_trees_close(found, wanted, EXACT)
        assert torch.equal(after, ours)
    draws_by_itself = "sketched_grad" in case and any("it draws from a generator that is not" in w for w in whys(c))
    assert refused or hits(c) > 0 or draws_by_itself, whys(c)


@pytest.mark.parametrize(
    "make", [invfunc.diag_ggn, partial(invfunc.diag_ggn, per_sample=True), partial(invfunc.kfac, fisher="exact")]
)
def test_columns_by_structure_are_planned_where_they_are_checked_by_numbers(make):
    """Of a token head, which the loss transposes: that is looked at by numbers that are the same in each call."""
    sizes, rand = ((12, 24), (24, 3), (3, 24), (24, 40)), Numbers(0)
    params = {f"w{i}": rand(b, a) / a**0.5 for i, (a, b) in enumerate(sizes)}

    def f(p, x):
        for w in p.values():
            x = F.linear(torch.tanh(x), w)
        return x

    def loss(z, y):
        return F.cross_entropy(z.mT, y)

    c, t = compiled(make(f, loss)), make(f, loss)
    with always():
        for k in range(3):
            given = params | {"w0": params["w0"] + k}, rand(4, 6, 12), torch.arange(24).reshape(4, 6) + k
            assert_trees_close(c(*given), t(*given), EXACT)
            assert_trees_close(c(*given), make(f, loss, method="dense")(*given), 1e-10)
    assert hits(c) == 5


PRODUCTS = {
    "hvp": lambda f: invfunc.hvp(f, F.cross_entropy),
    "ggnvp": lambda f: invfunc.ggnvp(f, F.cross_entropy),
    "ggnvp empirical": lambda f: invfunc.ggnvp(f, F.cross_entropy, fisher="empirical"),
    "ggnvp drawn": lambda f: invfunc.ggnvp(
        f, F.cross_entropy, mc_samples=2, generator=torch.Generator().manual_seed(0), fisher="mc"
    ),
}


@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_the_call_itself(make):
    net = network("perceptron", 4)
    y = Numbers(1).below(3, 4)
    t, c = make(net.f), compiled(make(net.f))
    for k in range(3):
        params, x = other((net.params, net.x), k)
        v = tree.map_tensors(torch.cos, params)
        assert_trees_close(c(params, v, x, y), t(params, v, x, y), EXACT)
    assert hits(c) == 2


def test_a_call_within_a_budget_says_what_to_compile():
    within = invfunc.chunked(invfunc.batch_grad(loss), memory="8MiB")
    with pytest.raises(invfunc.errors.ArgumentTypeError, match=r"has no plan; .* compiled\(chunked\(t, n\)\)"):
        compiled(within)
