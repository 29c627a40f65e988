"""From a function to its statistics: run the model part in blocks, the loss part once, pull back, and fold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc import tree
from invfunc._functorch import innermost, version
from invfunc.errors import ArgumentError, InvFuncError, RandomnessError, SampleAxisError, SplitError, samples_lost
from invfunc.jacobian import columns as hessians
from invfunc.jacobian.axis import Axis
from invfunc.jacobian.columns import Block, Columns, Gradient
from invfunc.jacobian.follow import TOTAL, Call
from invfunc.jacobian.generic import generic
from invfunc.jacobian.measures import Measure, State
from invfunc.jacobian.plan import Plan, even
from invfunc.jacobian.problem import Problem
from invfunc.jacobian.random import Draws, Drew, Watch, restore
from invfunc.jacobian.rules import Site
from invfunc.jacobian.scope import Scope
from invfunc.jacobian.shares import Columns as Pulled
from invfunc.jacobian.shares import Deltas, Shares
from invfunc.jacobian.split import Reached, Root, Splitter, active
from invfunc.jacobian.trace import Derived, Sampled, Tap, Trace

WHOLE = slice(None)


@dataclass(frozen=True)
class Options:
    """How to compute: `fast=False` takes the generic path at every operation."""

    plan: Plan = field(default_factory=Plan)
    fast: bool = True


def budget(device: torch.device) -> int:
    """How many numbers an intermediate tensor may have: what a CPU keeps in its cache, what keeps a GPU busy."""
    return 6 * 2**20 if device.type == "cpu" else 2**26


@dataclass
class Run:
    """A run of the model part on the samples `part`: taps, and the outputs to pull back from."""

    trace: Trace
    params: list[torch.Tensor]
    part: slice
    outputs: dict[int, tuple[torch.Tensor, Axis]]
    result: Any = None
    aux: Any = None


class Engine:
    """One evaluation of one statistic."""

    def __init__(self, problem: Problem, options: Options, measure: Measure) -> None:
        self.problem, self.options, self.measure = problem, options, measure
        self.plan = options.plan
        self.scope = Scope(problem.tensors())
        self.states: list[State | None] = [None] * len(problem.leaves)
        self.budget = budget(problem.leaves[0].device)

    def first_order(self) -> tuple[Any, Any]:
        """The statistic of the shares of a loss function."""
        if self.plan.asked("outputs"):
            raise ArgumentError("it has no axis of outputs; chunk it over samples or params.")
        with self.scope:
            if self.plan.asked("samples"):
                aux = self._found_split(second_order=False)
            else:
                run = self._whole_loss()
                aux = run.aux
                self._consume(run, [self._ones(run)])
            return self._finish(aux)

    def second_order(self) -> tuple[Any, Any]:
        """The statistic of the columns `J^T S` of a model function with its loss, or of a loss function alone."""
        with self.scope:
            aux = self._found_split(second_order=True) if self.problem.loss is None else self._given_split()
            return self._finish(aux)

    def _finish(self, aux: Any) -> tuple[Any, Any]:
        problem, measure = self.problem, self.measure
        found = [
            measure.zero(leaf, problem.n) if state is None else measure.finish(state, problem.n).to(leaf.dtype)
            for leaf, state in zip(problem.leaves, self.states, strict=True)
        ]
        trees = tree.unflatten([self.scope.result(x) for x in found], problem.structure)
        result = tuple(trees) if problem.several else trees[0]
        return result, self.scope.result(aux)

    # Runs

    def _run(
        self,
        part: slice,
        n: int,
        *,
        tapped: bool = True,
        draws: Draws | None = None,
        splitter: Callable[[Trace], Splitter] | None = None,
    ) -> Run:
        trace = Trace(self.scope, n, fast=self.options.fast, tapped=tapped, draws=draws)
        watching = splitter(trace) if splitter is not None else None
        params = trace.parameters(self.problem.leaves)
        run = Run(trace, params, part, {})
        try:
            with active(watching):
                run.result, run.aux = self.problem.call(trace, params, part)
        except Reached:
            assert watching is not None
            run.outputs = {i: (r.value, r.axis) for i, r in watching.roots.items()}
        return run

    def _loss_tag(self, trace: Trace, result: Any, name: str = "f") -> Sampled:
        """Check that a result is a loss: a scalar, or one for each sample."""
        n = trace.n
        if not isinstance(result, torch.Tensor):
            raise ArgumentError(
                f"{name} returned an object of type {type(result).__name__}, but a loss is a tensor: a scalar or [N]."
            )
        tag = trace.tag(result)
        if result.ndim and tuple(result.shape) != (n,):
            kind = "a model function" if isinstance(tag, Sampled) and tag.place is not TOTAL else "no loss function"
            raise ArgumentError(
                f"{name} returned shape {tuple(result.shape)} for N = {n}, so it looks like {kind}; wanted is a loss "
                f"function, which returns a scalar or shape ({n},). Compute the loss in it."
            )
        if not result.is_floating_point():
            raise ArgumentError(f"{name} returned dtype {result.dtype}, but a loss is a floating-point tensor.")
        if isinstance(tag, Sampled) and tag.lost:
            raise samples_lost(tag.lost, trace.unknown)
        if isinstance(tag, Derived):
            return Sampled(None, around="the parameters alone")
        if tag is None or (result.ndim and not isinstance(tag.place, Axis)):
            return Sampled(None) if tag is None else tag
        return tag

    def _whole_loss(self) -> Run:
        problem = self.problem
        try:
            run = self._run(WHOLE, problem.n)
            self._loss_tag(run.trace, run.result)
            if isinstance(run.trace.tag(run.result), Derived) and not run.result.ndim:
                zero = torch.zeros_like(run.result.detach())  # a sum over the samples of nothing
                run.trace.set(zero, Sampled(TOTAL))
                with run.trace:
                    run.result = run.result + zero
            run.trace.check([run.result], run.params)
        except SampleAxisError as error:
            run = self._sample_by_sample() if error.unknown else None
            if run is None:
                raise
            self._loss_tag(run.trace, run.result)
        run.outputs = {0: (run.result, Axis(None))}
        return run

    def _sample_by_sample(self) -> Run | None:
        """The last resort: the whole function as one operation that has no rule, if its values allow that.

        A function that returns [N] entries, or outputs, may be evaluated on single samples; a scalar may not.
        """
        problem, axis = self.problem, Axis(problem_out_dim(self.problem))
        draws = Draws(stop=False)
        trace = Trace(self.scope, problem.n)
        params = trace.parameters(problem.leaves)
        batch = {i: problem.args[i] for i in problem.inputs if i not in problem.argnums}
        flat, structure = tree.flatten(batch)
        where = [d for i, d in problem.dims.items() if i in batch for _ in tree.leaves(batch[i])]

        def function(*values: Any) -> Any:
            trees = tree.unflatten(list(values[: len(params)]), problem.structure)
            rest = tree.unflatten(list(values[len(params) :]), structure)
            given = [trees[problem.argnums.index(i)] if i in problem.argnums else rest[i] for i in problem.inputs]
            result = problem.f(*given, **problem.kwargs)
            return result[0] if problem.has_aux else result

        values = [*params, *(self.scope.alias(x) if isinstance(x, torch.Tensor) else x for x in flat)]
        with Watch(draws):
            result = function(*values)
        if not isinstance(result, torch.Tensor) or result.ndim == 0 or result.shape[axis.dim or 0] != problem.n:
            return None
        if draws.drew:
            raise RandomnessError("it draws random numbers, and cannot be evaluated one sample at a time.")
        places: dict[int, Any] = {
            id(x): Axis(d % x.ndim)
            for x, d in zip(values[len(params) :], where, strict=True)
            if isinstance(x, torch.Tensor) and d is not None
        }
        call = Call("f", function, tuple(values), {}, result, places, problem.n, True)
        site = Site(call, axis, self.scope.leave)
        n, dims = problem.n, [places.get(id(x)) for x in values]
        exposed = [x if a is None else a.expose(x, n) for x, a in zip(values, dims, strict=True)]
        try:
            with torch.no_grad():
                alone = torch.vmap(function, in_dims=tuple(None if a is None else 0 for a in dims))(*exposed)
        except RuntimeError:  # no batching rule
            return None
        if not _same(alone, axis.expose(result, n)):
            return None  # a sample alone gives something else than in the batch: they are mixed
        for i, leaf in enumerate(params):
            trace._tap(leaf, Derived(frozenset({i}), True), generic(site, leaf), result, axis)
        trace.set(result, Sampled(axis, around="f"))
        return Run(trace, params, WHOLE, {0: (result, axis)}, result)

    def _ones(self, run: Run) -> Gradient:
        return Gradient({0: torch.ones_like(self.scope.leave(run.result))[None]})

    # Splits

    def _given_split(self) -> Any:
        """diag_ggn(f, loss): blocks of the model function, then the loss of all outputs."""
        problem, plan = self.problem, self.plan
        if plan.asked("samples"):
            runs = [self._model(slice(a, b), b - a, tapped=False) for a, b in plan.ranges("samples", problem.n)]
            again: Iterator[Run] = (self._model(run.part, run.trace.n) for run in runs)
        else:
            runs = self._model_blocks()
            again = iter(runs)
        loss = Trace(self.scope, problem.n, tapped=False)
        splitter = Splitter(loss)
        joined = self._joined(runs, splitter)
        outputs = tree.unflatten(joined, runs[0].result)
        with loss, active(splitter):
            assert problem.loss is not None
            result = problem.loss(outputs, problem.target(loss))
        self._loss_tag(loss, result, "the loss")
        made = hessians.hessian(self.scope, result, list(splitter.roots.values()), splitter.pieces, problem.n)
        aux = runs[0].aux
        for run in again:
            self._consume(run, made)
        return aux

    def _model(self, part: slice, n: int, tapped: bool = True) -> Run:
        """The model function on a part of the batch; `run.result` becomes the structure of its outputs."""
        partial = n < self.problem.n
        draws = Draws(stop=True) if partial else None
        try:
            run = self._run(part, n, tapped=tapped, draws=draws)
        except Drew:
            raise RandomnessError(
                "f draws random numbers (dropout?), and chunks over samples cannot draw those of the whole batch. Chunk "
                "over outputs or params, or use eval mode."
            ) from None
        except SampleAxisError as error:
            if partial or not tapped or not error.unknown:
                raise
            whole = self._sample_by_sample()
            if whole is None:
                raise
            run = whole
        leaves, structure = tree.flatten(run.result)
        for i, z in enumerate(leaves):
            run.outputs[i] = (z, self._output_axis(run.trace, z))
        run.result = structure
        return run

    def _output_axis(self, trace: Trace, z: Any) -> Axis:
        dim = self.problem.out_dims
        if not isinstance(z, torch.Tensor) or not z.is_floating_point():
            kind = f"a tensor of {z.dtype}" if isinstance(z, torch.Tensor) else f"an object of type {type(z).__name__}"
            raise ArgumentError(f"f returned {kind}, but outputs are floating-point tensors.")
        if z.ndim == 0 or not -z.ndim <= dim < z.ndim or z.shape[dim] != trace.n:
            kind = "looks like a loss function; call the transform on it alone" if z.ndim == 0 else "has other outputs"
            raise ArgumentError(
                f"f returned shape {tuple(z.shape)} for N = {trace.n}, so it {kind}; wanted is a model function, which "
                f"returns outputs with the samples along axis {dim}."
            )
        tag = trace.tag(z)
        if isinstance(tag, Sampled):
            if tag.lost:
                raise samples_lost(tag.lost, trace.unknown)
            if trace.n > 1 and tag.place != Axis(dim % z.ndim):
                raise ArgumentError(
                    f"f returned outputs with their samples along {tag.place}, not axis {dim % z.ndim}; pass out_dims."
                )
        return Axis(None) if trace.n == 1 else Axis(dim % z.ndim)

    def _model_blocks(self) -> list[Run]:
        """The model function in one pass, or in blocks of samples whose cotangents fit the cache."""
        n = self.problem.n
        divided = any(self.plan.asked(over) for over in ("outputs", "params"))
        if self.budget > 2**24 or divided or self.problem.has_aux or n < 3:
            return [self._model(WHOLE, n)]
        try:
            first = min(n, 4)
            run = self._model(slice(0, first), first)
            size = self._block_size(run.trace, sum(z.numel() for z, _ in run.outputs.values()) // first)
            if n <= size:
                return [self._model(WHOLE, n)]
            rest = even(n - first, size)
            return [run, *(self._model(slice(first + a, first + b), b - a) for a, b in rest if a < b)]
        except Exception:  # f may not run on a part (a constant of size N); if the fault is another, it comes again
            return [self._model(WHOLE, n)]

    def _joined(self, runs: list[Run], splitter: Splitter) -> list[torch.Tensor]:
        """The outputs of all blocks, as the loss is to see them."""
        joined = []
        for i in runs[0].outputs:
            blocks = [axis.expose(self.scope.leave(z), run.trace.n) for run in runs for z, axis in (run.outputs[i],)]
            exposed = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
            axis = Axis(None) if self.problem.n == 1 else Axis(self.problem.out_dims % (exposed.ndim - 1))
            z = axis.restore(exposed, self.problem.n)
            splitter.trace.set(z, Sampled(axis))
            joined.append(splitter.add(z, "f", marked=True))
        return joined

    def _found_split(self, second_order: bool) -> Any:
        """A loss function: run it once for its outputs and their cotangents, then the model part again, part by part."""
        problem, plan, draws = self.problem, self.plan, Draws(stop=False)
        seen: list[Splitter] = []

        def look(trace: Trace) -> Splitter:
            seen.append(Splitter(trace))
            return seen[-1]

        light = self._run(WHOLE, problem.n, tapped=False, draws=draws, splitter=look)
        tag, splitter = self._loss_tag(light.trace, light.result), seen[0]
        wanted = splitter.selected()
        if not second_order and light.result.ndim and not wanted:
            self._loss_chunks(light.result, draws)
            return light.aux
        _check_split(tag, splitter, wanted, light.result)
        roots = [splitter.roots[i] for i in wanted]
        made = self._columns(light.result, roots, splitter, second_order)
        parts = plan.ranges("samples", problem.n) if plan.asked("samples") else [(0, problem.n)]
        if draws.drew and len(parts) > 1:
            raise RandomnessError(
                "f draws random numbers (dropout?), and chunks over samples cannot draw those of the whole batch. Chunk "
                "over outputs or params, or use eval mode."
            )
        for run in self._model_parts(parts, made, roots, draws):
            self._consume(run, made)
        return light.aux

    def _model_parts(
        self, parts: list[tuple[int, int]], made: list[Columns], roots: list[Root], draws: Draws
    ) -> Iterable[Run]:
        """The model part up to the roots: chunks one by one, or blocks where nobody asked for passes of their own."""
        n, count = self.problem.n, sum(c.count for c in made)
        if any(self.plan.splits.values()) or draws.drew or count < 4 or n < 3 or self.budget > 2**24:
            return (self._up_to(roots, start, stop, draws) for start, stop in parts)
        try:
            first = self._up_to(roots, 0, min(n, 4), draws)
            rest = even(n - first.trace.n, self._block_size(first.trace, count))
            return [first, *(self._up_to(roots, first.trace.n + a, first.trace.n + b, draws) for a, b in rest if a < b)]
        except Exception:  # f may not run on a part (a constant of size N); if the fault is another, it comes again
            return [self._up_to(roots, 0, n, draws)]

    def _block_size(self, trace: Trace, columns: int) -> int:
        """How many samples to run at once, so that some columns at the largest site fit the budget."""
        return max(4, self.budget // (min(columns, 32) * max(trace.sizes, default=1)))

    def _up_to(self, roots: list[Root], start: int, stop: int, draws: Draws) -> Run:
        """The function on a part of the batch until its outputs are there; they have to be those of the whole batch."""
        part = WHOLE if stop - start == self.problem.n else slice(start, stop)
        after = draws.rewind()
        try:
            run = self._run(part, stop - start, splitter=lambda trace: Splitter(trace, [r.ordinal for r in roots]))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if part == WHOLE or isinstance(error, InvFuncError):
                raise
            raise SampleAxisError(
                "f does not run on a part of the batch, so it cannot be chunked over samples."
            ) from error
        finally:
            restore(after)
        if part == WHOLE:
            return run
        for root in roots:
            z, axis = run.outputs.get(root.ordinal, (None, root.axis))
            whole = root.axis.expose(root.value, self.problem.n)[part]
            if z is None or z.numel() != whole.numel() or not _same(axis.expose(z, run.trace.n), whole):
                raise SampleAxisError(
                    "the outputs of f on a part of the batch are not those of the whole batch (has it a constant for each "
                    "sample, or does it use the length of the batch?), so it cannot be chunked over samples."
                )
        return run

    def _columns(self, result: torch.Tensor, roots: list[Root], splitter: Splitter, second: bool) -> list[Columns]:
        n = self.problem.n
        if second:
            return hessians.hessian(self.scope, result, roots, splitter.pieces, n)
        return [hessians.gradient(self.scope, result, roots, n)]

    def _loss_chunks(self, whole: torch.Tensor, draws: Draws) -> None:
        """A loss for each sample: the function itself on parts of the batch."""
        if draws.drew:
            raise RandomnessError(
                "f draws random numbers (dropout?), and chunks over samples cannot draw those of the whole batch. Chunk "
                "over params, or use eval mode."
            )
        for start, stop in self.plan.ranges("samples", self.problem.n):
            run = self._run(slice(start, stop), stop - start)
            self._loss_tag(run.trace, run.result)
            if not _same(run.result, whole[start:stop]):
                raise SampleAxisError(
                    "the losses of f on a part of the batch are not those of the whole batch (does it divide by its "
                    "length?), so it cannot be chunked over samples; mark its outputs with `outputs(z)`."
                )
            run.outputs = {0: (run.result, Axis(None))}
            run.part = WHOLE
            self._consume(run, [self._ones(run)])

    # Pullbacks and folds

    def _consume(self, run: Run, made: list[Columns]) -> None:
        """Pull the columns of the run's samples back to its taps, and fold what the statistic keeps of them."""
        _check_versions(run.trace.taps)
        run.trace.check([z for z, _ in run.outputs.values()], run.params)
        groups = self.plan.ranges("params", len(run.params))
        total = sum(c.count for c in made)
        if total == 0:  # a cross entropy over one class
            return
        block: list[State | None] = [None] * len(run.params)
        for first, last in groups:
            taps = {i: [t for t in run.trace.taps if i in t.derived.leaves] for i in range(first, last)}
            sites = sorted({t.site for found in taps.values() for t in found})
            if not sites:
                continue
            for start, stop in self._column_ranges(run, total, sites):
                pulled = self._pull(run, _block(made, start, stop, run.part, run.trace.n), sites)
                for i, found in taps.items():
                    state = self._partial(run, i, found, pulled)
                    if state is not None:
                        before = block[i]
                        block[i] = state if before is None else self.measure.over_columns(before, state)
                del pulled  # before the next pass makes its own
        for i, state in enumerate(block):
            if state is not None:
                before = self.states[i]
                self.states[i] = state if before is None else self.measure.over_samples(before, state)

    def _column_ranges(self, run: Run, total: int, sites: list[int]) -> list[tuple[int, int]]:
        if self.plan.asked("outputs"):
            return self.plan.ranges("outputs", total)
        largest = max(run.trace.sizes[s] for s in sites) * run.trace.n
        return even(total, max(1, self.budget // largest))

    def _pull(self, run: Run, block: Block, sites: list[int]) -> Pulled:
        left = self._deltas(run, block.left, sites)
        right = None if block.right is None else self._deltas(run, block.right, sites)
        return Pulled(left, right, block.weight)

    def _deltas(self, run: Run, cotangents: dict[int, torch.Tensor], sites: list[int]) -> Deltas:
        trace, scope = run.trace, self.scope
        outputs, given = [], []
        for i, c in cotangents.items():
            z, axis = run.outputs[i]
            outputs.append(z)
            given.append(axis.restore(c, trace.n if not axis.whole else 1, 1).to(z.dtype))
        batched = given[0].shape[0] > 1
        given = given if batched else [c[0] for c in given]
        found = scope.grad(outputs, [trace.edges[s] for s in sites], given, batched=batched)
        deltas: Deltas = [None] * len(trace.edges)
        for s, d in zip(sites, found, strict=True):
            if d is not None:
                d = scope.leave(d)
                deltas[s] = trace.axes[s].expose(d if batched else d[None], trace.n, 1)
        return deltas

    def _partial(self, run: Run, leaf: int, taps: list[Tap], pulled: Pulled) -> State | None:
        reached = [t for t in taps if pulled.left[t.site] is not None]
        if not reached:
            return None
        shares = Shares(self.scope, run.params[leaf], reached, pulled, run.trace.n, self.budget)
        return self.measure.partial(shares)


def problem_out_dim(problem: Problem) -> int:
    return problem.out_dims if problem.loss is not None else 0


def _block(made: list[Columns], start: int, stop: int, part: slice, n: int) -> Block:
    """The columns of a range over all kinds together; a kind that has no part in a column has zeros there."""
    found: list[Block] = []
    offset = 0
    for kind in made:
        a, b = max(start - offset, 0), min(stop - offset, kind.count)
        if a < b:
            found.append(kind.block(a, b, part))
        offset += kind.count
    if len(found) == 1:
        return found[0]
    left = _joined([b.left for b in found])
    right = _joined([b.right or b.left for b in found]) if any(b.right for b in found) else None
    weights = None
    if any(b.weight is not None for b in found):
        weights = torch.cat([_weight(b, n) for b in found])
    return Block(left, right, weights)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether values agree up to what another batch size does to their rounding."""
    return bool(innermost(torch.isclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)).all())


def _weight(block: Block, n: int) -> torch.Tensor:
    if block.weight is not None:
        return block.weight
    column = next(iter(block.left.values()))
    return column.new_ones(column.shape[0], n)


def _joined(cotangents: list[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    counts = [next(iter(c.values())).shape[0] for c in cotangents]
    joined = {}
    for i in dict.fromkeys(i for c in cotangents for i in c):
        like = next(c[i] for c in cotangents if i in c)
        parts = [
            c[i] if i in c else like.new_zeros(v, *like.shape[1:]) for c, v in zip(cotangents, counts, strict=True)
        ]
        joined[i] = torch.cat(parts)
    return joined


def _check_split(tag: Sampled, splitter: Splitter, wanted: list[int], result: torch.Tensor) -> None:
    """Every path from the parameters to the result has to cross the outputs."""
    ways_out = (
        "Mark the outputs with `outputs(z)`, use one of torch's convex losses, or give the model and the loss apart."
    )
    if not wanted:
        raise SplitError(
            f"no outputs are found in f: no known convex loss of the model's outputs is called. {ways_out}"
        )
    if tag.around is not None:
        raise SplitError(
            f"a path from the parameters to the result goes around the outputs (it comes in at `{tag.around}`), as an L2 "
            f"term or a loss that is not known does. Take it out of f, or: {ways_out[0].lower()}{ways_out[1:]}"
        )
    astray = [splitter.roots[i].called for i in tag.crossed if i not in wanted]
    if astray:
        raise SplitError(
            f"a path from the parameters to the result goes around the marked outputs, through `{astray[0]}`. {ways_out}"
        )


def _check_versions(taps: list[Tap]) -> None:
    for tap in taps:
        for x, before in tap.versions:
            if version(x) != before:
                raise ArgumentError(
                    "a tensor that an operation with parameters read was modified in place afterwards, so its share "
                    "cannot be computed; modify a copy."
                )
