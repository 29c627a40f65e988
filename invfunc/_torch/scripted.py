"""What torch.jit made, of which function modes see nothing: one operation for those that want to."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function

from invfunc import tree
from invfunc._torch.functorch import dispatched, innermost, plainly, under, unwatched, version
from invfunc.errors import ReplayError

_KINDS: tuple[Any, ...] = (torch.ScriptMethod, torch.jit.ScriptFunction)  # pyright: ignore[reportAttributeAccessIssue]
_CONSTANTS: weakref.WeakKeyDictionary[Any, list[torch.Tensor]] = weakref.WeakKeyDictionary()
"""The constants that are written into what torch.jit made."""
_Values = dict[int, torch.Tensor]
"""Tensors by their place in a module."""


class Watcher:
    """A torch function mode that sees calls of what torch.jit made."""


class Interpreted:
    """A context in which what torch.jit made is seen by the watchers of a thread, and runs as it was written.

    Optimised, which it is after some calls, it saves other tensors for its gradient, and has wrong second derivatives
    inside of torch.func (torch 2.13). How it is called stays with torch from the first time on, as each change of a
    type costs more than such a context; where no watcher is, calls go on.
    """

    def __enter__(self) -> None:
        for kind in _KINDS:
            if getattr(kind.__dict__["__call__"], "__module__", None) != __name__:
                _install(kind)
        jit: Any = torch
        self._optimised = jit._C._get_graph_executor_optimize()
        jit._C._set_graph_executor_optimize(False)

    def __exit__(self, *error: Any) -> None:
        jit: Any = torch
        jit._C._set_graph_executor_optimize(self._optimised)


_lock = threading.Lock()


def _install(kind: Any) -> None:
    """Let watchers see the calls of what torch.jit made."""
    with _lock:
        call = kind.__dict__["__call__"]
        if getattr(call, "__module__", None) == __name__:
            return  # by another thread

        def seen(made: Any, *args: Any, **kwargs: Any) -> Any:
            _forget_optimised(made)
            if not _watched():
                return call(made, *args, **kwargs)
            scripted = Scripted(made, call)
            return scripted(scripted.state, scripted.parameters, args, kwargs)

        kind.__call__ = seen


def _forget_optimised(made: Any) -> None:
    """Let go of the optimised code of what is to run without, as torch runs it all the same; several share their code.

    It is let go of once, and again when anything has run optimised in between.
    """
    global _runs
    jit: Any = torch
    if jit._C._get_graph_executor_optimize():
        _runs += 1
    elif _CLEAN.get(made) != _runs:
        made._debug_flush_compilation_cache()
        _CLEAN[made] = _runs


_runs = 0
"""How many calls were optimised."""
_CLEAN: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many that were when the code of each was let go of."""


def _watched() -> bool:
    return under(Watcher) and has_torch_function((None,))


class Scripted:
    """One call of what torch.jit made: an operation of the state and the parameters of its module, and its arguments.

    Where it gets others than the module has, it is evaluated on a copy of the module.
    """

    def __init__(self, made: Any, call: Callable) -> None:
        self._made, self._call = made, call
        self._owner = getattr(made, "owner", None)
        self.parameters: _Values = {}
        self.state: _Values = {}
        for place, (module, name, is_parameter) in enumerate(_attributes(self._owner)):
            value = module.getattr(name)
            if isinstance(value, torch.Tensor):
                (self.parameters if is_parameter else self.state)[place] = value
        self.wrote: list[int] = []
        """The places of the state that it wrote."""
        self._constants: list[torch.Tensor] = []

    @property
    def __name__(self) -> str:
        if self._owner is None:
            return self._made.name
        module = self._owner.qualified_name.split(".")[-1]
        return module if self._made.name == "forward" else f"{module}.{self._made.name}"

    def __eq__(self, other: object) -> bool:
        """The same code: a copy of a module has methods of its own."""
        if not isinstance(other, Scripted) or other.__name__ != self.__name__:
            return False
        if self._owner is None or other._owner is None:
            return other._made == self._made
        return other._owner._type() == self._owner._type()

    def __hash__(self) -> int:
        return hash(self.__name__)

    def look(self) -> None:
        """Look into it for what cannot be seen from here."""
        if self._made not in _CONSTANTS:
            graph = self._made.inlined_graph
            self._refuse(graph)
            nodes = graph.findAllNodes("prim::Constant")
            tensors = [n.t("value") for n in nodes if n.hasAttribute("value") and n.kindOf("value") == "t"]
            _CONSTANTS[self._made] = tensors
        self._constants = _CONSTANTS[self._made]

    def _refuse(self, graph: Any) -> None:
        if graph.findNode("prim::PythonOp") is not None:
            raise ReplayError(
                f"`{self.__name__}`, which torch.jit made, calls back into Python (torch.jit.ignore), where it is not "
                "seen what is read and written. Leave this part of the block unscripted."
            )
        for kind in ("aten::batch_norm", "aten::instance_norm"):
            for node in graph.findAllNodes(kind):
                _, _, _, mean, _, training, *_ = node.inputs()
                if mean.node().kind() == "prim::Param" and training.toIValue() is not False:
                    raise ReplayError(
                        f"`{self.__name__}`, which torch.jit made, writes running statistics that are its arguments, "
                        "which is not seen. Keep them in buffers of a module, and script that."
                    )

    def __call__(self, state: _Values, parameters: _Values, args: tuple, kwargs: dict[str, Any]) -> Any:
        if _watched():
            return handle_torch_function(self, (), state, parameters, args, kwargs)
        made, owner, given = self._made, self._owner, {**state, **parameters}
        if any(given[place] is not value for place, value in (self.parameters | self.state).items()):
            owner = _copy(owner)
            for place, (module, name, _) in enumerate(_attributes(owner)):
                if place in given:
                    module.setattr(name, given[place])
            made = owner._get_method(made.name)
        with unwatched():
            before = {place: (t, version(t), _value(t)) for place, t in state.items()}
            others = self._others(owner, given)
        result = self._call(made, *args, **kwargs)
        with unwatched():
            self.wrote = [place for place, (t, then, value) in before.items() if _written(t, then, value)]
            self._check(others, self._others(owner, given))
        return result

    def _others(self, owner: Any, given: _Values) -> dict[str, Any]:
        """What a call may not change: attributes that are not tensors, which tensors there are, and constants."""
        found: dict[str, Any] = {}
        for place, (module, name, _) in enumerate(_attributes(owner)):
            leaves, structure = tree.flatten(module.getattr(name))
            found[f"{place} {name}"] = (
                structure,
                [
                    (id(leaf), None if place in given else version(leaf)) if isinstance(leaf, torch.Tensor) else leaf
                    for leaf in leaves
                    if isinstance(leaf, (torch.Tensor, bool, int, float, complex, str))
                ],
            )
        return found | {f"{i} a constant": version(t) for i, t in enumerate(self._constants)}

    def _check(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        for key, value in before.items():
            if after[key] != value:
                raise ReplayError(
                    f"`{self.__name__}`, which torch.jit made, changes {key.split(' ', 1)[1]}, which cannot be "
                    "repeated. Keep what changes in a buffer, and write that in place: self.count.add_(1)."
                )


def _attributes(module: Any) -> Iterator[tuple[Any, str, bool]]:
    """The attributes of a scripted module and of those within it, and whether they are parameters."""
    if module is None:
        return
    jit: Any = torch
    kind = jit.ConcreteModuleType.from_jit_type(module._type())
    for name, (_, is_parameter) in sorted(kind.get_attributes().items()):
        yield module, name, is_parameter
    for _, inner in jit.ModuleDict(module).items():
        yield from _attributes(inner)


def _copy(module: Any) -> Any:
    """A module of the same tensors and of modules that are copies."""
    jit: Any = torch
    copy = module._replicate_for_data_parallel()
    for name, inner in jit.ModuleDict(module).items():
        copy.setattr(name, _copy(inner))
    return copy


def _value(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor holds, as normalisations write their state without its version telling; None where it has none."""
    if tensor.is_meta or dispatched():
        return None
    with plainly():
        return innermost(tensor).clone()


def _written(tensor: torch.Tensor, then: int, value: torch.Tensor | None) -> bool:
    if version(tensor) != then:
        return True
    with plainly():
        return value is not None and not torch.equal(innermost(tensor), value)
