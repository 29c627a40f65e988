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
from tests.laws import FLOOR, OF_LOSSES, STATISTICS, arranged
from tests.networks import LOSSES, network, networks

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
