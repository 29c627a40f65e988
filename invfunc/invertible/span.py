"""Many steps of one training as a single node of plain autograd, which goes back through them one by one.

A block for each step watches all that the loss reads, writes and draws, so that it can be evaluated again. The first
step of many is such a block, and shows what the loss does. Where that is nothing but to compute, the steps behind it
are one node, and all is well if the state before them comes back to the last bit: then all gradients were the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._torch.functorch import dispatched, dual, levels, under, version
from invfunc._torch.levels import forward_mode
from invfunc.errors import InverseError, InvFuncError, ModifiedError, ReplayError
from invfunc.invertible.checkpoint import Checkpointed
from invfunc.invertible.outside import Outside, Seen, all_among
from invfunc.pairs.pair import behind
from invfunc.pairs.training import Optimiser, Training
from invfunc.recomputation.block import Block
from invfunc.recomputation.call import Tensors
from invfunc.recomputation.function import LevelBlock
from invfunc.recomputation.noted import block_of, metadata_of
from invfunc.recomputation.probe import Probe
from invfunc.recomputation.replay import Replay
from invfunc.recomputation.report import Report, way
from invfunc.recomputation.rounding import largest
from invfunc.recomputation.slots import fetch
from invfunc.recomputation.sparse import any_sparse
from invfunc.recomputation.states import names_of
from invfunc.transform import told

Step = tuple[Checkpointed, Any]


def onward(state: Any, done: Checkpointed, steps: Sequence[Step], args: tuple, kwargs: dict) -> tuple[Any, int]:
    """The state after as many of these steps as one node can do behind one that is done, and their number."""
    number = _alike(done, steps)
    if not number or not isinstance(state, Training) or not _plain():
        return state, 0
    constants = _constants(state)
    if constants is None:
        return state, 0
    xs, before = tree.separate(state)
    rest, given = tree.separate(([p for _, p in steps[:number]], args, kwargs))
    tensors = [*xs, *rest]
    if any(type(t) not in (torch.Tensor, nn.Parameter) for t in tensors) or any_sparse(tensors) or dual(*tensors):
        return state, 0
    span = _Span(done, (before, given), (len(xs), 1 + len(state.moments)), constants)
    try:
        ys = span.forth(xs, rest)
    except InvFuncError as error:
        raise told(error, f"{done!r}(x, ...)") from error.__cause__
    if not span.count:
        return state, 0
    ys = _Node.apply(span, ys, *tensors)[: len(ys)]
    span.connect(xs, ys, [metadata_of(y) for y in ys])
    return span.after.join(ys), span.count


def _alike(done: Checkpointed, steps: Sequence[Step]) -> int:
    """How many of these steps are of the same optimiser and options as one that is done, if one node can do them."""
    if not isinstance(done.pair, Optimiser) or done.check not in ("warn", "error", "off"):
        return 0
    options = False, done.check, done.preserve_rng_state, done.min_bytes
    for i, (g, _) in enumerate(steps):
        if g.pair is not done.pair or (g.keep, g.check, g.preserve_rng_state, g.min_bytes) != options:
            return i
    return len(steps)


def _plain() -> bool:
    """Whether nobody looks on but plain autograd."""
    if levels() or forward_mode() or dispatched() or under(TorchFunctionMode):
        return False
    return torch.is_grad_enabled()


_Constants = list[tuple[ref[torch.Tensor], int]]


def _constants(state: Training) -> _Constants | None:
    """The tensors from outside that the step read which gave the state, with their versions; None if it was no block of
    its own, or did more than to compute: it drew, wrote or left something, or closes over what needs a gradient."""
    block = block_of(state.weights)
    if not isinstance(block, LevelBlock):
        return None
    call = block.call
    if call.followed or call.left.something or any(m.after is not m.before for m in call.moments):
        return None
    others = [other for used in call.others.values() for other in used]
    if any(other.written or other.lift is not None for other in others):
        return None
    return [(other.tensor, other.version) for other in others]


class _Span(Block):
    """Steps behind one that is done.

    Args:
        done: that one, whose optimiser and options they have.
        forms: of the state before them, and of all that they are given, `([p, ...], args, kwargs)`.
        numbers: of the tensors of that state, and of those among them that have ghosts.
        constants: what they read from outside, with its versions.
    """

    def __init__(
        self,
        done: Checkpointed,
        forms: tuple[tree.Form, tree.Form],
        numbers: tuple[int, int],
        constants: _Constants,
    ) -> None:
        super().__init__((), Report(done, way(done.check), None, done.known))
        assert isinstance(done.pair, Optimiser) and done.pair.law is not None
        self._done, self._law, (self._gradient,) = done, done.pair.law, done.pair.shared
        (self._before, self._given), (self.number, self.ghosts), self._constants = forms, numbers, constants
        self._rest: list[torch.Tensor] = []
        self._start: Replay
        self.after: tree.Form
        """The form of the state behind them."""
        self.count = 0
        """How many they are."""
        self._seen: list[Seen] = []
        """What each of them has read from outside."""

    def forth(self, xs: Tensors, rest: Tensors) -> list[torch.Tensor]:
        """The tensors of the state behind the steps: the first that does more than to compute is none of them."""
        generators = [leaf for leaf in self._given.others if isinstance(leaf, torch.Generator)]
        self._start = Replay((*xs, *rest), generators, self._done.preserve_rng_state, self._done.known.attributes)
        self._rest = [t.detach() for t in rest]
        state = self._before.join([x.detach() for x in xs])
        ps, args, kwargs = self._given.join(self._rest)
        for p in ps:
            with Outside() as outside:
                found = self._law.forward(self._gradient, state, *behind(p, args, kwargs), **kwargs)
            if self._start.later() is not self._start:
                self._start.rewind()
                break
            if any(t.requires_grad for t in tree.tensors(found)):  # by what the loss closes over
                break
            seen = outside.seen((*xs, *rest, *tree.tensors((state, found, self._rest))))
            if self._seen and len(seen) == len(self._seen[-1]) and all_among(seen, self._seen[-1]):
                seen = self._seen[-1]  # thousands of steps take no more memory than one
            else:
                self._constants += seen.values()
            self._seen.append(seen)
            state, self.count = found, self.count + 1
        if self._changed():
            raise ReplayError(
                "the loss, or the learning rate, writes into a tensor that it only read in the step before, so that it "
                "cannot be evaluated again. Pass what changes as an argument; of a module, use eval mode."
            )
        ys, self.after = tree.separate(state)
        return ys

    def _changed(self) -> bool:
        """Whether something from outside has been written."""
        alive = [(tensor, then) for of, then in self._constants if (tensor := of()) is not None]
        return any(version(tensor) != then for tensor, then in alive)

    def back(
        self, rest: Tensors, slopes: Sequence[torch.Tensor | None], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradients of the state before the steps and of all that they are given, from those of the state behind
        them."""
        rest = [t.detach().requires_grad_(need) for t, need in zip(rest, needs, strict=True)]
        ps, args, kwargs = self._given.join(rest)
        shared, found = _needing((args, kwargs)), dict[int, torch.Tensor]()
        with self._going_back() as state:
            slope = self._law.slope(state, slopes)
            for k in reversed(range(self.count)):
                asked = list({id(t): t for t in (*_needing(ps[k]), *shared)}.values())
                with Outside() as outside:
                    came = self._law.pulled_back(
                        self._gradient, state, slope, asked, behind(ps[k], args, kwargs), kwargs
                    )
                self._check_read(k, outside, (state, slope, came, rest))
                state, slope, gained = came
                for t, g in zip(asked, gained, strict=True):
                    if g is not None:
                        found[id(t)] = found[id(t)] + g if id(t) in found else g
            xs = self._came(state)
        return [*slope, *[None] * (len(xs) - len(slope)), *(found.get(id(t)) for t in rest)]

    def invert(self) -> None:
        self._inverted()

    def _inverted(self) -> list[torch.Tensor]:
        with self._going_back() as state, torch.no_grad():
            return self._came(self._through(state, self._law.inverse))

    def _through(self, state: Training, step: Callable, reverse: bool = True) -> Training:
        """The state behind all steps in one direction."""
        ps, args, kwargs = self._given.join(self._rest)
        for k in range(self.count)[:: -1 if reverse else 1]:
            with Outside() as outside:
                came = step(self._gradient, state, *behind(ps[k], args, kwargs), **kwargs)
            self._check_read(k, outside, (state, came, self._rest))
            state = came
        return state

    def _check_read(self, k: int, outside: Outside, own: Any) -> None:
        """Check that a step has read from outside what it had read on the way forth."""
        if not all_among(outside.seen(tree.tensors(own)), self._seen[k]):
            raise ReplayError(
                "the loss, or the learning rate, reads another tensor than when the step was done, or one that was "
                "written since. Pass what changes as an argument of the steps."
            )

    @contextmanager
    def _going_back(self) -> Iterator[Any]:
        """A context in which all is as it was when the steps were done, with the state behind them."""
        try:
            if self._changed():
                raise ModifiedError(
                    "a tensor that the loss closes over has been modified by an inplace operation after it was "
                    "evaluated. Write t = t + z in place of t += z."
                )
            with self._start.again():
                yield self.after.join(fetch(self._ys))
        except InvFuncError as error:
            raise told(error, f"invertible_checkpoint({self._done.pair!r}), in the backward pass") from error.__cause__

    def _came(self, state: Training) -> list[torch.Tensor]:
        """The tensors of the state before the steps, which has come back."""
        xs = tree.tensors(state)
        if isinstance(self._probe, Probe) and largest(self._probe.errors(xs)) != 0:  # it gathers nothing
            raise InverseError(
                f"the state before {self.count} steps does not come back to the last bit, so that the gradients were "
                "not those of the way forth: the loss reads something that was replaced since (pass it as an "
                "argument), or an operation is not deterministic (torch.use_deterministic_algorithms)."
            )
        self.give_back_and_tell(xs)
        return xs

    def again(
        self, ghosts: Tensors, rest: Tensors, slopes: Sequence[torch.Tensor | None], needs: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """What `back` gives, with a graph: by a block a step."""
        xs = self._inverted()  # also where they are there, as it looks at what is read
        ghosts, rest = ([t.view_as(t) for t in ts] for ts in (ghosts, rest))  # behind which no gradient goes on
        given = [*(x + ghost for x, ghost in zip(xs, ghosts, strict=False)), *xs[len(ghosts) :]]
        state, (ps, args, kwargs) = self._before.join(given), self._given.join(rest)
        for p in ps[: self.count]:
            state = self._done(state, *behind(p, args, kwargs), **kwargs)
        pairs = zip(tree.tensors(state), slopes, strict=True)
        back = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
        inputs = [*ghosts, *[None] * (len(xs) - len(ghosts)), *rest]
        found: list[torch.Tensor | None] = [None] * len(inputs)
        asked = [i for i, t in enumerate(inputs) if t is not None and needs[i]]
        if back and asked:
            ys, gs = zip(*back, strict=True)
            of = [inputs[i] for i in asked]
            for i, g in zip(asked, torch.autograd.grad(ys, of, gs, create_graph=True, allow_unused=True), strict=True):
                found[i] = g
        return found

    def names(self, of: str = "x") -> list[str]:
        return names_of(of, {"x": self._before, "y": self.after}[of])

    def dtypes(self) -> list[torch.dtype]:
        return [t.dtype for t in self._rest]

    def once_more(self, sources: Tensors, xs: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        back = self._through(self.after.join(sources), self._law.inverse)
        return tree.tensors(back), tree.tensors(self._through(self._before.join(xs), self._law.forward, reverse=False))


def _needing(given: Any) -> list[torch.Tensor]:
    return [t for t in tree.tensors(given) if t.requires_grad]


class _Node(torch.autograd.Function):
    """`(span, ys, xs and rest) -> (ys, ghosts of xs)`; ghosts are zeros without memory, which stand for xs where a
    gradient is differentiated."""

    @staticmethod
    def forward(ctx: Any, span: _Span, ys: list[torch.Tensor], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in ys if not y.is_floating_point()))
        ghosts = [x.new_zeros(()).expand(x.shape) for x in tensors[: span.ghosts]]
        ctx.span = span
        ctx.save_for_backward(*ghosts, *tensors[span.number :])
        return *ys, *ghosts

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        span, needs = ctx.span, ctx.needs_input_grad[2:]
        number = len(slopes) - span.ghosts
        of_ghosts, slopes = slopes[number:], slopes[:number]
        ghosts, rest = ctx.saved_tensors[: span.ghosts], ctx.saved_tensors[span.ghosts :]
        found: list[torch.Tensor | None] = [None] * len(needs)
        if any(g is not None for g in slopes):
            found = (
                span.again(ghosts, rest, slopes, needs)
                if torch.is_grad_enabled()
                else span.back(rest, slopes, needs[span.number :])
            )
        for i, g in enumerate(of_ghosts):
            before = found[i]
            found[i] = g if before is None else before if g is None else before + g
        return None, None, *(g if need else None for g, need in zip(found, needs, strict=True))
