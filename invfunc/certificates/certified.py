"""A result that is checked in the same call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc._functorch import innermost, levels, plainly
from invfunc.callables import describe
from invfunc.certificates.draws import States, Tape, needed, rewound, states
from invfunc.certificates.look import Look, Member
from invfunc.certificates.looks import looks, unknown
from invfunc.certificates.reference import Reference
from invfunc.certificates.rounding import AGAIN, APART, beyond, moved, scales, spread, units
from invfunc.errors import ArgumentError, ArgumentTypeError, CertificateError
from invfunc.recording.problem import Problem, problem
from invfunc.reductions.squares import MatrixTrace, SumOfSquares
from invfunc.sparsity.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import Transform


def certified(
    t: Statistic, *, generator: torch.Generator | int, confidence: float = 0.99, share: float = 0.05
) -> Certified:
    """Check a result in the same call, at drawn entries, by another code path.

        result = t(params, *batch)
        for e in drawn_entries:                                       # k of them evenly, k by their size
            J = jvp(lambda p: f(p, *inputs), (params,), (unit(e),))[1]       # of `diag_ggn`, say
            assert close(result[e], J^T H J)
        return result

    The other path has no rules of operations and no shortcuts by structure: derivatives of the whole function along
    single entries, backward passes of single samples, the loss's own Hessian. Whole results are compared where that
    costs no more: `batch_grad` and `grad_and_variance` with the gradient, `ggn_trace` with the sum of the diagonal, the
    matrix of `gram` with its transpose.

    What it promises: a fault in a `share` of the entries that is larger than the tolerance is found with at least this
    `confidence`, in each call, by `k = log(1 - confidence) / log(1 - share)` entries that are drawn evenly (90). An
    entry is that of a parameter, with what each sample has there; of `batch_l2_grad`, the norms of `clipped_grad` and
    `gram` it is a sample, and of the kernel of a model an output of a sample.

    What it does not: that f is the function that was meant, that what both ways share is right (f itself, where its
    outputs are found, which columns `mc_samples` draws), or anything about faults below the tolerance. Beside the
    largest number of a leaf that is, with N samples, `sqrt(N)` times 6e-14 in float64, 3e-5 in float32, 0.06 in float16
    and 0.18 in bfloat16. It is larger where f itself has larger rounding errors, which is measured before an error is
    raised: 8 times as much as either way differs from itself, at arguments that are moved in their last place and in
    float64. In float16, numbers below 6e-5 are lost in rounding.

    Args:
        t: a statistic of this library, also `chunked` or of several `together`; not K-factors, and not `reduced`.
        generator: draws which entries. An int is the seed of all calls, as an error tells it.
        confidence, share: as above, both between 0 and 1.

    Returns:
        A function with the signature of t, which returns its result as it is.

    Raises:
        CertificateError: numbers are further apart than rounding explains. It has the `path` of the entry, the two
            numbers `found` and `expected`, and the `seed`.
        SplitError: f is a scalar loss whose outputs are not known, and neither the sum nor the mean of its values for
            single samples; RandomnessError: it would be, but draws random numbers.
        ArgumentError: K-factors, `reduced`, a share or a confidence that is none; within `torch.func.vmap`.

    Example:
        >>> import torch, invfunc
        >>> f = lambda w, x, y: (x @ w - y).square()
        >>> safe = invfunc.certified(invfunc.variance(f), generator=torch.Generator().manual_seed(0))
        >>> safe(torch.tensor([1.0]), torch.tensor([[1.0], [2.0]]), torch.zeros(2))
        tensor([9.])

    Composes with: `chunked`, `together` inside; `explain` around it, which tells the cost; `torch.func.grad`, `jvp`
    around it, which differentiate t. What is certified is the result, not its derivative.

    Cost: f once more, and a product `J e` for each of up to 2 k entries, batched: two passes back; for `gram` and norms
    that of a sample, for Hessians a second derivative. It does not depend on what t costs. A smaller
    confidence (or a larger share) makes it cheaper: `confidence=0.5, share=0.1` takes 7 entries in place of 90. Before
    an error, all of it seven times more.

    Source: this library.
    """
    if not isinstance(t, Statistic):
        raise ArgumentTypeError(
            f"certified({describe(t)}): it is of type {type(t).__name__}, but has to be a statistic, as in "
            "certified(diag_ggn(f, loss), generator=g)."
        )
    for name, value in (("confidence", confidence), ("share", share)):
        if not 0 < value < 1:
            raise ArgumentError(f"certified({t!r}, {name}={value!r}): {name} has to be between 0 and 1.")
    if not isinstance(generator, (torch.Generator, int)) or isinstance(generator, bool):
        raise ArgumentTypeError(
            f"certified({t!r}, generator=...): generator is of type {type(generator).__name__}, but entries are drawn "
            "from a torch.Generator: pass generator=torch.Generator().manual_seed(0), or a seed."
        )
    if t.options.reduce is not None:
        raise ArgumentError(
            f"certified({t!r}): what a function makes of the quantities cannot be compared with anything. Certify the "
            "statistic without `reduced`, and apply the function to its result."
        )
    for member in t.members or (t,):
        if why := unknown(member):
            raise ArgumentError(f"certified({t!r}): {why}")
    return Certified(t, generator, confidence, share)


@dataclass(frozen=True, repr=False)
class Certified(Transform):
    """A statistic whose result is checked."""

    t: Statistic
    generator: torch.Generator | int
    confidence: float
    share: float
    owned = False  # it gives what t gives
    outermost = True

    def __repr__(self) -> str:
        return f"certified({self.t!r})"

    def names(self, count: int) -> Any:
        return self.t.names(count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        if any(kind == "vmap" for kind, _ in levels()):
            raise ArgumentError(
                "within torch.func.vmap there are several results at once, whose numbers cannot be looked at. Put it "
                "around the function that is mapped, entry by entry, or certify a loop over them."
            )
        t = self.t
        generators = {m.drawing.generator for m in t.members or (t,) if m.drawing is not None}
        before, result = states(*generators), t(*args, **kwargs)
        seed, after = self._seed(), states(*generators)
        try:
            with torch.no_grad(), plainly():
                args, kwargs = tree.map_tensors(innermost, (args, kwargs))
                Check(t, self.k, seed, before, args, kwargs, names).run(tree.map_tensors(innermost, result))
        finally:
            rewound(after)
        return result, None

    @property
    def k(self) -> int:
        """How many entries are drawn evenly, and as many by size."""
        return needed(self.confidence, self.share)

    def _seed(self) -> int:
        if isinstance(self.generator, int):
            return self.generator
        g = self.generator
        return int(torch.randint(2**53, (1,), generator=g, device=g.device))

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How t is computed, and what is checked."""
        found = self.t.explanation(args, kwargs, names)
        given = _problem(self.t, args, kwargs, names)
        entries = sum(p.numel() for p in given.leaves)
        count = f"all {entries}" if entries <= self.k else f"{self.k} evenly and {self.k} by size of {entries}"
        told = f"certified: {count} entries, each with a derivative of f along it"
        return replace(found, name=repr(self), checked=told)


def _problem(t: Statistic, args: tuple, kwargs: dict[str, Any], names: Sequence[str]) -> Problem:
    return problem(t.f, t.loss, args, kwargs, t.argnums, t.in_dims, t.out_dims, t.has_aux, names, t.samples)


Change = Callable[[torch.Tensor], torch.Tensor]


class Check:
    """The check of one result."""

    def __init__(
        self, t: Statistic, k: int, seed: int, before: States, args: tuple, kwargs: dict[str, Any], names: Any
    ) -> None:
        self.t, self.k, self.seed, self.before = t, k, seed, before
        self.args, self.kwargs, self.names = args, kwargs, names
        self.members, self.tape = t.members or (t,), Tape(torch.Generator().manual_seed(seed))

    def run(self, result: Any) -> None:
        """Raises where numbers are apart."""
        every = self._looks(self.args, self.kwargs, result)
        expected = self._expected(every, self.args, self.kwargs)
        again: list[tuple[list[list[Look]] | None, list[list[torch.Tensor]]]] = []
        for i, (looked, numbers) in enumerate(zip(every, expected, strict=True)):
            known = scales(numbers, [look.size() for look in looked])
            errors = [units(look.dtype, look.terms) for look in looked]
            if _apart(looked, numbers, [e * size for e, size in zip(errors, known, strict=True)]):
                again = again or list(self._again(every))
                found = [[look.found for look in others[i]] for others, _ in again if others is not None]
                measured = max(
                    spread(numbers, [others[i] for _, others in again], known),
                    spread([look.found for look in looked], found, known),
                )
                tolerances = [max(e, APART * measured) * size for e, size in zip(errors, known, strict=True)]
                if wrong := _apart(looked, numbers, tolerances):
                    raise self._error(i, *wrong)

    def _looks(self, args: tuple, kwargs: dict[str, Any], result: Any) -> list[list[Look]]:
        """What is looked at of each member's result."""
        given, tape = _problem(self.t, args, kwargs, self.names), self.tape.again()
        results = self._results(args, kwargs, result)
        return [list(looks(Member(m, given, x, self.k, tape))) for m, x in zip(self.members, results, strict=True)]

    def _results(self, args: tuple, kwargs: dict[str, Any], result: Any) -> list[Any]:
        """The result of each member; a trace comes with the diagonal that it is the sum of."""
        results = _each(self.t, result)
        traces = [isinstance(m.reduction, MatrixTrace) for m in self.members]
        if any(traces):
            diagonals = _each(*self._diagonals(args, kwargs))
            results = [(x, d) if trace else x for x, d, trace in zip(results, diagonals, traces, strict=True)]
        return results

    def _diagonals(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Statistic, Any]:
        """The statistic with diagonals in place of their traces, of the same draws, and its result."""
        each = [
            replace(m, reduction=SumOfSquares()) if isinstance(m.reduction, MatrixTrace) else m for m in self.members
        ]
        t = replace(self.t, members=tuple(each)) if self.t.members else each[0]
        rewound(self.before)
        return t, t(*args, **kwargs)

    def _expected(self, every: list[list[Look]], args: tuple, kwargs: dict[str, Any]) -> list[list[torch.Tensor]]:
        """The numbers of the other path."""
        given = _problem(self.t, args, kwargs, self.names)
        with Reference(given, self.names, [m.quantity for m in self.members], self.before) as r:
            return [[look.expected(r) for look in looked] for looked in every]

    def _again(self, every: list[list[Look]]) -> Any:
        """Both, at arguments that are moved in their last place; and the other path in float64, where f is of no dtype
        of its own."""
        for _ in range(AGAIN):
            args, kwargs = self._changed(lambda x: moved(x, self.tape.generator))
            rewound(self.before)
            there = self._looks(args, kwargs, self.t(*args, **kwargs))
            yield there, self._expected(there, args, kwargs)
        try:
            yield None, self._expected(every, *self._changed(torch.Tensor.double))
        except Exception:
            return

    def _changed(self, of: Change) -> tuple[tuple, dict[str, Any]]:
        """The arguments with other floats."""
        return tree.map_tensors(lambda x: of(x) if x.is_floating_point() else x, (self.args, self.kwargs))

    def _error(
        self, member: int, look: Look, expected: torch.Tensor, apart: torch.Tensor, tolerance: float
    ) -> CertificateError:
        worst = int(((look.found - expected).abs().nan_to_num(float("inf")) * apart).argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(worst), apart.shape)]
        path = look.called(index[0])
        within = f" (its number {index[1:]})" if index[1:] else ""
        found, wanted = float(look.found.flatten()[worst]), float(expected.flatten()[worst])
        of = f" of {self.members[member].name}" if len(self.members) > 1 else ""
        error = CertificateError(
            f"{path}{within}{of} is {found:.9g}, but by derivatives along single entries it is {wanted:.9g}; rounding "
            f"explains {tolerance:.1g}. The entries were drawn by generator={self.seed}. It is a rule of your own "
            "(`operation`), an f that gives something else when it is called again, or a fault of this library, which "
            "we would like to know of."
        )
        error.path, error.found, error.expected, error.seed = path, found, wanted, self.seed
        return error


def _each(t: Statistic, result: Any) -> list[Any]:
    """The results without aux, one for each member."""
    if t.has_aux:
        result = result[:-1] if t.several else result[0]
    return list(result) if t.members else [result]


def _apart(
    looked: list[Look], numbers: list[torch.Tensor], tolerances: list[float]
) -> tuple[Look, torch.Tensor, torch.Tensor, float] | None:
    """The first look with numbers that are further apart, with the other numbers, and which."""
    for look, x, tolerance in zip(looked, numbers, tolerances, strict=True):
        apart = beyond(look.found, x, tolerance, look.dtype)
        if bool(apart.any()):
            return look, x, apart, tolerance
    return None
