"""Labels: what an entry depends on lies in its box, for all operations and their compositions."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from invfunc.operations.operation import known
from invfunc.operations.pointwise import entrywise
from invfunc.operations.receptive_fields import propagation as module
from invfunc.operations.receptive_fields.propagation import Following, Labels
from tests.graphs import FOLDED, NONLINEAR, POSITIVE, SMOOTH, WIDE, Graph, graphs
from tests.labelled import ELSEWHERE, LINEAR, OTHERS
from tests.stated_common import having, of_torch
from tests.strategies import Numbers

IMAGE = Numbers(3)(1, 2, 4, 4).abs() + 0.1
ALL = POSITIVE | FOLDED | SMOOTH | NONLINEAR


@pytest.fixture(autouse=True)
def no_rule_fails():
    """A rule that breaks down is no longer sound by the hull that takes its place, but seen."""
    with mock.patch.object(module, "_UNKNOWN", ()):
        yield


def coordinates(x):
    """The positions of an image."""
    sizes = x.shape[2:]
    return [torch.arange(float(s)).view(-1, *[1] * (len(sizes) - 1 - a)) for a, s in enumerate(sizes)]


def followed(graph, x):
    """The result of a graph, and the labels."""
    labels = Labels()
    labels.enter(x, coordinates(x))
    with Following(labels):
        y = graph(x)
    return y, labels


def boxes(y, labels):
    """`lo, hi`, each `[k, *y.shape]`; nothing is from infinity to minus infinity."""
    rows = labels.of(y)
    if rows is None:
        return torch.inf, -torch.inf
    return -rows[0], rows[1]


def readers(graph, x):
    """For each entry of x: its position, and the entries of the result that change with it."""
    y = graph(x.clone())
    for i in range(x.numel()):
        moved = x.clone()
        moved.view(-1)[i] += 1.7
        place = torch.stack(torch.unravel_index(torch.tensor(i), x.shape))[2:].tolist()
        yield place, graph(moved) != y


def assert_within_boxes(graph, device, dtype):
    x = graph.x.to(device, dtype)
    lo, hi = boxes(*followed(graph, x))
    for place, changed in readers(graph, x):
        for axis, at in enumerate(place):
            if isinstance(lo, float):
                assert not changed.any(), f"{graph}: it has no labels"
            else:
                out = changed & ((at < lo[axis]) | (at > hi[axis])).to(device)
                assert not out.any(), f"{graph}: {out.nonzero()[0].tolist()} reads {place}"


@pytest.mark.quick
@settings(max_examples=80)
@given(graph=graphs(ALL, WIDE))
def test_what_an_entry_depends_on_lies_in_its_box(graph, device, dtype):
    assert_within_boxes(graph, device, dtype)


@pytest.mark.parametrize("name", sorted(ALL | WIDE))
@settings(max_examples=6)
@given(data=st.data())
def test_every_operation_keeps_to_the_boxes(name, data, device, dtype):
    graph = data.draw(graphs({name: (ALL | WIDE)[name]}, most=1))
    assert_within_boxes(graph, device, dtype)


@pytest.mark.parametrize("inference", [False, True], ids=["", "in inference mode"])
@pytest.mark.parametrize("name", LINEAR | OTHERS)
def test_every_other_operation_keeps_to_them(name, inference, device, dtype):
    """In inference mode torch does not take apart what it composes of others, and what is not known is one box."""
    graph = Graph(((name, (LINEAR | OTHERS)[name]),), IMAGE)
    with torch.inference_mode(inference), mock.patch.object(module, "_UNKNOWN", (KeyError,) if inference else ()):
        assert_within_boxes(graph, device, dtype)
    y, labels = followed(graph, IMAGE.to(device, dtype))
    if labels.affine(y):
        assert_affine(graph, y, IMAGE.to(y), IMAGE.flip(-1).to(y))
    else:
        assert name not in LINEAR


def test_every_name_has_a_program():
    """Of the tables of rules, and of what is affine."""
    met: set[str] = set()
    right = module._called

    def seen(func):
        met.update((right(func).name, str(func.overloadpacket).split(".")[-1]))
        return right(func)

    @settings(max_examples=3, phases=[Phase.generate])
    @given(data=st.data())
    def of_graphs(data):
        for name, op in (ALL | WIDE).items():
            graph = data.draw(graphs({name: op}, most=1))
            followed(graph, graph.x)

    with mock.patch.object(module, "_called", seen):
        for name, f in (LINEAR | OTHERS).items():
            for inference in (False, True):
                with torch.inference_mode(inference), mock.patch.object(module, "_UNKNOWN", (KeyError,)):
                    followed(Graph(((name, f),), IMAGE), IMAGE.clone())
        of_graphs()
    rules = {name for name in having("receptive_field") if not entrywise(name)}  # of which `stated` has programs
    linear = {name for name in having("linear") if not of_torch(name)}
    assert sorted((rules | linear) - met - set(ELSEWHERE)) == []


@pytest.mark.parametrize("name", sorted(n for n in having("reads") if known(n).reads == "none"))
def test_what_reads_a_shape_depends_on_nothing(name, device, dtype):
    x = IMAGE.to(device, dtype)
    more = {"full_like": (2.0,), "randint_like": (5,), "new_full": ((2,), 1.0), "new_empty_strided": ((2,), (1,))}
    given = more.get(name, ((2,),) if name.startswith("new") else ())
    y, labels = followed(lambda x: getattr(torch.ops.aten, name)(x, *given), x)
    assert labels.of(y) is None


@settings(max_examples=60)
@given(graph=graphs(POSITIVE | FOLDED))
def test_boxes_are_no_larger_than_what_is_read(graph, device, dtype):
    x = graph.x.to(device, dtype)
    y, labels = followed(graph, x)
    rows = torch.full_like(labels.of(y), -torch.inf)
    for place, changed in readers(graph, x):
        for axis, at in enumerate(place):
            rows[0, axis][changed] = rows[0, axis][changed].clamp(min=-at)
            rows[1, axis][changed] = rows[1, axis][changed].clamp(min=at)
    assert torch.equal(labels.of(y), rows)


@settings(max_examples=30)
@given(graph=graphs(ALL, WIDE), data=st.data())
def test_several_labels_do_not_disturb_each_other(graph, data, device, dtype):
    """Roots at the input and in the middle, all at once and one at a time."""
    x = graph.x.to(device, dtype)
    cut = data.draw(st.integers(0, len(graph.parts)))
    before, behind = Graph(graph.parts[:cut], x), Graph(graph.parts[cut:], x)

    def run(whole, within):
        first, second = Labels(), Labels()
        if whole:
            first.enter(x, coordinates(x))
        with Following(first, second):
            middle = before(x).clone()
            if within:
                count = torch.arange(float(middle.numel())).view(middle.shape)
                second.enter(middle, [count.to(device), -count.to(device), 5 * torch.ones(1, device=device)])
            y = behind(middle)
        return [labels.of(t) for t in (middle, y) for labels in (first, second)]

    both, first, second = run(True, True), run(True, False), run(False, True)
    for ours, theirs in zip(both, [first[0], second[1], first[2], second[3]], strict=True):
        assert torch.equal(ours, theirs)
    assert first[1] is None and first[3] is None and second[0] is None and second[2] is None


@settings(max_examples=60)
@given(graph=graphs(ALL, WIDE), seed=st.integers(0, 99))
def test_what_is_said_to_be_affine_is_affine(graph, seed, device, dtype):
    rand = torch.Generator().manual_seed(seed)
    a, b = (4 * torch.randn(graph.x.shape, generator=rand).to(device, dtype) for _ in "ab")
    y, labels = followed(graph, a)
    if labels.affine(y):
        assert_affine(graph, y, a, b)


def assert_affine(graph, y, a, b):
    both, constant = y + graph(b), graph(torch.zeros_like(a)) + graph(a + b)
    assert (both - constant).abs().max() <= (1e-9 if a.dtype == torch.float64 else 1e-4) * (1 + both.abs().max())


@settings(max_examples=30)
@given(
    graph=graphs(
        POSITIVE | FOLDED | SMOOTH, {name: WIDE[name] for name in ("linear", "matmul", "einsum", "flat", "cumsum")}
    )
)
def test_affine_operations_are_seen_to_be_affine(graph, device, dtype):
    y, labels = followed(graph, graph.x.to(device, dtype))
    assert labels.affine(y)


@pytest.mark.parametrize("name", sorted(NONLINEAR))
@settings(max_examples=3)
@given(data=st.data())
def test_others_are_not(name, data, device, dtype):
    graph = data.draw(graphs({name: NONLINEAR[name]}, most=1))
    x = graph.x.to(device, dtype)
    y, labels = followed(graph, x)
    assert labels.of(y) is not None and not labels.affine(y)


def test_a_coefficient_with_any_label_is_no_constant(device, dtype):
    x, z, c = (torch.rand(1, 2, 3, device=device, dtype=dtype) for _ in "xzc")
    first, second, third = several = [Labels() for _ in range(3)]
    first.enter(x, coordinates(x))
    second.enter(z, coordinates(z))
    with Following(*several):
        product, total, scaled = x * z, x + z * z, x * c + z
        root = torch.zeros_like(x)
        third.enter(root, coordinates(root))
        again = root * (z * 2)
    assert not first.affine(product) and not second.affine(product)
    assert first.affine(total) and not second.affine(total)
    assert first.affine(scaled) and second.affine(scaled)
    assert third.affine(root) and not third.affine(again) and not second.affine(again)
    assert first.affine(c) and second.affine(c)


def test_an_index_with_any_label_is_no_constant(device, dtype):
    """What it picks is something else for other samples."""
    x, z = (torch.rand(1, 2, 3, device=device, dtype=dtype) for _ in "xz")
    at, ours, theirs = torch.tensor([2, 0, 1], device=device).expand(x.shape), Labels(), Labels()
    ours.enter(x, coordinates(x))
    theirs.enter(z, coordinates(z))
    with Following(ours, theirs):
        constant, picked = x.gather(-1, at), x.gather(-1, z.argsort(-1))
    assert [boxes(constant, ours)[side][0, 0, 0].tolist() for side in (0, 1)] == [[2, 0, 1], [2, 0, 1]]
    assert [boxes(picked, ours)[side][0, 0, 0].tolist() for side in (0, 1)] == [[0, 0, 0], [2, 2, 2]]


def to_the_middle(right):
    """A rule that puts the middle of a box in its place."""

    def wrong(step, out):
        rows = right(step, out)
        rows = rows if isinstance(rows, torch.Tensor) else rows[0]
        lo, hi = -rows[: len(rows) // 2], rows[len(rows) // 2 :]
        return torch.cat([-((lo + hi) / 2).floor(), ((lo + hi) / 2).floor()]).nan_to_num(-torch.inf)

    return wrong


def to_the_first(right):
    """A rule that forgets all but one of what is read."""

    def wrong(step, out):
        step.labelled = step.labelled[:1]
        return right(step, out)

    return wrong


PLANTED = {
    "convolution": (to_the_middle, POSITIVE, "conv"),
    "avg_pool2d": (to_the_middle, POSITIVE, "avg_pool"),
    "upsample_linear1d": (to_the_middle, SMOOTH, "smooth"),
    "mm": (to_the_middle, WIDE, "matmul"),
    "mean": (to_the_middle, POSITIVE, "unfold"),
    "native_layer_norm": (to_the_middle, WIDE, "layer_norm"),
    "add": (to_the_first, POSITIVE, "skip"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_wrong_rule_is_caught(name, device, dtype):
    plant, ops, where = PLANTED[name]

    @settings(max_examples=25, phases=[Phase.generate])
    @given(graph=graphs({where: ops[where]}, most=2))
    def law(graph):
        assert_within_boxes(graph, device, dtype)

    right = module._called

    def planted(func):
        called = right(func)
        rule = called.known.receptive_field
        return (
            replace(called, known=replace(called.known, receptive_field=plant(rule))) if called.name == name else called
        )

    law()
    with mock.patch.object(module, "_called", planted), pytest.raises(AssertionError, match="reads"):
        law()
