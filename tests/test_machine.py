"""Random compositions of transforms, compared with the plain loop after each step.

What is put around a composition is that of the public laws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule
from torch.func import jvp
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import invfunc
from invfunc import certified, chunked, explain, reduced, together, tree
from invfunc.errors import InvFuncError
from invfunc.kronecker import Kronecker
from invfunc.testing import assert_trees_close, dense_batch_diag_hessian, dense_diag_ggn
from invfunc.testing.laws.compare import at_points, directions, loop_at_points, loop_slopes, slopes, total, zipped
from tests.matrices import plain_ggnvp, plain_hvp
from tests.networks import LOSSES, NETWORKS, Loss, network
from tests.rows import BOTH, HESSIANS, LEAVES, LOSS, MODEL, ROWS
from tests.strategies import Numbers


@dataclass(frozen=True, repr=False)
class Built:
    """`make()` is a function of `(params, x, y)[:arguments]`, and `oracle()` another one that should give the same.

    Both are made anew for each call, so that what is drawn starts from the same seed.
    """

    text: str
    make: Callable[[], Callable]
    oracle: Callable[[], Callable]
    arguments: int = 3
    least: int = 1
    """The fewest samples that it takes."""
    axes: tuple[str, ...] = ()
    """Axes of its chunks; none unless it is a statistic."""
    drawn: bool = False
    by_parameter: bool = False
    """True if the result is a tree like the parameters."""
    within_func: bool = True
    """True if torch.func may be around it; torch refuses its checkpoint, `torch.autograd` and broken graphs there."""
    smooth: bool = True
    """True if it has derivatives."""
    batched: bool = False
    """True if there is a vmap in it; under several, torch's own losses fail."""
    depth: int = 0
    """Derivatives and vmaps in it."""

    def __repr__(self) -> str:
        return self.text

    def around(self, text: str, transform: Callable) -> Built:
        """Wraps it by a transform that should not change the result."""
        return replace(self, text=text, make=lambda: transform(self.make()))

    def mapped(self, text: str, transform: Callable, loop: Callable, **changed: Any) -> Built:
        """Wraps it by a transform that changes the result as a loop changes the oracle's."""
        made = {"make": lambda: transform(self.make()), "oracle": lambda: loop(self.oracle())}
        return replace(self, text=text, **made, **changed)


def shown(result: Any) -> Any:
    """A result with the matrices that K-factors stand for: their eigenvectors have signs of their own."""
    return tree_map(
        lambda x: x.dense() if isinstance(x, Kronecker) else x, result, is_leaf=lambda x: isinstance(x, Kronecker)
    )


def compiled(t: Callable) -> Callable:
    """Seen through by dynamo; the backend would only compile what is not ours."""
    torch._dynamo.reset()
    return torch.compile(lambda *args: t(*args), backend="eager")


def slope_along(t: Callable) -> Callable:
    """The derivative of its total along a fixed tangent of the first argument, in forward mode."""

    def call(first: Any, *rest: Any) -> torch.Tensor:
        leaves, form = tree.separate(first)
        of = lambda own: total(t(form.join(own), *rest))  # noqa: E731
        return jvp(of, (leaves,), (tree.tensors(directions(first, 0.4)),))[1]

    return call


def loop_slope_along(t: Callable) -> Callable:
    """The same as the product of the gradient with the tangent, by torch.autograd."""

    def call(first: Any, *rest: Any) -> torch.Tensor:
        pairs = zip(tree.tensors(loop_slopes(t)(first, *rest)), tree.tensors(directions(first, 0.4)), strict=True)
        return torch.stack([(g * v).sum() for g, v in pairs]).sum()

    return call


def in_data(way: Callable) -> Callable:
    """The same of the argument behind the parameters."""
    return lambda t: lambda p, x, *y: way(lambda x, p, *y: t(p, x, *y))(x, p, *y)


EXACT, FLOOR = 1e-8, 1e-2
REFUSED = (
    "a nonlinear operation in a checkpoint",  # of kfra, and of columns that are read where f is followed
    "a checkpoint, whose second run is not followed, where the result is differentiated",
)
"""Messages about checkpointed functions that are not followed."""
DEEPEST = 2
"""Derivatives and vmaps of a composition."""


def _checkpointed(f: Callable) -> Callable:
    return lambda p, x: checkpoint(f, p, x, use_reentrant=False)


def _recomputed(f: Callable) -> Callable:
    block = invfunc.invertible_checkpoint(lambda x, p: f(p, x), None)
    return lambda p, x: block(x, p)


AS_IT_IS, CHECKPOINTED = "f", "checkpointed f"
WAYS: dict[str, Callable] = {AS_IT_IS: lambda f: f, CHECKPOINTED: _checkpointed, "f as a block": _recomputed}
"""Functions that give what f gives."""


def _written_out(p: Any, x: Any) -> torch.Tensor:
    """The network "generic" without torch's layer norm, whose third derivative is wrong."""
    x = F.embedding(x["tokens"], p["table"]).mean(1) + x["more"][0] / (1 + p["scale"].square())
    spread = x.var(1, correction=0, keepdim=True)
    return (x - x.mean(1, keepdim=True)) / (spread + 1e-5).sqrt() * p["norm"]


ways, rows = st.sampled_from(list(WAYS)), st.sampled_from(list(ROWS))
AXES = ("outputs", "samples", "params")
PRODUCTS = {"hvp": invfunc.hvp, "ggnvp": invfunc.ggnvp}
LOOPS = {"hvp": plain_hvp, "ggnvp": plain_ggnvp}
TOGETHER = [name for name, row in ROWS.items() if MODEL not in row.forms]


def loop_of_diagonals(name: str) -> Callable | None:
    """The oracle of a statistic that is made of exact diagonals of each sample; None for others."""
    row, hessian = ROWS[name], name in HESSIANS
    if row.drawn or not (row.of_each or hessian):
        return None

    def loop(f: Callable, loss: Callable, samples: list[int] | None) -> Callable:
        def oracle(p: Any, x: Any, y: torch.Tensor) -> Any:
            chosen = list(range(len(y))) if samples is None else samples
            if hessian:
                each = tree.map_tensors(lambda d: d[chosen], dense_batch_diag_hessian(f, loss)(p, x, y))
            else:
                each = zipped(torch.stack, [dense_diag_ggn(f, loss, samples=[n])(p, x, y) for n in chosen])
            if row.of_each:
                return row.of_each(each)
            return each if "of each" in name else tree.map_tensors(lambda d: d.sum(0), each)

        return oracle

    return loop


class Compositions(RuleBasedStateMachine):
    """Each step makes a composition, or calls one with other numbers, and compares it with its loop."""

    compositions = Bundle("compositions")

    @initialize(name=st.sampled_from(list(NETWORKS)), n=st.integers(1, 4), loss=st.sampled_from(LOSSES))
    def begin(self, name: str, n: int, loss: Loss) -> None:
        self.name, self.loss, self.compiled = name, loss, False
        self._take(n, 0)
        self.models = {way: make(self.net.f) for way, make in WAYS.items()}
        self.f = _written_out if name == "generic" else self.net.f
        self.of_outputs = {how: lambda z, y, how=how: loss(z, y, how) for how in ("sum", "mean")}
        self.losses = {
            (way, how): lambda p, x, y, f=f, how=how: self._loss(f, how)(p, x, y)
            for way, f in self.models.items()
            for how in ("none", "mean")
        }

    def loss_of(self, how: str) -> Callable:
        return lambda z, y, _: self.loss(z, y, how)

    def _take(self, n: int, seed: int) -> None:
        self.net = network(self.name, n, seed)
        self.args = (self.net.params, self.net.x, self.loss.target(Numbers(seed + 1), n))
        self.random = torch.get_rng_state()

    def _loss(self, f: Callable, how: str) -> Callable:
        """The losses of the samples, or their mean."""

        def losses(p: Any, x: Any, y: torch.Tensor) -> torch.Tensor:
            found = self.loss(f(p, x), y, how)
            return found if found.ndim < 2 else found.sum(1)

        return losses

    def _parts(self, p: Any, x: Any, y: torch.Tensor) -> torch.Tensor:
        """Terms that the samples add to the mean."""
        found = self.loss(self.f(p, x), y, "none")
        return found.reshape(len(found), -1).sum(1) / found.numel()

    def _agree(self, built: Built) -> Built:
        """The law: a composition gives what its loop gives, and leaves its arguments and the generator as they were."""
        given = self._given(built)
        before = [x.clone() for x in tree.tensors(given)]
        try:
            found = shown(built.make()(*given))
        except InvFuncError as error:
            assert CHECKPOINTED in str(built) and any(why in str(error) for why in REFUSED), f"{built}: {error}"
            assume(False)
            raise
        assert all(torch.equal(x, y) for x, y in zip(tree.tensors(given), before, strict=True)), f"{built}: arguments"
        assert torch.equal(self.random, torch.get_rng_state()), f"{built}: the global generator"
        assert_trees_close(found, shown(built.oracle()(*given)), EXACT, FLOOR)
        return built

    def _given(self, built: Built) -> tuple:
        """The arguments that there are now, if it takes them."""
        assume(built.least <= self.net.n)
        return self.args[: built.arguments]

    # What a composition begins with

    @rule(target=compositions, name=rows, way=ways, form=st.integers(0, 1), mean=st.booleans(), some=st.booleans())
    def statistic(self, name: str, way: str, form: int, mean: bool, some: bool) -> Built:
        row, how = ROWS[name], "mean" if mean else "sum"
        of, samples = row.forms[form % len(row.forms)], [self.net.n - 1, 0, 0] if some else None
        functions, options = self._functions(of, way, how), {"samples": samples} if some else {}
        return self._begun(
            Built(
                f"{name}, {of}, {how} of {way}" + f", samples={samples}" * some,
                lambda: row.make(*functions, **options),
                self._oracle(name, of, how, samples),
                arguments=2 if of == MODEL else 3,
                least=self.net.n if some else row.fewest,
                axes=row.axes,
                drawn=row.drawn,
                by_parameter=row.gives == LEAVES,
                smooth=self._smooth([name], way),
                within_func=way != CHECKPOINTED,
            )
        )

    @rule(
        target=compositions,
        names=st.lists(st.sampled_from(TOGETHER), min_size=2, max_size=3),
        way=ways,
        form=st.integers(0, 1),
        mean=st.booleans(),
    )
    def several(self, names: list[str], way: str, form: int, mean: bool) -> Built:
        members, how = [ROWS[name] for name in names], "mean" if mean else "sum"
        of = BOTH if form and all(BOTH in row.forms for row in members) else LOSS
        functions, oracles = self._functions(of, way, how), [self._oracle(name, of, how, None) for name in names]
        return self._begun(
            Built(
                f"together({', '.join(names)}), {of}, {how} of {way}",
                lambda: together(*(row.make(*functions) for row in members)),
                lambda: lambda *args: tuple(oracle()(*args) for oracle in oracles),
                least=max(row.fewest for row in members),
                axes=tuple(axis for axis in AXES if all(axis in row.axes for row in members)),
                drawn=any(row.drawn for row in members),
                smooth=self._smooth(names, way),
                within_func=way != CHECKPOINTED,
            )
        )

    @rule(target=compositions, name=st.sampled_from(list(PRODUCTS)), way=ways, mean=st.booleans())
    def product(self, name: str, way: str, mean: bool) -> Built:
        """With a matrix from `torch.func` or a loop beside it."""
        how = "mean" if mean else "sum"
        make, functions = PRODUCTS[name], self._functions(BOTH, way, how)
        return self._begun(
            Built(
                f"{name}, {how} of {way}",
                lambda: lambda p, x, y: make(*functions)(p, directions(p), x, y),
                lambda: lambda p, x, y: LOOPS[name](self.f, self.loss_of(how))(p, directions(p), x, y),
                by_parameter=True,
                smooth=self._smooth([], way),
                within_func=way != CHECKPOINTED,
            )
        )

    def _smooth(self, names: list[str], way: str) -> bool:
        """True if it has derivatives: eigenvectors have none where eigenvalues are equal, and torch's checkpoint runs
        fused norms again, in place of what can be differentiated twice, when the statistic is done."""
        return not (way == CHECKPOINTED and self.name == "generic") and not any("ekfac" in name for name in names)

    def _functions(self, of: str, way: str, how: str) -> tuple[Callable, ...]:
        if of == MODEL:
            return (self.models[way],)
        if of == BOTH:
            return self.models[way], self.of_outputs[how]
        return (self.losses[way, "none" if how == "sum" else how],)

    def _oracle(self, name: str, of: str, how: str, samples: list[int] | None) -> Callable[[], Callable]:
        """Its loop; where it has none, itself, of f as it is."""
        row = ROWS[name]
        loop = row.loop or loop_of_diagonals(name)
        if loop is None:
            functions, options = self._functions(of, AS_IT_IS, how), {} if samples is None else {"samples": samples}
            return lambda: row.make(*functions, **options)
        if of == MODEL:
            functions = (self.f,)
        elif BOTH in row.forms:
            functions = self.f, self.of_outputs[how]
        else:
            functions = (self._loss(self.f, "none") if how == "sum" else self._parts,)
        return lambda: loop(*functions, samples=samples)

    def _begun(self, built: Built) -> Built:
        """Not every function has K-factors, not every loss a sampler: what is refused of f as it is is not begun."""
        try:
            built.oracle()(*self.args[: built.arguments])
        except InvFuncError:
            assume(False)
        return self._agree(built)

    # What is put around it

    @rule(target=compositions, built=compositions, n=st.integers(1, 6), by_size=st.booleans(), axis=st.integers(0, 2))
    def chunk(self, built: Built, n: int, by_size: bool, axis: int) -> Built:
        assume(built.axes)
        over, length = built.axes[axis % len(built.axes)], {"chunk_size": n} if by_size else {"n": n}
        return self._agree(
            built.around(f"chunked({built}, {length}, {over})", lambda t: chunked(t, **length, over=over))
        )

    @rule(target=compositions, built=compositions)
    def reduce(self, built: Built) -> Built:
        assume(built.by_parameter and built.axes)
        return self._agree(
            built.mapped(
                f"reduced({built}, square)",
                lambda t: reduced(t, torch.square),
                lambda t: lambda *args: tree.map_leaves(torch.square, t(*args)),
                by_parameter=False,
            )
        )

    @rule(target=compositions, built=compositions)
    def compile(self, built: Built) -> Built:
        """Once in a program, as it takes its time. Torch refuses a graph that breaks within its own transforms."""
        assume(not self.compiled and not built.depth)
        self.compiled = True
        around = built.around(f"compiled({built})", compiled)
        return self._agree(replace(around, axes=(), by_parameter=False, within_func=False))

    @rule(target=compositions, built=compositions)
    def differentiate(self, built: Built) -> Built:
        assume(built.smooth)
        return self._by_func(built, "slopes", slopes, loop_slopes)

    @rule(target=compositions, built=compositions)
    def differentiate_forward(self, built: Built) -> Built:
        assume(built.smooth)
        return self._by_func(built, "slope along a tangent", slope_along, loop_slope_along)

    @rule(target=compositions, built=compositions)
    def vmap(self, built: Built) -> Built:
        assume(not built.drawn and not built.batched)  # torch does not say which of the draws each point gets
        return self._by_func(built, "at two points", at_points, loop_at_points, batched=True)

    @rule(target=compositions, built=compositions, way=st.sampled_from([0, 1, 2]))
    def of_data(self, built: Built, way: int) -> Built:
        """A derivative, a vmap, or one by autograd, with the inputs of the model in place of its parameters."""
        assume(all(x.is_floating_point() for x in tree.tensors(self.args[1])))
        assume(built.smooth if way else not built.drawn and not built.batched)
        transform = [at_points, slopes, loop_slopes][way]
        loop = [loop_at_points, loop_slopes, loop_slopes][way]
        changed = {"batched": True} if way == 0 else {"within_func": False} if way == 2 else {}
        step = self._deeper if way == 2 else self._by_func
        text = ["at two points of", "slopes in", "slopes by autograd in"][way]
        return step(built, f"{text} the data", in_data(transform), in_data(loop), **changed)

    @rule(target=compositions, built=compositions)
    def differentiate_by_autograd(self, built: Built) -> Built:
        assume(built.smooth)
        return self._deeper(built, "slopes by autograd", loop_slopes, loop_slopes, within_func=False)

    def _by_func(self, built: Built, *what: Any, **changed: Any) -> Built:
        assume(built.within_func)
        return self._deeper(built, *what, **changed)

    def _deeper(self, built: Built, text: str, transform: Callable, loop: Callable, **changed: Any) -> Built:
        assume(built.depth < DEEPEST)
        changed |= {"axes": (), "by_parameter": False, "depth": built.depth + 1}
        return self._agree(built.mapped(f"{text} of ({built})", transform, loop, **changed))

    # What is done with it

    @rule(built=compositions, seed=st.integers(1, 3), n=st.integers(1, 5))
    def call_with_other_numbers(self, built: Built, seed: int, n: int) -> None:
        assume(built.least <= n)
        self._take(n, seed)
        self._agree(built)

    @rule(built=compositions, seed=st.integers(0, 9))
    def certify(self, built: Built, seed: int) -> None:
        """Certifies a right result."""
        assume(built.axes and built.depth == 0)
        t, args = built.make(), self._given(built)
        try:
            checked = certified(t, generator=seed)
        except InvFuncError:  # K-factors, drawn columns, and what is reduced
            assume(False)
        assert_trees_close(shown(checked(*args)), shown(built.make()(*args)), 0, 0)
        assert torch.equal(self.random, torch.get_rng_state())

    @rule(built=compositions)
    def say_how(self, built: Built) -> None:
        """`explain` computes nothing that is seen."""
        assume(built.axes)
        assert str(explain(built.make())(*self._given(built)))
        assert torch.equal(self.random, torch.get_rng_state())


TestCompositions = pytest.mark.slow(Compositions.TestCase)
TestCompositions.settings = settings(
    max_examples=25, stateful_step_count=8, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)
