"""Fast path == generic path == the plain loop, for every rule and option and every way to read a parameter."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from invfunc import batch_grad, diag_ggn, tree
from invfunc.errors import SampleAxisError
from invfunc.operations.operation import OPERATIONS, Function, OperationFacts, function_of
from invfunc.operations.recurrent import TANH, CellWeights, Steps, states_before
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests import forms, strategies
from tests import layer_cases as cases
from tests.laws import OF_LOSSES, RTOL, assert_every_path_equals_the_loop, composed, squares
from tests.strategies import Numbers
from tests.torch_layers import LAYERS, refused

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using padding='same' with even kernel",
    "ignore:There is a performance drop",  # vmap of what has no batching rule in torch
    "ignore:Support for mismatched key_padding_mask and attn_mask is deprecated",
    "ignore:Support for mismatched src_key_padding_mask and src_mask is deprecated",
    "ignore:LSTM with projections is not supported with oneDNN",
    "ignore:Using padding='same' with even kernel",
)


REFUSED = "einsum with a constant for each sample", "x @ w for each sample"
"""Products with parameters or constants that have an entry for each sample."""


@pytest.mark.parametrize("form", [form for form in forms.PRODUCTS if str(form) in REFUSED], ids=str)
@settings(max_examples=3)
@given(data=st.data())
def test_products_with_an_entry_for_each_sample_are_right_or_refused(form, data, device, dtype):
    try:
        assert_every_path_equals_the_loop(data.draw(strategies.formed(form)), device, dtype, drawn=True)
    except SampleAxisError as error:
        assert "an operation in which parameters have an entry for each sample" in str(error)


def followed(several):
    return [form for form in several if str(form) not in REFUSED]


@pytest.mark.parametrize(
    "form", followed(forms.PRODUCTS + forms.ELEMENTWISE + forms.OTHERS + forms.TIED + forms.MEETINGS), ids=str
)
@settings(max_examples=3)
@given(data=st.data())
def test_every_path_equals_the_loop(form, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.formed(form)), device, dtype, drawn=True)


@pytest.mark.parametrize("move", followed(forms.MOVES + forms.SELECTIONS + forms.COMPUTATIONS), ids=str)
@settings(max_examples=2)
@given(data=st.data())
def test_samples_are_followed(move, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.formed(move)), device, dtype, drawn=True)


@pytest.mark.quick
@given(case=strategies.linears())
def test_linear(case, device, dtype):
    assert_every_path_equals_the_loop(case, device, dtype, drawn=True)


@given(case=strategies.matmuls())
def test_matmul(case, device, dtype):
    assert_every_path_equals_the_loop(case, device, dtype, drawn=True)


@pytest.mark.parametrize("d", [1, 2, 3], ids="{}d".format)
@given(data=st.data())
def test_convolution(d, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.convolutions(d)), device, dtype, drawn=True)


@pytest.mark.parametrize("d", [1, 2, 3], ids="{}d".format)
@given(data=st.data())
def test_transposed_convolution(d, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(strategies.transposed_convolutions(d)), device, dtype, drawn=True)


# Every layer with every option against the plain loop; what mixes samples is refused by name


@pytest.mark.parametrize("layer", LAYERS)
@settings(max_examples=3)
@given(data=st.data())
def test_every_path_equals_the_loop_layers(layer, data, device, dtype):
    assert_every_path_equals_the_loop(data.draw(LAYERS[layer]), device, dtype, drawn=True)


@pytest.mark.parametrize("kind", [nn.Embedding, partial(nn.EmbeddingBag, mode="sum")], ids=["Embedding", "Bag"])
@pytest.mark.parametrize("statistic", OF_LOSSES)
def test_sparse_gradients_have_the_same_shares(statistic, kind, device, dtype):
    dense, sparse = (cases.case(kind(3, 2, sparse=sparse), Numbers().below(3, 4, 2)) for sparse in (False, True))
    make, target = OF_LOSSES[statistic].make, dense.f(dense.params, *dense.inputs).cos()
    args = moved((dense.params, *dense.inputs, target), dtype, device)
    found, expected = (make(composed(case.f, squares))(*args) for case in (sparse, dense))
    assert_trees_close(found, expected, RTOL[dtype])


@pytest.mark.parametrize("name", refused())
def test_what_mixes_samples_is_refused_by_name(name):
    operation, case = refused()[name]
    f, before = case.f, tree.map_tensors(torch.clone, case.params)
    options: dict[str, Any] = {"in_dims": (*case.in_dims, 0)}
    target = f(tree.map_tensors(torch.clone, case.params), *case.inputs)
    for transform in (
        batch_grad(composed(f, squares), **options),
        batch_grad(composed(f, F.mse_loss), **options),
        diag_ggn(f, F.mse_loss, **options),
    ):
        with pytest.raises(SampleAxisError, match=f"`({operation})`"):
            transform(case.params, *case.inputs, target)
    assert all(map(torch.equal, tree.leaves(case.params), tree.leaves(before)))  # max_norm writes into the weight


# Effects that the entries state (a call asks, reads, writes, hands out): each name has a call that has them

Call = Callable[[Tensor], Any]


def having(fact: str) -> frozenset[str]:
    """The names of the operations whose entries state a fact."""
    plain = getattr(OperationFacts(), fact)
    return frozenset(name for name, entry in OPERATIONS.items() if getattr(entry, fact) != plain)


class Heard(TorchFunctionMode):
    """The calls made while it is on: the functions, and what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Function, tuple, dict[str, Any]]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append((function_of(func), args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def first(self, name: str) -> tuple[Function, tuple, dict[str, Any]]:
        """The first call of this name, or of another one of the same C function."""
        names = name, {"ndimension": "dim", "nelement": "numel"}.get(name)
        return next(call for call in self.calls if call[0].name in names)


def stated(fact: str, *values: Any) -> list[str]:
    """The names of which a fact is stated, or one of these values of it."""
    return sorted(n for n in having(fact) if not values or getattr(OPERATIONS[n], fact) in values)


def numbers(*shape: int) -> Tensor:
    return Numbers()(*(shape or (2, 3)))


def written_behind(x: Tensor) -> None:
    """Other values, of which the version does not tell."""
    x.data.copy_(Numbers(7)(*x.shape).to(x))


def one_step(weight: Tensor) -> Steps:
    return Steps(TANH, CellWeights(weight, weight), False, None)


ARGUMENTS: dict[str, Callable[[Tensor], tuple]] = {
    "is_same_size": lambda x: (x,),
    "expand_as": lambda x: (numbers(4, *x.shape),),
    "view_as": lambda x: (numbers(x.numel()),),
    "reshape_as": lambda x: (numbers(x.numel()),),
    "type_as": lambda x: (numbers().float(),),
    "to": lambda x: (numbers().float(),),
    "full_like": lambda x: (2.0,),
    "randint_like": lambda x: (5,),
    "new_empty": lambda x: ((2,),),
    "new_zeros": lambda x: ((2,),),
    "new_ones": lambda x: ((2,),),
    "new_full": lambda x: ((2,), 1.0),
    "new_empty_strided": lambda x: ((2,), (1,)),
    "new_tensor": lambda x: ([1.0],),
    "register_hook": lambda x: (print,),
    "register_post_accumulate_grad_hook": lambda x: (print,),
}
"""Arguments after the tensor."""
SPELLED: dict[str, Call] = {
    "states_before": lambda x: states_before(x[None, None], (x.new_zeros(1, 1),), one_step(x.new_ones(1, 1))),
    "len": len,
    "result_type": lambda x: torch.result_type(x, 1),
    "deepcopy": deepcopy,
    "dlpack": lambda x: x.__dlpack__(),
}
"""Calls that are not a method or an attribute of their name."""


def call(name: str) -> Call:
    """A call of a tensor by a name."""
    if name in SPELLED:
        return SPELLED[name]
    if name.startswith("get:"):
        return lambda x: getattr(x, name[4:])
    method = getattr(Tensor, name, None) or getattr(torch, name)
    return lambda x: method(x, *ARGUMENTS.get(name, lambda x: ())(x))


def plain(answer: Any) -> Any:
    return answer._cdata if isinstance(answer, torch.UntypedStorage) else answer


@pytest.mark.parametrize("name", stated("asks"))
def test_what_asks_knows_no_values(name):
    x = numbers()
    with Heard() as heard:
        before = plain(call(name)(x))
    heard.first(name)
    written_behind(x)
    assert plain(call(name)(x)) == before
    assert not isinstance(before, Tensor)


@pytest.mark.parametrize("name", stated("reads"))
def test_what_reads_no_values_of_others_does_not_depend_on_them(name):
    with Heard() as heard:
        call(name)(numbers())
    function, args, kwargs = heard.first(name)

    def again() -> Tensor:
        torch.manual_seed(0)
        return function.func(*args, **kwargs).clone()

    with torch.random.fork_rng():
        then = again()
        for t in tree.tensors(args[1:] if OPERATIONS[name].reads == "first" else args):
            written_behind(t)
        now = again()
    assert then.shape == now.shape and then.dtype == now.dtype
    if "empty" not in name:
        assert torch.equal(then, now)


RUNNING = {"running_mean": torch.zeros(3), "running_var": torch.ones(3)}
TABLE: dict[str, Any] = {"input": torch.tensor([[0, 2]]), "weight": 3 * torch.ones(4, 3)}
IMAGE: dict[str, Any] = {"input": numbers(4, 3, 2).float(), **RUNNING}
FURTHER = {"momentum": 0.1, "eps": 1e-5, "weight": None, "bias": None}
WRITERS: dict[str, list[tuple[Callable, dict[str, Any], str, Any, Any]]] = {
    "batch_norm": [
        (F.batch_norm, IMAGE, "training", True, False),
        (torch.batch_norm, {**IMAGE, **FURTHER, "cudnn_enabled": False}, "training", True, False),
    ],
    "native_batch_norm": [(torch.native_batch_norm, {**IMAGE, **FURTHER}, "training", True, False)],
    "instance_norm": [
        (F.instance_norm, IMAGE, "use_input_stats", True, False),
        (torch.instance_norm, {**IMAGE, **FURTHER, "cudnn_enabled": False}, "use_input_stats", True, False),
    ],
    "embedding": [(F.embedding, TABLE, "max_norm", 1.0, None)],
    "embedding_bag": [(F.embedding_bag, TABLE, "max_norm", 1.0, None)],
}
"""The function, what it is given, and the argument that says whether it writes, as it does and as it does not."""
ELSEWHERE = {"cudnn_batch_norm", "miopen_batch_norm", "_native_batch_norm_legit"}
"""Functions that need a device, or that torch itself calls."""


def test_each_that_writes_by_a_flag_has_a_call():
    assert WRITERS.keys() | ELSEWHERE == set(stated("writes_if"))


@pytest.mark.parametrize(
    ("name", "at"), [(n, i) for n, each in WRITERS.items() for i in range(len(each))], ids=lambda x: str(x)
)
class TestWhatWritesByAFlag:
    def called(self, name, at, writes, change=(0.0, 0.0, 0.0)):
        """Names of the written tensors as the entry states them, those that have changed, and the result."""
        func, given, flag, yes, no = WRITERS[name][at]
        given = tree.map_tensors(torch.clone, {**given, flag: yes if writes else no})
        _, others = OPERATIONS[name].writes_if
        given.update({other: given[other] + torch.tensor(change) for other in others})
        before = tree.map_tensors(torch.clone, given)
        with Heard() as heard:
            out = func(**given)
        function, args, kwargs = heard.first(name)
        said = {n for n in given for t in function.written(args, kwargs) if t is given[n]}
        tensors = {n: t for n, t in given.items() if isinstance(t, Tensor)}
        return said, {n for n, t in tensors.items() if not torch.equal(t, before[n])}, out

    def test_writes_those_then(self, name, at):
        said, seen, _ = self.called(name, at, True)
        assert said == seen == set(OPERATIONS[name].writes_if[1])

    def test_and_else_nothing(self, name, at):
        said, seen, _ = self.called(name, at, False)
        assert said == seen == set()
