"""`invfunc/__init__.pyi`, the types of what is public, made from today's code: `python -m tests.stub`.

A statistic gives other types with `has_aux=True`, or other options. That takes two signatures for each, which would
stand in the way of a reader of the code, and be the same two everywhere. So they stand in a file of their own.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import invfunc
from invfunc.kronecker import Kronecker
from invfunc.reductions.estimates import Estimate, NoiseScale

PATH = Path(invfunc.__file__).with_suffix(".pyi")
ALWAYS = {"argnums", "has_aux"}
"""Options with which a result is of another type, whatever the statistic."""
GIVES = {
    "_LikeParams": ["batch_grad", "batch_l2_grad", "sum_grad_squared", "variance", "sketched_grad", "diag_hessian"]
    + ["sqrt_ggn"],
    "_Pair": ["grad_and_variance"],
    "_WithNoise": ["noise_scale"],
    "_OfTensor": ["predictive_covariance"],
    "_OfFactors": ["kfac", "ekfac"],
    "_OfVector": ["hvp", "ggnvp"],
    "_Estimator": ["estimate_trace", "estimate_diagonal"],
}
OTHERWISE = {"diag_ggn": ("_LikeParams", {"with_error"}), "ggn_trace": ("_OfTensor", {"with_error", "per_parameter"})}
OTHERWISE |= {"gram": ("_OfTensor", {"per_parameter"}), "clipped_grad": ("_WithNorms", {"groups"})}
OTHERWISE |= {name: ("_OfFactors", {"unsupported", "joint"}) for name in ("kfac", "ekfac")}
RESULTS = {name: (gives, set[str]()) for gives, names in GIVES.items() for name in names} | OTHERWISE
KEEP = ["streamed", "distributed", "compiled", "certified"]
"""Their result is of the type of what they are given."""

CLASSES = """
_T = TypeVar("_T")
_K = TypeVar("_K")
_S = TypeVar("_S", bound=Callable[..., Any])

class _LikeParams(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> _T: ...

class _Pair(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> tuple[_T, _T]: ...

class _Triple(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> tuple[_T, _T, _T]: ...

class _WithNorms(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> tuple[_T, torch.Tensor]: ...

class _WithNoise(Statistic):
    def __call__(self, params: _T, /, *batch: Any, **constants: Any) -> tuple[_T, NoiseScale]: ...

class _OfTensor(Statistic):
    def __call__(self, params: Any, /, *batch: Any, **constants: Any) -> torch.Tensor: ...

class _OfFactors(Statistic):
    @overload
    def __call__(self, params: torch.Tensor, /, *batch: Any, **constants: Any) -> Kronecker: ...
    @overload
    def __call__(self, params: dict[_K, torch.Tensor], /, *batch: Any, **constants: Any) -> dict[_K, Kronecker]: ...
    @overload
    def __call__(self, params: Any, /, *batch: Any, **constants: Any) -> Any: ...

class _OfVector(Product):
    def __call__(self, params: _T, v: _T, /, *batch: Any, **constants: Any) -> _T: ...
    def linearize(self, params: _T, /, *batch: Any, **constants: Any) -> Callable[[_T], _T]: ...

class _Estimator(Estimator):
    def __call__(self, params: Any, /, *batch: Any, **constants: Any) -> Estimate: ...
"""
_OF_CHUNKED = """n: int | None = ..., *, chunk_size: int | None = ..., memory: int | float | str | None = ...,
    over: Literal["outputs", "samples", "params"] | None = ..., fold: Any = ..., in_dims: InDims = ...,
    out_dims: int = ..., has_aux: bool = ..., progress: bool = ..."""
WRITTEN = {
    "chunked": f"""
@overload
def chunked(f: _S, {_OF_CHUNKED}) -> _S: ...
@overload
def chunked(f: None = ..., {_OF_CHUNKED}) -> Callable[[_S], _S]: ...
""",
    "together": """
@overload
def together(first: _LikeParams, second: _LikeParams, /) -> _Pair: ...
@overload
def together(first: _LikeParams, second: _LikeParams, third: _LikeParams, /) -> _Triple: ...
@overload
def together(*statistics: Statistic) -> Statistic: ...
""",
}


class _Typed(ast.NodeTransformer):
    """Says of a generic type without arguments that these may be any."""

    ANY = {"Callable": "Callable[..., Any]", "tuple": "tuple[Any, ...]", "list": "list[Any]", "dict": "dict[Any, Any]"}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.slice = self.visit(node.slice)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.parse(self.ANY.get(node.id, node.id), mode="eval").body


def made() -> str:
    """The file."""
    texts, imports = list[str](), {"from typing import Any, TypeVar, overload", "import torch"}
    imports |= {"from collections.abc import Callable", "from invfunc.products.product import Product"}
    imports |= {"from invfunc.statistic import Statistic", "from invfunc.products.operators import Estimator"}
    imports |= {f"from {kind.__module__} import {kind.__name__}" for kind in (Kronecker, Estimate, NoiseScale)}
    for name in invfunc.__all__:
        thing = getattr(invfunc, name)
        if isinstance(thing, ModuleType):
            imports.add(f"from . import {name} as {name}")
        elif isinstance(thing, type):
            imports.add(f"from {thing.__module__} import {name} as {name}")
        else:
            texts.append(WRITTEN.get(name) or _function(name, imports))
    for file in PATH.parent.rglob("*.py"):  # modules that the library itself takes from the package
        taken = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)]
        own = {a.name for n in taken if n.module == "invfunc" for a in n.names} - {*invfunc.__all__}
        imports |= {f"from . import {name} as {name}" for name in own if hasattr(invfunc, name)}
    init = Path(invfunc.__file__).read_text()
    version = next(line for line in init.splitlines() if line.startswith("__version__"))
    parts = [
        "# Made by `python -m tests.stub`.\n",
        *sorted(imports),
        CLASSES,
        version,
        f"__all__ = {invfunc.__all__!r}",
        *texts,
    ]
    return _formatted("\n".join(parts))


def _function(name: str, imports: set[str]) -> str:
    """The signatures of a public function."""
    function = inspect.unwrap(getattr(invfunc, name))
    module = ast.parse(Path(inspect.getfile(function)).read_text())
    *overloads, last = [n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == name]
    found = overloads if overloads and name not in KEEP else [last]
    for node in found:
        _bare(node)
        if name in KEEP:
            node.args.args[0].annotation = node.returns = ast.Name("_S")
    if name in RESULTS:
        gives, others = RESULTS[name]
        plain = _without(found[0], ALWAYS | others, gives)
        found = [plain, *found] if ast.dump(plain.args) != ast.dump(found[0].args) else [plain]
        for node in found:
            node.decorator_list = [ast.Name("overload")] * (len(found) > 1)
    for node in found:
        imports |= _imports(module, node)
    return "\n".join(ast.unparse(node) for node in found)


def _bare(node: ast.FunctionDef) -> None:
    """Leave its signature alone."""
    node.body = [ast.Expr(ast.Constant(...))]
    node.args.defaults = [ast.Constant(...) for _ in node.args.defaults]
    node.args.kw_defaults = [None if default is None else ast.Constant(...) for default in node.args.kw_defaults]
    for arg in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]:
        if arg is not None and arg.annotation is not None:
            arg.annotation = _Typed().visit(arg.annotation)
    if node.returns is not None:
        node.returns = _Typed().visit(node.returns)


def _without(node: ast.FunctionDef, options: set[str], gives: str) -> ast.FunctionDef:
    """A signature without some options, and with the type that it then gives."""
    (copy,) = ast.parse(ast.unparse(node)).body
    assert isinstance(copy, ast.FunctionDef)
    kept = [(a, d) for a, d in zip(copy.args.kwonlyargs, copy.args.kw_defaults, strict=True) if a.arg not in options]
    copy.args.kwonlyargs, copy.args.kw_defaults = [a for a, _ in kept], [d for _, d in kept]
    copy.returns = ast.Name(gives)
    return copy


def _imports(module: ast.Module, node: ast.FunctionDef) -> set[str]:
    """The lines that import what a signature names."""
    found, names = set[str](), {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {*invfunc.__all__}
    here = inspect.unwrap(getattr(invfunc, node.name)).__module__
    for line in module.body:
        if isinstance(line, ast.ImportFrom) and line.module != "invfunc":
            found |= {f"from {line.module} import {a.name}" for a in line.names if a.name in names and not a.asname}
        elif isinstance(line, ast.Import):
            found |= {f"import {a.name}" for a in line.names if a.name in names}
        elif isinstance(line, (ast.ClassDef, ast.Assign)):
            own = (
                {line.name}
                if isinstance(line, ast.ClassDef)
                else {t.id for t in line.targets if isinstance(t, ast.Name)}
            )
            found |= {f"from {here} import {name}" for name in own & names}
    return found


def _formatted(text: str) -> str:
    """As the formatter would have it, with sorted imports."""
    for command in (["check", "--select", "I,F401", "--fix", "-q"], ["format", "-q"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(PATH), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


if __name__ == "__main__":
    PATH.write_text(made())
