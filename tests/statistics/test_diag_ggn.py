"""diag_ggn against the diagonal of the dense J^T H J: every loss and option, in both forms."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given

from invfunc import diag_ggn, outputs, sqrt_ggn, tree
from invfunc.errors import ArgumentError, ConvexityError, SampleAxisError, SplitError
from invfunc.testing import loop_batch_jacobian
from invfunc.testing.oracles import assert_trees_close, dense_diag_ggn
from tests.criteria import Criterion, after_logarithms, cross_entropies, elementwise, model
from tests.networks import LOSSES, network, total
from tests.strategies import Numbers, seeded

EXACT = 1e-10


def assert_both_forms_exact(criterion, f=None, params=None):
    if f is None:
        f, params = model(criterion.one)
    args = (params, Numbers(1)(len(criterion.target), 2), criterion.target)
    wanted = dense_diag_ggn(f, criterion.loss)(*args)
    assert_trees_close(diag_ggn(f, criterion.loss)(*args), wanted, EXACT)
    assert_trees_close(diag_ggn(lambda p, x, y: criterion.loss(f(p, x), y))(*args), wanted, EXACT)


IGNORED = {"ignore_index": 1, "weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:reduction. 'mean'")  # torch's, about kl_div
class TestKnownLosses:
    @given(cross_entropies())
    @example(Criterion("cross_entropy", partial(F.cross_entropy, **IGNORED), (3,), torch.tensor([0, 1, 2])))
    def test_cross_entropy(self, criterion):
        assert_both_forms_exact(criterion)

    @given(elementwise())
    def test_elementwise(self, criterion):
        assert_both_forms_exact(criterion)

    @given(after_logarithms())
    def test_after_a_logarithm(self, criterion):
        assert_both_forms_exact(criterion)


CONVEX = {
    "log-sum-exp": lambda z, y: (z.logsumexp(1) - z.gather(1, y.abs().long() % 3)[:, 0]).mean(),
    "log cosh": lambda z, y: (z - y[:, :1]).cosh().log().sum(),
    "square of a sum": lambda z, y: z.sum(1).square().mean(),
    "softplus": lambda z, y: (F.softplus(z) - z * y).sum(1),
    "distance": lambda z, y: ((z - y).square().sum(1) + 1).sqrt(),
    "quadratic form": lambda z, y: torch.einsum("ni,ij,nj->n", z, torch.eye(3).double() + 1, z),
    "linear": lambda z, y: (z * y).sum(),
    "behind an affine map": lambda z, y: F.mse_loss(3 * z[:, :2] - 1, y[:, :2]) + F.mse_loss(z.sum(1), y[:, 0]),
    "two of one output": lambda z, y: F.cross_entropy(z, y.softmax(1)) + 0.5 * F.mse_loss(z, y),
    "a difference": lambda z, y: 2 * F.mse_loss(z, y) - F.mse_loss(z, -y),
    "of a piece": lambda z, y: F.cross_entropy(z[:, 1:] / 2, y[:, 0].abs().long() % 2),
    "a product of losses": lambda z, y: (1 + F.mse_loss(z, y, reduction="none").sum(1)).square().sum(),
}


class TestLossesOfTheUser:
    @pytest.mark.parametrize("loss", CONVEX.values(), ids=CONVEX)
    def test_every_convex_loss(self, loss):
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3))
        wanted = dense_diag_ggn(f, loss)(*args)
        assert_trees_close(diag_ggn(f, loss)(*args), wanted, EXACT)
        marked = diag_ggn(lambda p, x, y: loss(outputs(f(p, x)), y))
        assert_trees_close(marked(*args), wanted, EXACT)

    def test_marked_outputs_go_before_known_losses(self):
        """Between mark and loss there is a layer of constants: H is that of all behind the mark."""
        f, params = model((2,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3))
        mix = Numbers(3)(2, 3)

        def loss(h, y):
            return F.cross_entropy(h @ mix, y.softmax(1))

        wanted = dense_diag_ggn(f, loss)(*args)
        assert_trees_close(diag_ggn(lambda p, x, y: loss(outputs(f(p, x)), y))(*args), wanted, EXACT)

    def test_a_loss_may_compute_in_place(self):
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3))

        def loss(z, y):
            z /= 2
            return F.mse_loss(z.mul_(3), y)

        wanted = dense_diag_ggn(f, lambda z, y: F.mse_loss(1.5 * z, y))(*args)
        assert_trees_close(diag_ggn(f, loss)(*args), wanted, EXACT)
        assert_trees_close(diag_ggn(lambda p, x, y: loss(f(p, x), y))(*args), wanted, EXACT)
        assert_trees_close(diag_ggn(lambda p, x, y: loss(outputs(f(p, x)), y))(*args), wanted, EXACT)

    def test_the_result_may_be_an_entry_for_each_sample(self):
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3))
        summed = diag_ggn(f, lambda z, y: F.mse_loss(z, y, reduction="sum"))(*args)
        each = diag_ggn(f, lambda z, y: F.mse_loss(z, y, reduction="none").sum(1))(*args)
        assert_trees_close(each, summed, EXACT)


class TestSeveralOutputs:
    @staticmethod
    def heads(p, x):
        h = (x @ p["trunk"]).tanh()
        return h @ p["a"], (h.square() @ p["b"]).unsqueeze(1)

    @staticmethod
    def args():
        rand = Numbers()
        params = {"trunk": rand(2, 3), "a": rand(3, 3), "b": rand(3, 2)}
        return params, rand(4, 2), {"class": rand.below(3, 4), "value": rand(4, 1, 2)}

    @pytest.mark.parametrize(
        "pack", [tuple, list, lambda z: {"one": z[0], "two": [z[1]]}], ids=["tuple", "list", "tree"]
    )
    def test_as_a_tree_of_the_model(self, pack):
        def f(p, x):
            return pack(self.heads(p, x))

        def loss(z, y):
            a, b = tree.leaves(z)
            return F.cross_entropy(a, y["class"]) + 3 * F.mse_loss(b, y["value"], reduction="sum")

        args = self.args()
        wanted = dense_diag_ggn(self.heads, loss)(*args)
        assert_trees_close(diag_ggn(f, loss)(*args), wanted, EXACT)

    @pytest.mark.parametrize(
        "mark", [tuple, outputs, lambda z: tuple(map(outputs, z))], ids=["found", "marked", "each"]
    )
    @pytest.mark.parametrize("joint", [0, 1], ids=["sum", "joint"])
    def test_of_a_loss_function(self, mark, joint):
        def loss(z, y):
            a, b = z
            value = F.cross_entropy(a, y["class"]) + 3 * F.mse_loss(b, y["value"], reduction="sum")
            return value + joint * (a.sum(1) + b.sum((1, 2)) - 1).square().mean() if joint else value

        args = self.args()
        alone = diag_ggn(lambda p, x, y: loss(mark(self.heads(p, x)), y))
        if joint and mark is tuple:  # where the heads meet, nothing says that these are the outputs
            with pytest.raises(SplitError):
                alone(*args)
        else:
            assert_trees_close(alone(*args), dense_diag_ggn(self.heads, loss)(*args), EXACT)


class TestArguments:
    def test_a_shared_target_and_one_without_tensors(self):
        f, params = model((3,))
        x, rates = Numbers(1)(4, 2), Numbers(2)(3)

        def loss(z, t):
            return F.mse_loss(z, t["rates"].expand_as(z), reduction=t["reduction"])

        target = {"rates": rates, "reduction": "sum"}
        found = diag_ggn(f, loss, in_dims=(0, None))(params, x, target)
        assert_trees_close(found, dense_diag_ggn(f, loss)(params, x, target), EXACT)

    def test_a_module_may_be_the_loss(self):
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2).below(3, 4))
        found = diag_ggn(f, torch.nn.CrossEntropyLoss(label_smoothing=0.1))(*args)
        wanted = dense_diag_ggn(f, lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1))(*args)
        assert_trees_close(found, wanted, EXACT)


MINUS = -torch.ones(3, dtype=torch.float64)
NOT_CONVEX = {
    "sine": lambda z, y: z.sin().sum(),
    "concave": lambda z, y: -F.mse_loss(z, y),
    "negative weights": lambda z, y: (F.mse_loss(z, y, reduction="none").sum(1) * torch.tensor([1.0, -1, 1, 1])).sum(),
    "negative class weight": lambda z, y: F.cross_entropy(z, y.argmax(1), weight=MINUS, reduction="sum"),
    "difference": lambda z, y: F.cross_entropy(z, y.argmax(1)) - F.mse_loss(z, y),
    "saddle": lambda z, y: (z[:, 0] * z[:, 1]).sum(),
    "exp of minus": lambda z, y: (-F.mse_loss(z, y, reduction="none").sum(1)).exp(),
}


class TestWrittenByHand:
    @pytest.mark.parametrize("scale", [1, 10, 20])
    def test_a_cross_entropy_of_samples_that_are_classified_for_sure(self, scale):
        """Their own Hessians are rounding errors, of either sign."""
        x, w, y = Numbers(1)(16, 8), scale * Numbers(2)(8, 6), Numbers(3)(16, 6).argmax(1)

        def by_hand(w, x, y):
            z = outputs(x @ w)
            return z.exp().sum(1).log() - z.gather(1, y[:, None])[:, 0]

        wanted = diag_ggn(lambda w, x: x @ w, F.cross_entropy)(w, x, y)
        assert_trees_close(diag_ggn(by_hand)(w, x, y), 16 * wanted, EXACT)

    def test_what_bends_negative_log_likelihoods(self):
        """The slope of an nll_loss is that of what is made of it, which depends on the outputs here."""
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3).argmax(1))

        def bent(z, y):
            return F.nll_loss(z.log_softmax(1), y, weight=z.new_tensor([1, 2, 3]), reduction="none").exp().sum()

        assert_trees_close(diag_ggn(f, bent)(*args), dense_diag_ggn(f, bent)(*args), EXACT)


class TestRefusals:
    @pytest.mark.parametrize("loss", NOT_CONVEX.values(), ids=NOT_CONVEX)
    def test_a_loss_that_is_not_convex(self, loss):
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3))
        with pytest.raises(ConvexityError, match="not convex in the outputs"):
            diag_ggn(f, loss)(*args)
        with pytest.raises(ConvexityError, match="not convex in the outputs"):
            diag_ggn(lambda p, x, y: loss(outputs(f(p, x)), y))(*args)

    def test_a_loss_that_is_not_convex_in_half_precision(self):
        """A negative eigenvalue as large as half of the others is no rounding."""
        w, x, y = (Numbers(k)(4, 4).bfloat16() for k in range(3))

        def loss(z, y):
            return (z - y).square().sum() - 1.5 * (z - y)[:, 0].square().sum()

        with pytest.raises(ConvexityError, match="not convex in the outputs"):
            diag_ggn(lambda w, x: x @ w, loss)(w, x, y)

    @pytest.mark.parametrize(
        "loss, names",
        [
            (lambda p, z, y: F.mse_loss(z, y) + p["w"].square().sum(), ["pow|square|sum|add", "outputs"]),
            (lambda p, z, y: F.mse_loss(z, y) + z.abs().mean(), ["mean|abs|add", "outputs"]),
            (lambda p, z, y: F.mse_loss(z, y) * (1 + z.square().sum()), ["."]),
            (lambda p, z, y: F.mse_loss(outputs(z), y) + F.l1_loss(z, y), ["l1_loss|add", "outputs"]),
            (lambda p, z, y: F.mse_loss(outputs(z), y) + F.mse_loss(z, -y), ["add", "outputs"]),
            (lambda p, z, y: F.mse_loss(outputs(z) * p["b"], y), ["mul", "outputs"]),
            (lambda p, z, y: F.l1_loss(z, y), ["known", "outputs"]),
            (lambda p, z, y: F.nll_loss(z, y.argmax(1)), ["known", "outputs"]),
            (lambda p, z, y: z.logsumexp(1).mean(), ["known", "outputs"]),
        ],
        ids=["L2", "unknown", "factor", "beside", "marked and not", "behind", "l1_loss", "nll_loss alone", "no loss"],
    )
    def test_a_path_around_the_outputs(self, loss, names):
        f, params = model((3,))
        args = (params, Numbers(1)(4, 2), Numbers(2)(4, 3))
        with pytest.raises((SplitError, SampleAxisError) if names == ["."] else SplitError) as told:
            diag_ggn(lambda p, x, y: loss(p, f(p, x), y))(*args)
        for name in names:
            assert any(word in str(told.value) for word in name.split("|"))


# diag_ggn of each sample and sqrt_ggn against the dense J^T H J of each: every network and loss, in both forms


def user_loss(z, y):
    """Convex, and not one that is known."""
    return (z - y).cosh().log().mean() + 0.5 * (z.sum(1) ** 2).sum()


def flat_loss(z, y):
    """With a Hessian that is singular: along the shift of all outputs the loss is linear."""
    return z.logsumexp(1).mean() - (z * y).mean()


KNOWN = [(loss, loss.target) for loss in LOSSES]
UNKNOWN = [(loss, lambda rand, n: rand(n, 3)) for loss in (user_loss, flat_loss)]
KINDS = [*KNOWN, *UNKNOWN]


@pytest.mark.quick
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: getattr(kind[0], "__name__", repr(kind[0])))
def test_the_products_of_a_root_are_the_matrix(kind):
    (loss, target), net = kind, network("perceptron", 3)
    y = target(Numbers(1), 3)
    jacobian = torch.cat([j.flatten(2) for j in tree.leaves(loop_batch_jacobian(net.f)(net.params, net.x))], 2)
    hessian = torch.func.hessian(lambda z: loss(z, y))(net.f(net.params, net.x))
    root = torch.cat([s.flatten(2) for s in tree.leaves(sqrt_ggn(net.f, loss)(net.params, net.x, y))], 2)
    wanted = torch.einsum("ncp,ncmd,mdq->pq", jacobian, hessian, jacobian)
    assert_trees_close(torch.einsum("vnp,vnq->pq", root, root), wanted, EXACT)
    assert len(root) <= hessian.shape[1]


@pytest.mark.quick
def test_a_target_that_is_ignored_has_a_root_with_a_derivative():
    net, y = network("perceptron", 3), torch.tensor([-100, 0, 1])
    slope = torch.func.grad(lambda p: total(sqrt_ggn(net.f, F.cross_entropy)(p, net.x, y)))(net.params)
    assert all(leaf.isfinite().all() for leaf in tree.leaves(slope))


@pytest.mark.quick
def test_each_is_an_option_that_the_result_tells():
    t = diag_ggn(torch.mul, F.mse_loss, per_sample=True)
    assert repr(t) == "diag_ggn(mul, mse_loss, per_sample=True)"
    with pytest.raises(ArgumentError, match="with_error=True, per_sample=True.*Leave one of the two out"):
        diag_ggn(torch.mul, F.mse_loss, mc_samples=2, generator=seeded(), with_error=True, per_sample=True)
