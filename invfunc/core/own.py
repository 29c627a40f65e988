"""Operations of the user's own: samples go in and out along axis 0, and a rule says what a parameter's share is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import base_of, version
from invfunc._torch.values import wide
from invfunc.core.copies import copied
from invfunc.core.marks import Known, Mark, Node, Run, Unsupported, know, replaced
from invfunc.core.uses import WHOLE, Block, Use
from invfunc.errors import SampleAxisError


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


def followed(run: Run, op: Any, args: tuple, kwargs: dict[str, Any], data: list[Known], params: list[Known]) -> Any:
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
