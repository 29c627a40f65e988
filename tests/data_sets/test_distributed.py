"""distributed: the samples of several processes, which torch's launcher starts."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch.multiprocessing.spawn import start_processes

import invfunc
from invfunc import distributed, streamed
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import AT_ONCE, EXACT, SAMPLED, batches, linear, losses
from tests.data_sets.test_streamed_checkpoint import Lost, breaking, same
from tests.many_processes import LAID, PRODUCTS, Example, forked, hold, start
from tests.networks import CLASSES, LOSSES, NETWORKS
from tests.processes_failing import after_one_is_gone, all_of_it, told_of_all
from tests.rows import BOTH, LOSS, ROWS
from tests.strategies import Numbers

pytestmark = pytest.mark.slow

SIZES = {2: 2, 4: 1}
"""Number of processes, and of the examples that each statistic has then."""
PAIRS = {name for name in ROWS if "gram" in name}
"""Statistics of all pairs of samples, which no process has."""
SEEDS = [(name, form) for name, row in ROWS.items() if name not in AT_ONCE for form in row.forms]
SEEDS += [(name, form) for name in PRODUCTS for form in (LOSS, BOTH)]
CASES = [case for case in SEEDS if case[0] not in PAIRS]


@pytest.fixture
def data():
    rand = Numbers(0)
    params = {"w": rand(4, CLASSES), "b": rand(CLASSES)}
    return params, rand(9, 4), LOSSES[0].target(rand, 9)


def examples(size):
    """Some of each statistic, drawn for so many processes."""
    found = []
    nets = [net for net in NETWORKS if size == 2 or net != "derived"]  # which has no K-factors
    for name, form in CASES:
        drawn = name in ROWS and ROWS[name].drawn
        each = st.builds(
            Example,
            st.just(name),
            st.just(form),
            net=st.sampled_from(nets),
            n=st.integers(size + 1, 6),
            loss=st.sampled_from([LOSSES.index(loss) for loss in (SAMPLED if drawn else LOSSES)]),
            reduction=st.sampled_from(["mean", "sum", *["none"] * (not drawn)]),
            edges=st.sampled_from([[*range(1, size)], [0] * (size - 1)])
            | st.lists(st.integers(0, 6), min_size=size - 1, max_size=size - 1),
            within=st.none() | st.lists(st.integers(0, 3), max_size=2),
            gather=st.booleans(),
            laid=st.lists(st.tuples(*[st.sampled_from(LAID)] * 2), max_size=3),
            grid=st.just(False) if size < 4 else st.booleans(),
            planned=st.booleans(),
        )
        plainest, draw = len(found), given(each)(lambda e: found.append(e))
        number = SEEDS.index((name, form))  # others for each case
        seed(number)(settings(max_examples=1 + SIZES[size], derandomize=False)(draw))()
        del found[plainest]  # which is drawn first, and of which all have the same
        # in one example all keep parts at once, of a mean where a product of a model and its loss has to scale them
        scaled = {"reduction": "mean"} if name in PRODUCTS and form == BOTH else {}
        parts: dict[str, Any] = {"laid": [("rows", "rows")], "within": None, "planned": False, **scaled}
        found[-1] = replace(found[-1], n=size + 3, edges=[*range(2, size + 1)], **parts)
    return found


@pytest.fixture(scope="module")
def two():
    """Reports of two processes: on the examples, on compositions, and on faults."""
    drawn = examples(2)
    return drawn, [list(found) for found in zip(*start(2, told_of_all, drawn), strict=True)]


@pytest.mark.parametrize("size", SIZES)
def test_all_processes_give_what_all_samples_at_once_do(size, request):
    if size == 2:
        drawn, (of_each, *_) = request.getfixturevalue("two")
    else:
        drawn = examples(size)
        of_each = start(size, hold, drawn)
    wrong = [(e, said) for e, *each in zip(drawn, *of_each, strict=True) for said, _, _ in each if said != "right"]
    assert not wrong, wrong[:3]
    for e, *each in zip(drawn, *of_each, strict=True):
        assert all(one == each[0] for one in each), e  # to the last bit
    right = Counter((e.name, e.form) for e, (_, refused, _) in zip(drawn, of_each[0], strict=True) if not refused)
    assert set(right) == set(CASES)


def test_all_statistics_are_in_the_law():
    assert {name for name, _ in CASES} == {*ROWS, *PRODUCTS} - AT_ONCE - PAIRS


def test_what_it_composes_with(two):
    assert two[1][1] == [[], []]


class TestFaults:
    def test_one_process_that_fails_makes_all_fail(self, two):
        first, second = two[1][2]
        found = {name: (a[0], b[0]) for (name, a), b in zip(first.items(), second.values(), strict=True)}
        assert found == dict.fromkeys(found, ("ArgumentError", "ArgumentError")) | {
            "f fails": ("ProcessError", "KeyError"),
            "the loader fails": ("ProcessError", "OSError"),
            "a file that cannot be gone on with": ("ProcessError", "MemoryError"),
            "a vector of another shape": ("ProcessError", "ArgumentError"),
            "of another shape later": ("ProcessError", "ArgumentError"),
            "another moment": ("ProcessError", "ProcessError"),
            "weighted means": ("ProcessError", "ArgumentError"),
            "no argument": ("ProcessError", "ArgumentTypeError"),
            "used up": ("ProcessError", "ArgumentTypeError"),
            "parts alone": ("ArgumentTypeError", "ArgumentTypeError"),
            "f fails beside parts": ("ProcessError", "KeyError"),
            "the loader fails beside parts": ("ProcessError", "OSError"),
            "a file that cannot be gone on with beside parts": ("ProcessError", "MemoryError"),
            "then all is well": ("", ""),
        }
        assert "process 1 failed with KeyError: 'no such thing'" in first["f fails"][1]
        assert "process 1 failed with OSError: the disk is gone" in first["the loader fails"][1]
        assert "params['w'] is a DTensor" in first["parts alone"][1] and "distributed(t)" in first["parts alone"][1]
        assert "explain asks no other process" in first["parts explained"][1]
        assert "params['w'] has placements (Partial(sum),)" in first["a sum to come"][1]
        assert (
            "over the processes (0, 1) in shape (2,), which have to be those of the group, [0]"
            in first["a mesh of others"][1]
        )
        assert "process 1 failed with KeyError: 'no such thing'" in first["f fails beside parts"][1]
        assert "params['w'] has to be the same in all processes" in first["other parameters"][1]
        assert "the loss is a mean in process 0, and a sum in process 1" in first["a sum and a mean"][1]
        assert "gave 6 samples the second time, and 12 the first time" in first["counted and gone"][1]
        assert max(seconds for each in (first, second) for _, _, seconds in each.values()) < 20

    def test_one_process_that_is_killed_makes_all_fail(self, tmp_path):
        started = start_processes(after_one_is_gone, (str(tmp_path),), nprocs=2, join=False, start_method=forked())
        for process in started.processes:
            process.join(60)
        kind, seconds, said = (tmp_path / "0").read_text().split(" ", 2)
        assert kind == "ProcessError" and float(seconds) < 20 and "connection to another process is lost" in said


class TestAlone:
    """Without a group, there is one process."""

    def test_it_is_the_statistic(self, data):
        t = invfunc.grad_and_variance(losses)
        assert_trees_close(distributed(t)(*data), t(*data), EXACT)
        assert_trees_close(distributed(streamed(t))(data[0], [data[1:]]), t(*data), EXACT)
        p = invfunc.hvp(losses)
        assert_trees_close(distributed(p)(data[0], *data), p(data[0], *data), EXACT)

    def test_it_draws_as_a_stream_does(self, data):
        def of():
            return invfunc.kfac(linear, F.cross_entropy, generator=torch.Generator().manual_seed(3))

        assert_trees_close(distributed(of())(*data), streamed(of())(data[0], [data[1:]]), EXACT)

    def test_the_result_has_no_graph(self, data):
        params = {name: p.requires_grad_() for name, p in data[0].items()}
        found = distributed(invfunc.variance(losses))(params, *data[1:])
        assert not any(x.requires_grad for x in found.values())


class TestErrors:
    def test_what_it_does_not_take(self, data):
        v = invfunc.variance(losses)
        for t in (losses, 3, invfunc.explain(v), distributed(v), torch.nn.Linear(2, 2)):
            with pytest.raises(ArgumentTypeError, match="has to be a statistic"):
                distributed(t)
        for t in (invfunc.kronecker.kfra(linear, F.cross_entropy), invfunc.variance(losses, samples=[0])):
            with pytest.raises(ArgumentError, match="add up|samples="):
                distributed(t)
        with pytest.raises(ArgumentError, match="'local', 'gather'"):
            distributed(v, each="all")
        with pytest.raises(ArgumentError, match="Leave each out"):
            distributed(invfunc.hvp(losses), each="gather")
        with pytest.raises(ArgumentError, match="out= takes the rows of this process's samples"):
            distributed(streamed(invfunc.batch_grad(losses), out=print), each="gather")

    def test_a_group_that_is_none(self, data):
        with pytest.raises(ArgumentError, match="init_process_group was not called"):
            distributed(invfunc.variance(losses), group=3)(*data)

    def test_it_is_not_differentiated(self, data):
        t = distributed(invfunc.variance(losses))
        with pytest.raises(ArgumentError, match="within a transform of torch.func"):
            torch.func.vmap(lambda p: t({**data[0], "b": p}, *data[1:]))(data[0]["b"][None])

    def test_chunks_come_inside(self, data):
        with pytest.raises(ArgumentTypeError, match="Chunk the statistic inside"):
            invfunc.chunked(distributed(invfunc.variance(losses)), 2)


# distributed(streamed(t, checkpoint=, out=)): each process has a file of its own, and rows of its own


def test_processes_go_on_as_if_nothing_had_happened(tmp_path):
    """Of three processes, one of which has no samples."""
    folder = tmp_path / "states"
    folder.mkdir()
    assert start(3, all_of_it, str(folder)) == [[], [], []]


def test_one_alone_has_the_file_of_the_first(data, tmp_path):
    params, *rest = data
    t, parts, file = invfunc.variance(losses), batches([2, 4], *rest), tmp_path / "state"
    with pytest.raises(Lost):
        distributed(streamed(t, checkpoint=file))(params, lambda: breaking(parts, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["state.0"]
    written = torch.load(tmp_path / "state.0")
    same(distributed(streamed(t, checkpoint=file))(params, parts), streamed(t)(params, parts))
    assert not list(tmp_path.iterdir())
    torch.save({**written, "identity": {**written["identity"], "the process": "0 of 2"}}, tmp_path / "state.0")
    with pytest.raises(ArgumentError, match="another value of the process: 0 of 2, and not 0 of 1"):
        distributed(streamed(t, checkpoint=file))(params, parts)
