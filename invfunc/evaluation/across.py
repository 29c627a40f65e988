"""The statistic of all processes, of what the samples of each have brought."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import no_samples
from invfunc.evaluation.brought import keeping
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.processes import Processes, on_cpu
from invfunc.evaluation.rounds import as_wide
from invfunc.evaluation.sweep import Sweep, other_outputs
from invfunc.evaluation.weights import Weights
from invfunc.reductions import Found, Reduction, States
from invfunc.reductions.exchange import Exchange
from invfunc.reductions.quantity import Accumulator


@dataclass(frozen=True)
class Brought:
    """What a process says of its sweep: all but the numbers."""

    n: int
    mean: bool | None
    """Whether its loss is a mean; None if that was not looked at."""
    outputs: list[torch.Size]
    structure: Any
    by_column: tuple[Any, ...]
    columns: list[int]
    states: list[States]
    """What each accumulator keeps, on the meta device."""

    @classmethod
    def of(cls, sweep: Sweep) -> Brought:
        if sweep.engine is None:
            return cls(0, None, [], None, (), [], [])
        kept = list(_kept(sweep))
        states = [tree.map_tensors(_without_numbers, t.states) for t in kept]
        columns = [t.columns for t in kept]
        return cls(sweep.n, sweep.weights.seen, *sweep.outputs, sweep.by_column, columns, states)


def share(
    sweep: Sweep, run: Callable[[], Any], processes: Processes, gather: bool, blank: Callable[[], Engine]
) -> None:
    """Have a sweep keep what those of all processes do, once `run` has seen the batches of this one.

    `gather` says that results with a sample axis are those of all samples, too; `blank` makes an evaluation of no
    samples, for a process that has none.
    """
    _, each = processes.told("samples", lambda: (run(), Brought.of(sweep)))
    like, own = _alike(each), sweep.n
    one_scale(sweep.weights, processes, [one.mean for one in each])
    if sweep.engine is None:
        sweep.enter(blank())
    assert sweep.engine is not None
    sweep.has(sum(one.n for one in each), like.outputs, like.structure)
    exchanges = _exchanges(sweep, own, each, gather)
    kept = list(_kept(sweep))
    for (k, i), state in zip(exchanges, processes.exchanged(list(exchanges.values())), strict=True):
        kept[k].states[i] = state


def bytes_given(sweep: Sweep, gather: bool) -> int:
    """How many bytes a process gives to others that keep as much as it does, if none of them needs to be asked."""
    total = 0
    for exchange in _exchanges(sweep, sweep.n, [Brought.of(sweep)], gather).values():
        with suppress(StopIteration):
            answer: Any = None
            while True:
                answer = exchange.send(answer).tensors
                total += sum(x.nbytes for x in answer)
    return total


def _exchanges(sweep: Sweep, own: int, each: list[Brought], gather: bool) -> dict[tuple[int, int], Exchange]:
    """Those of what is kept of so many own samples, by its place and that of the parameter."""
    assert sweep.engine is not None
    exchanges: dict[tuple[int, int], Exchange] = {}
    kept, leaves = list(_kept(sweep)), sweep.engine.fold.problem.leaves
    for k, (t, t.columns) in enumerate(zip(kept, _alike(each).columns, strict=True)):
        if t.reduction.each and not gather:  # those of this process, of all parameters
            places = enumerate(t.of(leaves))
            t.states = {i: t.states.get(i) or t.reduction.init(leaf, own, t.columns) for i, leaf in places}
            continue
        for i in sorted({i for one in each if one.n for i in one.states[k]}):
            exchanges[k, i] = _exchange(t, i, leaves[i], own, [(one.n, one.states[k]) for one in each if one.n])
    return exchanges


def _alike(each: list[Brought]) -> Brought:
    """What the first process that has samples says; where columns are kept, those of all are of the same outputs."""
    first = next((rank for rank, one in enumerate(each) if one.n), None)
    if first is None:
        raise no_samples()
    known = each[first].by_column
    for rank, one in enumerate(each):
        if one.n and one.by_column != known:
            raise other_outputs(known, f"process {first}", one.by_column, f"process {rank}")
    return each[first]


def _exchange(t: Accumulator, place: int, leaf: torch.Tensor, own: int, each: list[tuple[int, States]]) -> Exchange:
    """That of what is kept of a parameter, which the samples of some processes may not reach."""
    init = t.reduction.init
    blanks = [states.get(place) or tree.map_tensors(_without_numbers, init(leaf, n, t.columns)) for n, states in each]
    return t.reduction.across(place, as_wide(t.states.get(place) or init(leaf, own, t.columns), blanks), blanks)


def dealt(processes: Processes, reduction: Reduction, states: States, found: Found) -> Any:
    """What is learned of a phase; where each parameter stands by itself, they are dealt out to the processes."""
    if processes.size == 1 or type(reduction).learned is not Reduction.learned:
        return reduction.learned(states, found)
    places = sorted(states, key=partial(_size, states), reverse=True)[processes.rank :: processes.size]

    def learned() -> tuple[None, Any]:
        own = reduction.learned_apart({i: states[i] for i in places}, found)
        return None, (on_cpu(own), found.refused)

    _, each = processes.told("parameters", learned)
    together: dict[int, Any] = {}
    for part, refused in each:
        together |= {i: _moved(one, states[i]) for i, one in part.items()}
        found.refused.update(refused)
    return together


def _kept(sweep: Sweep) -> Iterator[Accumulator]:
    """What keeps something of all samples."""
    assert sweep.engine is not None
    yield from keeping(sweep.engine.fold, sweep.phase)


def one_scale(known: Weights, processes: Processes, each: Sequence[bool | None]) -> None:
    """Check that the losses of all processes are sums, or all means, beside a batch of the first one that has any.

    `each` says of every process whether its loss is a mean; None if it has not seen that.
    """
    first, own = next((rank for rank, mean in enumerate(each) if mean is not None), None), known.first
    if first is None or processes.size == 1:
        return
    for rank, mean in enumerate(each):
        if mean not in (None, each[first]):
            kinds = ("a mean", "a sum") if each[first] else ("a sum", "a mean")
            raise ArgumentError(f"the loss is {kinds[0]} in process {first}, and {kinds[1]} in process {rank}.")
    travels = None
    if processes.rank == first and own is not None:
        travels = on_cpu((own.outputs, own.target)), own.n
    trees, n = processes.from_first(first, travels)

    def looked() -> tuple[None, None]:
        if own is not None:
            outputs, target = _moved(trees, own.outputs)
            weights = Weights()
            weights.of(replace(own, outputs=outputs, target=own.target if own.dim is None else target, n=n))
            weights.of(own)
        return None, None

    processes.told("scale", looked)
    known.mean = bool(each[first])


def _without_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="meta")


def _size(states: States, place: int) -> int:
    return sum(x.numel() for x in tree.tensors((states[place],)))


def _moved(x: Any, like: Any) -> Any:
    """A tree whose tensors are where those of another one are."""
    device = next((y.device for y in tree.tensors((like,))), torch.device("cpu"))
    return tree.map_tensors(lambda y: y.to(device), x)
