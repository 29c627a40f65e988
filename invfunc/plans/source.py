"""Operations as a function in Python, which is made in less time than a graph of torch.fx, and holds less."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from invfunc.plans.tape import mapped

_WRITTEN = frozenset({int, bool, str, type(None)})
"""Types of constants that are told by what is printed of them."""


class Line:
    """An operation, or an input."""

    __slots__ = ("args", "kwargs", "name", "target")

    def __init__(self, name: str, target: Any = None, args: Any = (), kwargs: Any = None) -> None:
        self.name, self.target, self.args, self.kwargs = name, target, args, kwargs or {}


class Source:
    """Takes operations as a graph of torch.fx does; `acts` tells which are needed for more than their results."""

    def __init__(self, acts: Callable[[Any], bool]) -> None:
        self.acts = acts
        self.given, self.lines = list[Line](), list[Line]()
        self.results: Any = None

    def placeholder(self, name: str) -> Line:
        self.given.append(Line(name))
        return self.given[-1]

    def call_function(self, target: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Line:
        self.lines.append(Line(f"x{len(self.lines)}", target, args, kwargs))
        return self.lines[-1]

    def output(self, results: Any) -> None:
        self.results = results

    def function(self) -> Callable[..., Any]:
        """The function, in which each result is given free behind the last operation that takes it."""
        world, used, lines = dict[str, Any](), set[Line](), list[str]()
        names: dict[Any, str] = {}

        def known(x: Any) -> str:
            """The name of something that is not written as it is."""
            key = (type(x), repr(x) if isinstance(x, (float, complex)) else x)
            if key not in names:
                names[key] = f"k{len(names)}"
                world[names[key]] = x
            return names[key]

        def text(x: Any) -> str:
            kind = type(x)
            if kind is Line:
                return x.name
            if kind in _WRITTEN or (kind is float and math.isfinite(x)):
                return repr(x)
            if isinstance(x, list):
                return f"[{', '.join(map(text, x))}]"
            if kind is tuple:
                return f"({''.join(f'{text(y)}, ' for y in x)})"
            return known(x)

        def use(x: Any) -> Any:
            if type(x) is Line and x not in used:
                used.add(x)
                ended.append(x.name)
            return x

        ended = list[str]()
        mapped(use, self.results)
        for line in reversed(self.lines):
            taken = line in used
            if not taken and not self.acts(line):
                continue
            ended = []
            mapped(use, [*line.args, line.kwargs])
            given = [*map(text, line.args), *(f"{name}={text(x)}" for name, x in line.kwargs.items())]
            free = f"; {' = '.join(ended)} = None" if ended else ""
            lines.append(f" {f'{line.name} = ' if taken else ''}{known(line.target)}({', '.join(given)}){free}")
        head = f"def planned({', '.join(line.name for line in self.given)}):"
        exec("\n".join([head, *reversed(lines), f" return {text(self.results)}"]), world)
        return world["planned"]
