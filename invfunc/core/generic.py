"""Operations that have no rule: on copies of the parameters, in others that they are composed of, or by a user's rule;
and writes in place.

Samples of a user's operation go in and out along axis 0. Samples that are written stay where they are, and parameters
that are written among samples are uses of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._torch.functorch import base_of, checkpointing, mapped, saving_hooks, version
from invfunc._torch.opened import opened
from invfunc._torch.values import wide
from invfunc.core.marks import (
    DERIVED,
    SUMMED,
    Filled,
    Known,
    Mark,
    Node,
    Run,
    Unsupported,
    know,
    named,
    replaced,
    tensors,
)
from invfunc.core.probe import axes_of
from invfunc.core.tables import LIKE, MOVES, PLACING, POINTWISE, RULES
from invfunc.core.uses import WHOLE, Block, Copies, Expanded, Use
from invfunc.errors import SampleAxisError
from invfunc.operations.axis import Order, back, exposed, numbers, read
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.operations.operation import OPERATIONS, in_place


def expanded(run: Run, func: Any, rule: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known]) -> Any:
    """Run a pointwise operation with the parameters expanded."""
    shape = torch.broadcast_shapes(*[x.shape for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])
    copies = {id(x): run.alias(x.expand(shape)) for x, _ in params}
    out = func(*replaced(args, copies), **{k: replaced(x, copies) for k, x in kwargs.items()})
    out = run.mark(rule, func, args, kwargs, data, out)
    axis = known.axis if (known := getattr(out, "_known", None)) is not None else None
    if isinstance(axis, tuple) and next(iter(tensors(out))).requires_grad:
        for x, node in {id(x): (x, node) for x, node in params}.values():
            run.use(Expanded(node, x, axis), copies[id(x)])
    elif axis is SUMMED:
        raise Unsupported("a sum over the samples meets a parameter")
    return out


def grown(run: Run, out: torch.Tensor, node: Node, value: torch.Tensor, at: int) -> torch.Tensor:
    """A parameter that was expanded or repeated to all samples, of which each has its copy."""
    sizes = out.shape[out.ndim - value.ndim :]
    if any(s not in (1, o) for s, o in zip(value.shape, sizes, strict=True)):
        raise Unsupported("a parameter that is repeated")
    copy = run.alias(out)
    axis = (at, 1, 1)
    use = Expanded(node, value, axis)
    use.grown = True
    run.use(use, copy)
    know(copy, Mark(run.token, axis, True))
    return copy


def copied(run: Run, func: Any, rule: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known]) -> Any:
    """Run any operation under vmap, with a copy of the parameters for each sample."""
    check_places(func, args, data, params)
    flat, structure = tree.flatten((args, kwargs))
    axes, nodes = {id(x): a for x, a in data}, {id(x) for x, _ in params}
    copies: dict[int, torch.Tensor] = {}
    given: list[Any] = []
    places: list[int] = []
    for x in flat:
        if id(x) in nodes:
            if id(x) not in copies:
                copies[id(x)] = run.alias(x.expand(run.n, *x.shape))
            x = copies[id(x)]
        elif id(x) in axes:
            x = exposed(x, axes[id(x)], run.n, fill=False)
        else:
            given.append(x)
            continue
        places.append(len(given))
        given.append(x)
    with torch.no_grad():
        plain = func(*args, **kwargs)
    if not isinstance(plain, torch.Tensor):
        raise Unsupported("the result is no tensor")
    found = [(-1, 1, 1)] if run.n == 1 else axes_of(run, rule, func, args, kwargs, data, plain)
    axis = found[0] if isinstance(found, list) else found
    if axis is SUMMED:
        raise Unsupported("samples are summed with what is computed without them (does f close over its inputs?)")
    if not isinstance(axis, tuple):
        raise Unsupported("the samples are not in one dim of the result")
    run.ordered = run.ordered or isinstance(axis[1], Order)

    def one(*mapped: torch.Tensor) -> torch.Tensor:
        full = list(given)
        for i, x in zip(places, mapped, strict=True):
            full[i] = x
        own, named = tree.unflatten(full, structure)
        return (looked_up if func is F.embedding else func)(*own, **named)

    out = mapped(one, randomness="different")(*(given[i] for i in places))
    if out[0].numel() * (1 if getattr(axis[1], "ragged", False) else run.n) != plain.numel():
        raise Unsupported("an operation in which parameters have an entry for each sample")
    out = out.squeeze(0) if run.n == 1 else back(out.flatten(1)[None], plain.shape, axis, run.n)[0]
    know(out, Mark(run.token, axis, out.requires_grad))
    for x, node in {id(x): (x, node) for x, node in params}.values():
        run.use(Copies(node, x), copies[id(x)])
    return out


def looked_up(
    input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """`embedding` under torch.vmap, where torch's leaves out the padding of the first sample alone."""
    out = F.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return out
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), out.detach(), out)


def check_places(func: Any, args: tuple, data: list[Known], params: list[Known]) -> None:
    """Refuse operations that read or write parameters by the places of samples."""
    if in_place(func):
        raise Unsupported("parameters are written among samples")
    if func in MOVES and not any([x is args[0] for x, _ in data]):
        raise Unsupported("samples pick in the rows of parameters")
    if (func in PLACING or "scatter" in named(func)) and not any([x is args[0] for x, _ in params]):
        raise Unsupported("parameters are placed among samples")


# Operations of the user's own


class Ruled(Use):
    """A parameter whose per-sample gradients are an einsum of what the user's rule returns."""

    def __init__(
        self, node: Node, value: torch.Tensor, rule: Callable, given: tuple[tuple, dict], axes: dict[int, Any]
    ) -> None:
        """`given` are the arguments of the operation, of which those with `axes` have samples."""
        super().__init__(node, value)
        self.rule, self.given, self.axes = rule, given, axes
        self.axis: Any = None
        self.versions = [version(x) for x in tree.tensors(given)]

    def free(self) -> None:
        self.d, self.given = None, ((), {})

    def asked(self, run: Run, d: torch.Tensor, block: Block) -> tuple[str, tuple[torch.Tensor, ...]]:
        """The equation and the operands of cotangents `[V, n, *out]`."""
        if self.versions != [version(x) for x in tree.tensors(self.given)]:
            raise Unsupported("an argument of an operation was changed in place later")

        def shown(x: torch.Tensor) -> torch.Tensor:
            y = run.strip(x)
            return run.taken(y, block) if id(x) in self.axes else y

        if run.chosen is not None and run.count == run.n > 1 and block is WHOLE:
            self.asked(run, d[:, :1], slice(0, 1))  # an error where it closes over a tensor of all samples
        args, kwargs = tree.map_tensors(shown, self.given)
        try:
            return self.rule(d, args, kwargs, self.shape)
        except RuntimeError as error:
            raise Unsupported(
                f"the rule of an operation raised {type(error).__name__} ({error}) of some of the samples. What has an "
                "entry for each of them has to be an argument of the operation"
            ) from error

    def dense(self, run: Run, block: Block = WHOLE) -> torch.Tensor:
        equation, operands = self.asked(run, self.sent(run, block).squeeze(2), block)
        return torch.einsum(equation.replace("->", "->vn"), *map(wide, operands))

    def total(self, run: Run, weights: torch.Tensor | None = None) -> torch.Tensor:
        d = self.sent(run).squeeze(2)
        d = d if weights is None else d * weights.to(d.dtype).view(-1, *[1] * (d.ndim - 2))
        equation, operands = self.asked(run, d, WHOLE)
        return torch.einsum(equation, *map(wide, operands))


def of_users(run: Run, op: Any, args: tuple, kwargs: dict[str, Any], data: list[Known], params: list[Known]) -> Any:
    """Run an operation of the user's own; of parameters without a rule, with a copy for each sample."""
    axes = {id(x): axis for x, axis in data}
    for x, axis in data:
        if run.n > 1 and axis != (-x.ndim, 1, 1):
            raise SampleAxisError(f"{op!r}: its samples have to lie along axis 0")
    nodes = {id(x): (x, node) for x, node in params}
    uses: list[Ruled] = []
    for x, node in nodes.values():
        if (rule := op.rule_of(args, kwargs, x)) is not None:
            uses.append(Ruled(node, x, rule, (args, kwargs), axes))
    by = {id(u.value): run.alias(u.value) for u in uses}
    given = tuple(replaced(x, by) for x in args)
    options = {key: replaced(x, by) for key, x in kwargs.items()}
    rest = [pair for key, pair in nodes.items() if key not in by]
    if rest:
        out = copied(run, op.fn, lambda *_: _checked(run, op, _[-1]), given, options, data, rest)
    else:
        out = op.fn(*given, **options)
        out = out.clone() if isinstance(out, torch.Tensor) and base_of(out) is not None else out
    know(out, Mark(run.token, _checked(run, op, out), out.requires_grad))
    for use in uses:
        use.axis = (-out.ndim, 1, 1)
    if uses and out.requires_grad:
        run.met(out, uses, not any([x.requires_grad for x, _ in data]))
    return out


def _checked(run: Run, op: Any, out: Any) -> Any:
    """The axis of the result, which has to have the samples in front."""
    if not isinstance(out, torch.Tensor):
        raise SampleAxisError(f"{op!r} returned something else than one tensor")
    if out.ndim == 0 or out.shape[0] != run.n:
        raise SampleAxisError(f"{op!r} returned shape {tuple(out.shape)} for {run.n} samples along axis 0")
    return (-out.ndim, 1, 1)


class Unreplayed(Unsupported):
    """Raised where a checkpoint has to be evaluated again as it was followed."""


def composed(func: Any) -> Callable | None:
    """The operations that a function is composed of, if it is known in which, or written in Python."""
    entry = OPERATIONS.get(named(func).removeprefix("_VF.")) if not isinstance(func, type) else None
    if entry is not None and entry.composed is not None:
        return entry.composed
    func = getattr(func, "__wrapped__", func)
    return opened(func) if getattr(func, "__module__", "").startswith("torch.") else None


class Composed(TorchFunctionMode):
    """Runs operations in those in which a run follows them, for a block that is evaluated once more."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        inner = composed(func) if RULES.get(func) is None or func is torch.nn.functional.embedding_bag else None
        if inner is not None:
            with self:
                return inner(*args, **kwargs)
        read = [*tensors((args, kwargs))]
        params = [x for x in read if type(getattr(x, "_known", None)) is Node]
        if params and len(params) < len(read) and func in POINTWISE and func not in LIKE:
            shape = torch.broadcast_shapes(*[x.shape for x in read])
            wide = {id(x): x.expand(shape) for x in params}
            return func(*replaced(args, wide), **{k: replaced(x, wide) for k, x in kwargs.items()})
        out = func(*args, **kwargs)
        for x in tensors(out) if params and len(params) == len(read) else ():
            vars(x)["_known"] = vars(params[0])["_known"]
        return out


class Replays(TorchFunctionMode):
    """Lets torch.utils.checkpoint evaluate again in the operations in which a run follows f."""

    def __init__(self, twice: bool) -> None:
        """`twice` says that these are in a form that can be differentiated twice."""
        super().__init__()
        self.twice = twice

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        hooks = saving_hooks() if checkpointing() else None
        if hooks is None:
            return func(*args, **(kwargs or {}))
        pack, unpack = hooks

        def again(held: Any) -> Tensor:
            with TwiceDifferentiable() if self.twice else nullcontext(), Composed():
                return unpack(held)

        with torch.autograd.graph.saved_tensors_hooks(pack, again):
            return func(*args, **(kwargs or {}))


SET = Tensor.__setitem__


def set_item(run: Run, args: tuple, data: list[Known], others: Any) -> None:
    """Write entries: what is written must have its samples where the tensor has them."""
    x, index, value = args
    if base_of(x) is not None and id(x) not in {id(y) for y, _ in data}:
        raise Unsupported("samples are written into a view of a tensor without samples")
    SET(x, index, value)
    run.ordered = True  # perhaps
    axes = {id(y): axis for y, axis in data}
    axis: Any = Unsupported("samples, or sums of them, or parameters are written among samples")
    if not others and run.n > 1:
        known = numbers(x.shape, axes[id(x)], run.n, x.device).clone() if id(x) in axes else None
        known = torch.full(x.shape, -1, device=x.device) if known is None else known
        if id(value) in axes:
            known[index] = numbers(value.shape, axes[id(value)], run.n, x.device)
        found = read(known, run.n)
        axis = found if found is not None and axes.get(id(x), found) == found else axis
    unchanged(run, x, axis)
    know(x, Mark(run.token, axis if run.n > 1 else (-1, 1, 1), x.requires_grad))


def set_derived(run: Run, args: tuple, params: list[Known], alone: bool) -> None:
    """Write parameters into a tensor without samples, as into a matrix of zeros, which is computed of them then."""
    x, index, value = args
    before = x.__dict__.get("_known")
    if base_of(x) is not None or (type(before) is Node and before.kind is not DERIVED):
        raise Unsupported("parameters are written into a view")
    if any([u.value is x or base_of(u.value) is x for u in run.uses]):
        raise Unsupported("a tensor of parameters is written after it was read")
    SET(x, index, value)
    know(x, Node(run.token, None, DERIVED, alone and all([node.alone for _, node in params])))


def set_parameter(run: Run, x: Tensor, index: Any, axis: Any, value: Tensor, node: Node) -> None:
    """Write a parameter among samples, as a mask token is: each entry is a use of it by the sample that it has."""
    before = x[index]
    at: Any = (-1, 1, 1)
    if run.n > 1:
        at = read(numbers(x.shape, axis, run.n, x.device)[index], run.n)
    if at is None:
        raise Unsupported("a parameter is written at places of samples that are not along one dim")
    run.ordered = True  # perhaps
    copy = run.alias(value.expand(before.shape))
    SET(x, index, copy)
    run.use(Expanded(node, value, at), copy)
    know(x, Mark(run.token, axis, x.requires_grad))


def unchanged(run: Run, x: Tensor, axis: Any) -> None:
    """Check that a tensor that was written has its samples where they were, as views of it do not learn of it."""
    before = x.__dict__.get("_known")
    if run.n > 1 and before is not None and type(before) is not Filled and version(x):
        lost = isinstance(axis, Unsupported)
        if type(before) is Node or before.axis != axis or (lost and base_of(x) is not None):  # pyright: ignore[reportAttributeAccessIssue]
            raise axis if lost else Unsupported("what is written moves the samples")


def into_view(x: Any) -> bool:
    """Tells whether a tensor of which nothing was known is a view, so that writing it writes another one."""
    known = getattr(x, "_known", None)
    return (known is None or type(known) is Filled) and isinstance(x, Tensor) and base_of(x) is not None
