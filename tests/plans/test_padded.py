"""Batches that are padded to a few sizes give what they give by themselves, by as few plans as there are sizes."""

import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import chunked, compiled, streamed, together, tree
from invfunc.errors import ArgumentError
from invfunc.testing.oracles import assert_trees_close
from tests.plans.calls import hits
from tests.strategies import Numbers, seeded

PARAMS = {"a": Numbers(0)(4, 6), "b": Numbers(1)(6, 3)}


def model(p, x):
    return torch.tanh(x @ p["a"]) @ p["b"]


def losses(p, x, y):
    return F.cross_entropy(model(p, x), y, reduction="none")


def summed(z, y):
    return F.cross_entropy(z, y, reduction="sum")


def weighted(z, y):
    return F.cross_entropy(z, y, ignore_index=2)


def without_a_class(p, x):
    return model(p, x).masked_fill(torch.tensor([False, True, False]), -torch.inf)


def of_two_classes(z, y):
    return F.cross_entropy(z, 2 * (y % 2))


GGN = invfunc.diag_ggn, partial(invfunc.diag_ggn, per_sample=True)
OF_LOSSES = {
    "variance": lambda: invfunc.variance(losses),
    "variance with correction": lambda: invfunc.variance(losses, correction=1),
    "grad_and_variance": lambda: invfunc.grad_and_variance(losses),
    "batch_grad": lambda: invfunc.batch_grad(losses),
    "batch_l2_grad": lambda: invfunc.batch_l2_grad(losses),
    "sum_grad_squared": lambda: invfunc.sum_grad_squared(losses),
    "clipped_grad": lambda: invfunc.clipped_grad(losses, max_norm=0.5),
    "gram": lambda: invfunc.gram(losses),
    "together": lambda: together(invfunc.variance(losses), invfunc.batch_grad(losses)),
    "chunked": lambda: chunked(invfunc.variance(losses), 2),
    "diag_ggn of losses": lambda: invfunc.diag_ggn(losses),
    "diag_ggn": lambda: invfunc.diag_ggn(model, F.cross_entropy),
    "diag_ggn of a weighted mean": lambda: invfunc.diag_ggn(model, weighted),
    "diag_ggn in chunks": lambda: chunked(invfunc.diag_ggn(model, F.cross_entropy), 2),
    "diag_ggn and another": lambda: together(*(make(model, F.cross_entropy) for make in GGN)),
    "diag_ggn of a sum": lambda: invfunc.diag_ggn(model, summed),
    "diag_ggn of infinite logits": lambda: invfunc.diag_ggn(without_a_class, of_two_classes),
    "diag_ggn of each": lambda: invfunc.diag_ggn(model, F.cross_entropy, per_sample=True),
    "sqrt_ggn": lambda: invfunc.sqrt_ggn(model, F.cross_entropy),
    "ggn_trace": lambda: invfunc.ggn_trace(model, F.cross_entropy),
    "diag_hessian": lambda: invfunc.diag_hessian(model, F.cross_entropy),
    "diag_hessian of each": lambda: invfunc.diag_hessian(model, F.cross_entropy, per_sample=True),
}
OF_MODELS = {"gram": lambda: invfunc.gram(model), "batch_jacobian": lambda: invfunc.batch_jacobian(model)}
PRODUCTS = {
    "hvp": lambda: invfunc.hvp(losses),
    "hvp of a mean": lambda: invfunc.hvp(model, F.cross_entropy),
    "ggnvp": lambda: invfunc.ggnvp(model, F.cross_entropy),
    "ggnvp of a sum": lambda: invfunc.ggnvp(model, summed),
    "empirical": lambda: invfunc.ggnvp(model, F.cross_entropy, fisher="empirical"),
}


def check(make, args):
    """Of batches of seven sizes, in two buckets, the largest of which is full."""
    t, c = make(), compiled(make(), pad=(4, 8))
    for k, n in enumerate((3, 7, 8, 2, 4, 5, 6)):
        given = args(n, Numbers(k))
        found, wanted = c(*given), t(*given)
        assert [x.shape for x in tree.tensors((found,))] == [x.shape for x in tree.tensors((wanted,))]
        assert_trees_close(found, wanted, 1e-12)
    assert c.calls.made == 2 and hits(c) == 5


@pytest.mark.parametrize("make", OF_LOSSES.values(), ids=OF_LOSSES)
def test_statistics_are_those_of_the_batch(make):
    check(make, lambda n, rand: (PARAMS, rand(n, 4), rand.below(3, n)))


@pytest.mark.parametrize("make", OF_MODELS.values(), ids=OF_MODELS)
def test_statistics_of_models_are_those_of_the_batch(make):
    check(make, lambda n, rand: (PARAMS, rand(n, 4)))


@pytest.mark.parametrize("make", PRODUCTS.values(), ids=PRODUCTS)
def test_products_are_those_of_the_batch(make):
    v = tree.map_tensors(torch.cos, PARAMS)
    check(make, lambda n, rand: (PARAMS, v, rand(n, 4), rand.below(3, n)))


def test_two_hundred_sizes_take_as_many_plans_as_there_are_sizes_to_pad_to():
    sizes, rand = random.Random(0), Numbers(0)
    t, c = (invfunc.variance(losses), compiled(invfunc.variance(losses), pad=(32, 8, 16)))
    single = tree.map_tensors(torch.Tensor.float, PARAMS)
    for k in range(200):
        n = sizes.randint(1, 32)
        args = rand(n, 4), rand.below(3, n)
        found = c(PARAMS, *args)
        if k % 40 == 0:
            assert_trees_close(found, t(PARAMS, *args), 1e-12)
            args = args[0].float(), args[1]
            assert_trees_close(c(single, *args), t(single, *args), 1e-5)
    assert c.calls.made <= 3 + 3


def test_other_axes_and_what_all_samples_share():
    def f(w, x, scale):
        return (x.mT @ w).square() * scale

    t, c = (invfunc.batch_grad(f, in_dims=(1, None)), compiled(invfunc.batch_grad(f, in_dims=(1, None)), pad=[4]))
    for n in (3, 2):
        w, x = Numbers(0)(5), Numbers(n)(5, n)
        assert_trees_close(c(w, x, w[0]), t(w, x, w[0]), 1e-12)
    assert hits(c) == 1


def test_errors_are_told_with_the_names_of_f():
    x, y = Numbers(1)(3, 4), torch.arange(3)
    c = compiled(invfunc.variance(lambda p, x, y: losses(p, x, y).mean()), pad=(4,))
    with pytest.raises(ArgumentError, match=r"^variance\(<lambda>\)\(p, mask, x, y\): with pad=, f has to return the"):
        c(PARAMS, x, y)
    with pytest.raises(TypeError, match=r"^compiled\(variance\(<lambda>\)\)\(p, x\): f takes \(p, x, y\)"):
        c(PARAMS, x)


REFUSED = {
    "aux": lambda: invfunc.variance(lambda *a: (losses(*a), None), has_aux=True),
    "drawn": lambda: invfunc.diag_ggn(model, F.cross_entropy, mc_samples=2, generator=seeded(0)),
    "a drawn product": lambda: invfunc.ggnvp(model, F.cross_entropy, mc_samples=2, generator=seeded(0), fisher="mc"),
    "factors": lambda: invfunc.kfac(model, F.cross_entropy, fisher="exact"),
    "noise_scale": lambda: invfunc.noise_scale(losses),
    "reduced": lambda: invfunc.reduced(invfunc.variance(losses), lambda path, x: x),
    "samples": lambda: invfunc.batch_grad(losses, samples=[0]),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_what_padding_is_not_right_for_is_refused(make):
    with pytest.raises(ArgumentError, match=r"compiled\(.*pad=\(4, 8\)\)"):
        compiled(make(), pad=(4, 8))


def test_calls_that_cannot_be_padded_are_told():
    x, y = Numbers(0)(9, 4), torch.arange(9) % 3
    with pytest.raises(ArgumentError, match="there are 9 samples, more than the largest size"):
        compiled(invfunc.variance(losses), pad=(4, 8))(PARAMS, x, y)
    with pytest.raises(ArgumentError, match=r"has to return the losses \[N\]"):
        compiled(invfunc.hvp(lambda *a: losses(*a).mean()), pad=[16])(PARAMS, PARAMS, x, y)
    with pytest.raises(ArgumentError, match="sizes of batches"):
        compiled(invfunc.variance(losses), pad=())
    with pytest.raises(ArgumentError, match="of a loader are not padded"):
        streamed(compiled(invfunc.variance(losses), pad=[4]))
