"""One run of f under a function mode: where the samples are, and what each operation reads of the parameters.

A tensor carries what is known of it in an attribute: a `Mark` if it has samples, a `Node` if it is a parameter or
computed from parameters alone. An operation that brings both together gets an alias of the parameter, and a `Use` is
noted, with the edge of the graph by which its cotangent comes. So no gradient reaches the parameters themselves, except
by ways that were not seen, and these are an error for free.

At the top level f runs on detached leaves. Where the result is differentiated, a level of torch.func is opened around
the run, and all that is noted is taken out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from invfunc import thresholds, tree
from invfunc._torch.functorch import (
    as_it_is,
    base_of,
    checkpointing,
    given_back,
    grad_level,
    gradient_edge,
    gradients_of,
    graph_of,
    leaf,
    level_of,
    levels,
    saving_hooks,
)
from invfunc._torch.values import HALF, wide
from invfunc.core.columns import Finder, Split, criterion_of, weighs
from invfunc.core.generic import (
    Unreplayed,
    composed,
    copied,
    expanded,
    grown,
    into_view,
    of_users,
    set_derived,
    set_item,
    set_parameter,
    unchanged,
)
from invfunc.core.marks import (
    DERIVED,
    LEAF,
    SUMMED,
    SWAP,
    VIEW,
    Filled,
    Final,
    Known,
    Mark,
    Node,
    Unsupported,
    by_place,
    know,
    named,
    option,
    replaced,
    spelled,
    tensors,
)
from invfunc.core.probe import axes_of
from invfunc.core.rules import single
from invfunc.core.tables import (
    BY_ROW,
    DERIVATIVES,
    DIVIDE,
    EXPANDS,
    FACTORS,
    FILLED,
    FILLS,
    GROUPED,
    INDEXES,
    JOINS,
    LEAKS,
    LIKE,
    LINEAR,
    MOVING,
    MULTIPLY,
    PLAIN,
    POINTWISE,
    PRODUCTS,
    PURE,
    REFUSED,
    RULES,
    SHORT,
    SUMS,
    SWAPS,
    VIEWS,
)
from invfunc.core.uses import WHOLE, Block, Copies, ProductUse, Shared, Use
from invfunc.loss.hessian import pulled_rows
from invfunc.operations.operation import in_place
from invfunc.operations.recurrent import AT_ONCE, steps_at_once
from invfunc.reductions.estimates import Lot

Tensor = torch.Tensor
SET = Tensor.__setitem__
TABLES = {F.embedding, F.embedding_bag}
REWRITTEN = {*TABLES, torch.broadcast_tensors, F.scaled_dot_product_attention}
"""Operations with a rule that run, or may run, in others."""
PICKING = INDEXES | {SET}
"""Operations whose index is one of their arguments, which weighs nothing."""


class Run(TorchFunctionMode):
    """A context in which f runs on `enter`ed parameters and samples; what it noted is there until it closes."""

    level: int | None = None
    columns = 1
    outside = True
    """True if gradients are enabled around the run."""
    numbers = 0
    """Number of entries of the results of operations that read parameters."""
    largest = 0
    """Number of entries of the largest of these."""
    closed_over = False
    """True if f reads a tensor from elsewhere that requires a gradient."""
    criterion: Finder | None = None
    """Finds the outputs, where they are looked for."""
    split: Split | None = None
    """The loss part of f, once it is known."""
    again: Any = None
    """The loss at a target from a sampler, where it is given apart."""
    twice = False
    """True if operations run in a form that can be differentiated twice."""
    given = False
    """True if columns are known at the outputs, so that a loss that is given apart is not looked at."""
    part = False
    """True if these are a part of the samples, whose losses have to add up."""
    way: Any = None
    """Way in which f is called, if not as it is."""
    frees = freed = False
    """True if what is read in invertible blocks may be computed again, as cotangents are contracted when they come;
    and whether something is."""
    apart = False
    """True if f was evaluated for each sample apart, so that nothing is known of its operations."""
    outputs: Any = None
    """The outputs of a model that is given apart from its loss."""
    of_hessian = False
    """True if the columns are the root of a Hessian's diagonal, and the u of `-u u^T` beside it."""
    each = True
    """True if something of each sample is wanted."""
    grows = True
    """True if a dim of the size N, of what is expanded or filled, is one of samples."""
    grew = False
    """True if there was such a dim."""
    ordered = False
    """True if there are samples in any order along a dim."""
    alone = True
    """True if one vector is pulled back at a time."""
    replays = False
    """True if checkpoints are evaluated again as they were followed."""
    func: Any = None

    def __init__(self, n: int, deep: bool, chosen: Tensor | None = None) -> None:
        """`deep` says that the result is differentiated; `chosen` are the samples that are wanted, if not all."""
        super().__init__()
        self.n, self.deep = n, deep
        self.chosen, self.count = chosen, n if chosen is None else len(chosen)
        self.token = object()
        self.uses: list[Use] = []
        self.leaves: list[Tensor] = []
        self.known: dict[Any, Any] = {}
        """Factors that a weight and its bias share."""
        self.partners: dict[int, tuple[str, int]] = {}
        """Weights and biases that the same operations read, where somebody asks."""
        self.lots: list[Lot] = []
        """The columns that are drawn."""
        self.states: list[Any] = []
        """The states of torch's generators before f, where f may run again on one sample."""
        self._stack = ExitStack()
        self._enter: Callable = Tensor.detach
        self.strip: Callable[[Tensor], Tensor] = Tensor.detach
        """Makes a tensor of the run one for use outside."""

    def open(self, apart: bool = True) -> None:
        """Begin the run: outside of f, derivatives are taken in it, `apart` at a level of torch.func of their own."""
        self.outside = torch.is_grad_enabled()
        if torch.is_inference_mode_enabled():
            self._stack.enter_context(torch.inference_mode(False))
        self._stack.enter_context(torch.enable_grad())
        if self.deep and not apart:
            self._enter, self.strip = lambda x: x.view_as(x) if x.requires_grad else leaf(x), as_it_is
        elif self.deep:
            self._enter, self.strip = self._stack.enter_context(grad_level())
            self.level = levels()[-1][1]

    def close(self) -> None:
        """End the run."""
        self._stack.close()
        self.uses, self.split, self.again = [], None, None  # which lead back to the run

    def leaf(self, i: int, p: Tensor) -> Tensor:
        """The tensor that f gets in place of a parameter."""
        p = p.clone() if p.is_inference() else p
        leaf = self.alias(p) if self.deep else p.detach().requires_grad_()
        vars(leaf)["_known"] = Node(self.token, i, LEAF)
        self.leaves.append(leaf)
        return leaf

    def samples(self, x: Tensor, axis: Any) -> Tensor:
        """The tensor that f gets in place of a tensor of the batch, whose samples are in a dim."""
        x = x.clone() if x.is_inference() else x
        y = x.view_as(x) if self.deep else x.detach()
        vars(y)["_known"] = Mark(self.token, axis, y.requires_grad)
        return y

    def alias(self, x: Tensor) -> Tensor:
        """The same numbers, to be differentiated in, without a way back to the leaves."""
        if not self.deep:
            return x.detach().requires_grad_()
        return self._enter(self.strip(x))

    def left(self, results: Any) -> Any:
        """Results for use outside."""
        if results is None:
            return None
        detached = not self.deep or not self.outside
        return tree.map_tensors(lambda x: self.strip(x).detach() if detached else self.strip(x), results)

    def use(self, use: Use, edge: Any, end: bool = True) -> None:
        """Note a use."""
        use.edge, use.end, use.func = edge, end, self.func
        self.uses.append(use)

    # Calls

    def look(self, args: Sequence[Any], found: tuple[list, ...]) -> None:
        """Sort the tensors among arguments: with samples, parameters, filled, sums, lost, mixed data, others."""
        for x in args:
            if isinstance(x, Tensor):
                known = getattr(x, "_known", None)
                if known is None or known.run is not self.token:
                    found[6].append(x)
                    if x.requires_grad:
                        self.foreign(x)
                    if (level_of(x) or 0) > (self.level or 0):
                        raise Unsupported("torch.func is used inside of f")
                elif type(known) is Node:
                    found[1].append((x, known))
                elif x.requires_grad and not known.graph:
                    raise Unsupported("a tensor got a graph by a way that was not seen, as a custom Function")
                elif type(known) is Mark:
                    axis = known.axis
                    if type(axis) is tuple:
                        found[0].append((x, axis))
                    else:
                        found[3 if axis is SUMMED else 4 if x.requires_grad else 5].append((x, axis))
                else:
                    found[2].append((x, known))
            elif isinstance(x, (list, tuple)):
                self.look(x, found)

    def foreign(self, x: Tensor) -> None:
        """Look at a tensor of unknown origin that requires a gradient."""
        if x.is_leaf and level_of(x) is None:
            self.closed_over = True
            return
        edges = [u.edge for u in self.uses] + self.leaves
        nodes = [gradient_edge(e).node if isinstance(e, Tensor) else e.node for e in edges]  # kept, and so their ids
        ours = {*map(id, nodes)}
        if any(id(node) in ours for node in graph_of(x)):
            raise Unsupported("a tensor comes from the parameters by a way that was not seen")
        self.closed_over = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in PLAIN:
            return func(*args, **kwargs)
        if kwargs and not args:
            args, kwargs = by_place(func, kwargs)
        if func in FILLED:
            return self.filled(func(*args, **kwargs))
        try:
            if func in REFUSED and not (func in DERIVATIVES and self.whole(func, args, kwargs)):
                raise Unsupported("it is not followed")
            if func is torch.autograd.grad:
                return self.slopes(*args, **kwargs)
            found: tuple[list, ...] = ([], [], [], [], [], [], [])
            self.look((*args, *kwargs.values()) if kwargs else args, found)
            return self.dispatched(func, args, kwargs, found)
        except Unsupported as error:
            error.op = error.op or spelled(func)
            raise

    def whole(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """Tells whether f takes a derivative in tensors down to which the graph is whole."""
        inputs = args[1] if func is torch.autograd.grad and len(args) > 1 else kwargs.get("inputs")
        known = [getattr(x, "_known", None) for x in ((inputs,) if isinstance(inputs, Tensor) else inputs or ())]
        return bool(known) and not any([type(x) is Node for x in known])

    def slopes(self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Take a derivative of what f computes of samples: each input has its own samples, if they are kept apart."""
        out = torch.autograd.grad(outputs, inputs, grad_outputs, *args, **kwargs)
        axes = [getattr(getattr(y, "_known", None), "axis", None) for y in tensors(outputs)]
        given = [getattr(getattr(y, "_known", None), "axis", None) for y in tensors(grad_outputs)]
        apart = all([axis is SUMMED or type(axis) is tuple for axis in axes])
        apart = apart and all([axis is None or axis in axes for axis in given])
        for y, x in zip(out, [inputs] if isinstance(inputs, Tensor) else inputs, strict=True):
            axis: Any = getattr(getattr(x, "_known", None), "axis", None)
            if y is not None and axis is not None:
                seen = apart and not y.requires_grad
                lost = Unsupported("a derivative that f takes, of samples that are mixed, or to be differentiated")
                know(y, Mark(self.token, axis if seen else lost, y.requires_grad))
        return out

    def dispatched(self, func: Any, args: tuple, kwargs: dict, found: tuple[list, ...]) -> Any:
        """Run an operation, given the tensors that it reads."""
        data, params, filled, sums, lost, blends, _ = found
        if filled or self.part or func in LIKE or func in LEAKS:
            data = self.data_of(func, args, found)
        if not data or sums or lost or func is SET:
            return self.special(func, args, kwargs, (data, *found[1:]))
        if len(data) == 1 and not params and func in SHORT and type(data[0][1][1]) is int:  # the most frequent ones
            return self.pointwise(func, args, kwargs, data)
        rule, self.func = RULES.get(func), func
        if self.ordered and len(data) > 1 and rule in BY_ROW and any([type(axis[1]) is int for _, axis in data]):
            # rows of others without a derivative are constants, as in mixup
            data = [(x, axis) for x, axis in data if type(axis[1]) is int or x.requires_grad]
        if self.part and weighs(func, args, kwargs) and any([-axis[0] <= x.ndim for x, axis in data]):
            raise Unsupported("a mean in which targets weigh, of a part of the samples")
        if self.criterion is not None and (out := criterion_of(self, func, args, kwargs, data)) is not None:
            return self.mark(rule, func, args, kwargs, data, out)
        out = self.rewritten(func, args, kwargs, data, params) if rule is None or func in REWRITTEN else None
        if out is not None:
            return out
        if params:
            return self.meet(func, rule, args, kwargs, data, params)
        return self.mark(rule, func, args, kwargs, data, func(*args, **kwargs))

    def data_of(self, func: Any, args: tuple, found: tuple[list, ...]) -> list[Known]:
        """The tensors of whose samples the result is, among those that an operation reads."""
        data, _, filled, sums, lost, blends, _ = found
        if filled and (data or sums or lost or blends):
            data = data + [(x, known.axis) for x, known in filled if known.graph]
        if self.part and any([func not in PICKING or any([x is y for y in (args[0], *args[2:])]) for x, _ in blends]):
            raise Unsupported("data of several samples weigh the loss of a part of them")
        if func in LIKE:  # of the others the form alone
            data = [pair for pair in data if pair[0] is args[0]]
            if func in FILLS and data and type(data[0][1][1]) is not int:  # as large as some samples, and no sample
                return []
        if func in LEAKS and any([x.is_floating_point() for x, _ in (*data, *sums, *lost, *blends)]):
            raise Unsupported("it reads data, whose samples cannot be followed")
        return data

    def rewritten(self, func: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known]) -> Any:
        """The result of an operation of samples in others that are followed; None where it is followed as it is."""
        if func in TABLES and params and option(args, kwargs, 3, "max_norm") is not None:
            raise Final("an embedding with max_norm, which writes its table")
        masked = func is F.scaled_dot_product_attention and option(args, kwargs, 3, "attn_mask")
        if func is F.embedding or (masked is not False and not any([x is masked for x, _ in params])):
            return None
        if func is torch.broadcast_tensors:
            shape = torch.broadcast_shapes(*[x.shape for x in args])
            with self:
                return tuple(x.expand(shape) for x in args)
        if hasattr(func, "rule_of"):
            return of_users(self, func, args, kwargs, data, params)
        inner = self.at_once(func, args, data, params) or composed(func)
        if inner is None:
            return None
        if checkpointing() and not self.replays:
            raise Unreplayed("it is inside of a checkpoint, whose second run is not followed")
        with self:
            return self.seen(inner(*args, **kwargs), func)

    def special(self, func: Any, args: tuple, kwargs: dict, found: tuple[list, ...]) -> Any:
        """Run an operation without samples, of sums of them, or of what is lost."""
        data, params, filled, sums, lost, blends, others = found
        if func is SET and (data or params or sums or lost or blends):
            written = [x for x, _ in blends if x is args[0] or x is args[2]]  # not as an index
            axis = next((axis for x, axis in data if x is args[0]), None)
            if axis and len(params) == 1 and params[0][0] is args[2] and not (sums or lost or written):
                return set_parameter(self, args[0], args[1], axis, *params[0])
            if params and not (data or sums or lost or written):
                return set_derived(self, args, params, not others)
            return set_item(self, args, data, params or sums or lost or written)
        if lost:
            return self.lose(func(*args, **kwargs), lost[0][1])
        if sums:
            return self.with_sums(func, args, kwargs, data, params, sums)
        if filled and func in RULES:
            return self.still_filled(func, args, kwargs, filled, params)
        if blends:
            return self.lose(func(*args, **kwargs), blends[0][1])
        return self.without_samples(func, args, kwargs, params, others)

    def pointwise(self, func: Any, args: tuple, kwargs: dict, data: list[Known]) -> Any:
        """Run a pointwise operation of one tensor with samples."""
        out = func(*args, **kwargs)
        x, axis = data[0]
        if (out is args[0] and out is not x) or type(out) is tuple:
            return self.mark(RULES[func], func, args, kwargs, data, out)
        if out.dtype is not x.dtype and out.dtype in HALF and not torch.is_autocast_enabled(x.device.type):
            if self.criterion is None or not self.criterion.fixed:  # behind the outputs no parameter is read
                raise Unsupported("a cast to half precision")
        known, graph = vars(x)["_known"], out.requires_grad
        if type(known) is not Mark or known.graph is not graph or self.n == 1:
            known = Mark(self.token, axis, graph)
        vars(out)["_known"] = known
        return out

    def at_once(self, func: Any, args: tuple, data: list[Known], params: list[Known]) -> Callable | None:
        """A recurrent layer with all steps in a few operations, whose first derivatives are right."""
        name = named(func)
        if name not in AT_ONCE or self.deep or self.closed_over or not self.alone or saving_hooks():
            return None
        apart = isinstance(args[3], bool) and (self.n == 1 or data[0] == (args[0], (-3 if args[8] else -2, 1, 1)))
        return steps_at_once(name, args, {id(x) for x, _ in params}) if apart else None

    def seen(self, out: Any, func: Any) -> Any:
        """Check that a result of samples was followed in the operations that it is composed of."""
        for y in tensors(out):
            known = getattr(y, "_known", None)
            if y.is_floating_point() and (known is None or known.run is not self.token):
                raise Unsupported("its result was not followed")
            if type(known) is Mark and isinstance(known.axis, Unsupported):
                known.axis.op = spelled(func)
        return out

    def filled(self, out: Any) -> Any:
        """Note a tensor that f fills itself, which may have a dim of samples."""
        if self.grows and isinstance(out, Tensor) and self.n in out.shape and out.is_floating_point():
            self.grew = True
            know(out, Filled(self.token, (out.shape.index(self.n) - out.ndim, 1, 1), out.requires_grad))
        return out

    def still_filled(self, func: Any, args: tuple, kwargs: dict, filled: list[Known], params: list[Known]) -> Any:
        """Run an operation of tensors that f filled, and of parameters."""
        data = [(x, known.axis) for x, known in filled]
        if params:
            out = self.meet(func, RULES[func], args, kwargs, data, params)
        else:
            out = self.mark(RULES[func], func, args, kwargs, data, func(*args, **kwargs))
        for y in tensors(out):
            known = vars(y).pop("_known", None)
            if known is not None and type(known.axis) is tuple:
                know(y, Filled(self.token, known.axis, known.graph))
            elif y.requires_grad:
                raise Unsupported("entries of a tensor that f filled are summed, which may have no samples")
        return out

    def without_samples(self, func: Any, args: tuple, kwargs: dict, params: list[Known], others: list) -> Any:
        """Run an operation of parameters and constants alone."""
        if not params:
            return func(*args, **kwargs)
        if func not in PURE and RULES.get(func) is None and (inner := composed(func)):
            with self:
                return inner(*args, **kwargs)
        if func is F.embedding and self.spread(args[0]):
            data = [(args[0].view_as(args[0]), (-args[0].ndim, 1, 1))]
            know(data[0][0], Mark(self.token, data[0][1], False))
            return self.meet(func, RULES[func], (data[0][0], *args[1:]), kwargs, data, params)
        out = func(*args, **kwargs)
        value, known = params[0]
        front = func in JOINS and args and option(args, kwargs, 1, "dim", 0) == 0  # as in `torch.stack([p] * len(x))`
        same = func in EXPANDS or (front and all([y is value for y in args[0]]))
        if same and self.grows and (at := self.grown_at(known, out.shape, value.shape)) is not None:
            self.grew = True
            return grown(self, out, known, value, at)
        alone = not others and all([node.alone for _, node in params])
        kind = self.kind_of(func, args, params)
        for y in tensors(out):
            if y.is_complex():
                raise Unsupported("complex numbers")
            if y.requires_grad and (y is not value or kind is DERIVED):
                own = VIEW if kind is SWAP and y.ndim != 2 else kind
                know(y, Node(self.token, None if kind is DERIVED else known.leaf, own, alone))
        return out

    def grown_at(self, node: Node, shape: Any, before: Any) -> int | None:
        """The dim in which a parameter that was expanded has samples; of one sample it is the first."""
        if self.n > 1:
            return _grown(shape, before, self.n)
        new = len(shape) > len(before) or (len(shape) == len(before) > 0 and before[0] == 1)
        return -len(shape) if new and shape[0] == 1 else None

    def spread(self, index: Any) -> bool:
        """Tells whether indices were expanded to all samples, as the types of tokens in BERT."""
        return isinstance(index, Tensor) and index.ndim > 1 and len(index) == self.n > 1 and index.stride(0) == 0

    def kind_of(self, func: Any, args: tuple, params: list[Known]) -> str:
        """The kind of what an operation of parameters makes of one: its transpose, a view, or something computed."""
        known = params[0][1]
        view = len(params) == 1 and func in VIEWS and known.kind is not DERIVED
        if not view or (func in INDEXES and _picks(args[1])):
            return DERIVED
        return SWAP if known.kind is LEAF and func in SWAPS and len(args) == 1 else VIEW

    def mark(self, rule: Any, func: Any, args: tuple, kwargs: dict, data: list[Known], out: Any) -> Any:
        """Note where the samples of a result are."""
        if args and out is args[0] and (error := self.in_place(func, out)) is not None:
            return self.lose(out, error, func)
        axes: Any = (-1, 1, 1) if self.n == 1 else None
        if axes is None:
            try:
                if rule is not None and func not in MOVING and -data[0][1][0] <= data[0][0].ndim:
                    axes = rule(self.n, data, args, kwargs, out)
                axes = axes_of(self, rule, func, args, kwargs, data, out) if axes is None else axes
            except Unsupported as error:
                return self.lose(out, error, func)
            except Exception as error:  # of a rule, about arguments that it does not know
                return self.lose(out, Unsupported(f"its arguments are not known: {error}"), func)
        every = (out,) if isinstance(out, Tensor) else [*tensors(out)]
        if type(axes) is list and len(axes) != len(every):
            raise Unsupported("results that are there of some tensors only, as tangents")
        for i, y in enumerate(every):
            axis = axes[i] if type(axes) is list else axes
            graph = y.requires_grad
            if y.is_complex():
                raise Unsupported("complex numbers")
            if type(axis) is tuple and type(axis[1]) is not int:
                self.ordered = True  # samples in any order, if all of them are there once
                if -axis[0] <= y.ndim and y.shape[axis[0]] != len(axis[1].rows):
                    axis = Unsupported("some samples are expanded")
            if axis is SUMMED and not graph:
                axis = Unsupported("a sum of data meets a parameter")
                axis.op = spelled(func)
            if axis is not None:
                known = vars(y)
                if "_known" in known:
                    unchanged(self, y, axis)
                known["_known"] = Mark(self.token, axis, graph)
        return out

    def in_place(self, func: Any, out: Tensor) -> Unsupported | None:
        """The error where an operation has written samples into its first argument, but for one entry by entry; that
        of an index, as the inverse of a permutation, only where the result comes of it."""
        if into_view(out):
            raise Unsupported("samples are written into a view of a tensor without samples")
        if func in POINTWISE or func in GROUPED or not in_place(func):
            return None
        error = Unsupported("an operation in place that is not entry by entry")
        if out.is_floating_point() or base_of(out) is not None:
            raise error
        return error

    def lose(self, out: Any, error: Unsupported, func: Any = None) -> Any:
        """Note that samples are mixed: an error where the result comes of it, or, of data, where parameters meet it."""
        if func is not None:
            error.op = spelled(func)
        for y in tensors(out):
            unchanged(self, y, error)
            know(y, Mark(self.token, error, y.requires_grad))
        return out

    def meet(self, func: Any, rule: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known]) -> Any:
        """Run an operation of samples and parameters."""
        if self.deep and checkpointing():
            raise Unsupported("a checkpoint, whose second run is not followed, where the result is differentiated")
        if func in POINTWISE:
            return expanded(self, func, rule, args, kwargs, data, params)
        factor = FACTORS.get(func)
        if factor is None or ((self.ordered or self.n == 1) and any([-axis[0] > x.ndim for x, axis in data])):
            return copied(self, func, rule, args, kwargs, data, params)
        if self.frees and func is torch.nn.functional.linear and args[0] is data[0][0] and args[0].ndim > 2:
            x, axis = data[0]
            if not x.is_contiguous():  # the copy that linear makes and keeps is the one that is noted
                know(copy := x.contiguous(), Mark(self.token, axis, x.requires_grad))
                args, data = (copy, *args[1:]), [(copy, axis), *data[1:]]
        alias, nodes, axes, end = {}, {}, {}, True
        for x, node in params:
            alias[id(x)], nodes[id(x)] = self.alias(x), node
        for x, axis in data:
            axes[id(x)], end = axis, end and not x.requires_grad
        given = {k: replaced(v, alias) for k, v in kwargs.items()} if kwargs else kwargs
        own = [replaced(x, alias) if type(x) in (list, tuple) else alias.get(id(x), x) for x in args]
        out = self.mark(rule, func, args, kwargs, data, func(*own, **given))
        known = getattr(out, "_known", None)
        if not out.requires_grad or known is None or isinstance(known.axis, Unsupported):
            return out
        uses = None if known.axis is SUMMED else factor(self, args, kwargs, nodes, axes, known.axis, func)
        if uses is None or len(uses) != len(params):
            return copied(self, func, rule, args, kwargs, data, params)
        self.met(out, uses, end)
        return out

    def met(self, out: Tensor, uses: list[Use], end: bool) -> None:
        """Note the uses of an operation, with the edge of the graph at its result."""
        base, count = base_of(out), out.numel()  # of a view, which a later operation in place takes out of the graph
        form = None if base is None else _form(out, base)
        edge = gradient_edge(out if base is None else base)
        saves = self.frees and saving_hooks() is not None
        for use in uses:
            use.edge, use.end, use.count, use.form, use.func = edge, end, count, form, self.func
            if saves and isinstance(use, ProductUse) and (again := given_back(use.a)) is not None:
                use.computed_again(again)
                self.freed = True
        self.uses += uses
        self.numbers += count
        self.largest = max(self.largest, count)

    def with_sums(
        self, func: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known], sums: list[Known]
    ) -> Any:
        """Run an operation that is linear in sums over the samples; parameters may be added."""
        times = func in MULTIPLY or func in PRODUCTS or (func in DIVIDE and sums[0][0] is args[0])
        linear = func in LINEAR or (times and len(sums) == 1 and not params)
        apart = data and not (func in SUMS and single(data) and all([not x.ndim for x, _ in data]))
        if apart or not linear or (params and func not in SUMS):
            error = Unsupported("it is not linear in a sum over the samples")
            error.params = bool(params)
            return self.lose(func(*args, **kwargs), error, func)
        if self.each and not all([node.alone for _, node in params]):
            raise Unsupported("a term of parameters and other tensors, which may be of samples that were not seen")
        alias, self.func = {id(x): self.alias(x) for x, _ in params}, func
        out = func(*replaced(args, alias), **kwargs)
        for x, node in params:
            self.use(Shared(node, x), alias[id(x)])
        for y in tensors(out):
            know(y, Mark(self.token, SUMMED, y.requires_grad))
        return out

    # Cotangents

    def pull_columns(self, out: Any, columns: Any, some: Sequence[Use] | None = None, retain: bool = True) -> None:
        """Pull vectors `[V, *out]` back at once, a list of them from several tensors, to all uses or `some`; the leaves
        themselves must get nothing."""
        uses = self.uses if some is None else some
        edges = {id(u.edge): u.edge for u in uses}
        columns = columns if type(columns) is list else [columns]
        self.columns, self.known = len(columns[0]), {}
        large = self.columns > 1 and self.largest >= thresholds.APART and columns[0].device.type in thresholds.APART_ON
        found = self.rows(out, [*edges.values(), *self.leaves], columns, self.deep, large, retain)
        self.check(found[len(edges) :])
        cotangents = dict(zip(edges, found, strict=False))
        for use in uses:
            d = cotangents[id(use.edge)]
            if type(d) is list and isinstance(use, (Copies, Shared)):
                d = torch.stack(d)
            use.send(self.strip(d) if self.deep and isinstance(d, Tensor) else d)

    def rows(
        self,
        out: Any,
        inputs: Sequence[Any],
        columns: Sequence[Tensor],
        graph: bool,
        apart: bool = False,
        retain: bool = True,
    ) -> list[Any]:
        """The gradients of several vectors, a tensor `[V, ...]` for each of several tensors; `apart`, in lists."""
        outs = out if type(out) in (list, tuple) else [out]  # an edge is a tuple, too
        if len(columns[0]) == 1:
            found = gradients_of(outs, [c[0] for c in columns], inputs, graph, retain)
            return [None if g is None else g[None] for g in found]
        if apart:
            each = [gradients_of(outs, column, inputs, graph, retain=True) for column in zip(*columns, strict=True)]
            each = [*zip(*each, strict=True)]
            return [None if g[0] is None else [wide(self.strip(d)) for d in g] for g in each]
        return pulled_rows(outs, inputs, columns, graph, not self.deep)

    def stream(self, out: Any, cotangent: Any, arrived: Callable[[Use], None]) -> None:
        """Pull one vector back, and hand each use over as its cotangent comes; it is freed then."""
        ends: dict[int, Any] = {}
        of: dict[int, list[Use]] = {}
        for use in self.uses:
            of.setdefault(id(use.edge), []).append(use)
            if use.end:
                ends[id(use.edge)] = use.edge

        def told(key: int, d: Tensor) -> None:
            for use in of.pop(key, ()):
                use.send(d.detach()[None])
                arrived(use)
            self.known.clear()  # what a weight and its bias share

        def read(key: int, number: int, grads: Any) -> None:
            if grads[number] is not None:
                told(key, grads[number])

        def emptied(key: int, d: Tensor) -> Tensor:
            told(key, d)
            return d.new_zeros(()).expand(d.shape)  # what autograd keeps until the end

        handles = []
        for key, uses in of.items():
            edge = uses[0].edge
            if isinstance(edge, Tensor):
                handles.append(edge.register_hook(partial(emptied, key)))
            elif not uses[0].end:
                handles.append(edge.node.register_prehook(partial(read, key, edge.output_nr)))
        try:
            outs, given = (x if type(x) in (list, tuple) else [x] for x in (out, cotangent))
            found = gradients_of(outs, given, [*ends.values(), *self.leaves], False)
        finally:
            for handle in handles:
                handle.remove()
        self.check(found[len(ends) :])
        for key, d in zip(ends, found, strict=False):
            if d is not None and key in of:  # not those of copies, of which the hooks have told
                told(key, d)

    def check(self, of_leaves: Sequence[Tensor | None]) -> None:
        """Check that the leaves got nothing."""
        if any([g is not None for g in of_leaves]):
            raise Unsupported("a parameter reaches the result by a way that was not seen")

    # Blocks of samples

    def blocks(self, uses: Sequence[Use], size: int | None = None) -> list[Block]:
        """Slices of the samples whose per-sample gradients fit the cache."""
        size = sum([u.size(self) for u in uses]) if size is None else size
        most = thresholds.CACHE.get(uses[0].value.device.type, thresholds.ELSEWHERE) // thresholds.SHARES
        if size * self.count <= most:
            return [WHOLE]
        step = max(1, most // max(1, size))
        step = -(-self.count // -(-self.count // step))  # blocks of one size
        return [slice(i, min(i + step, self.count)) for i in range(0, self.count, step)]

    def taken(self, x: Tensor, block: Block, dim: int = 0) -> Tensor:
        """A block of the chosen samples, which are along a dim."""
        if self.chosen is not None:
            return x.index_select(dim, self.chosen[block])
        return x if block is WHOLE else x[block] if dim == 0 else x[:, block]


def _grown(shape: Any, before: Any, n: int) -> int | None:
    """The dim in which a shape has samples that it had not before."""
    for dim in range(-len(shape), 0):
        if shape[dim] == n and (-dim > len(before) or before[dim] == 1):
            return dim
    return None


def _form(out: Tensor, base: Tensor) -> tuple[Sequence[int], list[int] | None]:
    """The shape of the entries of a base in the order of the dims of a view of it, and these dims as they are there;
    None of a view in that order."""
    order = None if out.is_contiguous() else sorted(range(out.ndim), key=lambda dim: (-out.stride(dim), dim))
    turned = out if order is None else out.permute(order)
    if out.numel() != base.numel() or not turned.is_contiguous() or not base.is_contiguous():
        raise Unsupported("an operation whose result is a part of another tensor, or in another order")
    return turned.shape, None if order is None else sorted(range(out.ndim), key=order.__getitem__)


def _picks(index: Any) -> bool:
    """Tells whether some of an index are tensors or lists, which may pick an entry several times."""
    return any(isinstance(i, (Tensor, list, range)) for i in (index if isinstance(index, tuple) else (index,)))
