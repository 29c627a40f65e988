"""Functions whose code shows that they compute with torch and do nothing else, so that they need not be watched.

The values in such a function are its arguments (tensors, numbers, tuples, lists and dicts of them), constants,
functions of torch and further such functions, whatever they are passed through; it writes no attribute, item or global
name, and calls nothing that could. What it does at arguments of one form is then the same each time, unless a tensor's
numbers decide it, which is seen in a call that is watched (`Look`). All else (tensors, modules and containers that it
closes over, methods of other objects, `with`, `try`, `import`) is not shown: that is watched in every call.
"""

from __future__ import annotations

import builtins
import dis
import math
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from invfunc import tree
from invfunc.operations.heard import Function, Listener
from invfunc.operations.naming import function_name
from invfunc.operations.operation import OPERATIONS
from invfunc.pairs.exact import Grid
from invfunc.pairs.pair import Law
from invfunc.pairs.part import OfFunction, Rounded

PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None), type(...), torch.dtype, torch.device})
"""Types of constants."""
_STEPS = frozenset(
    "RESUME NOP CACHE EXTENDED_ARG PRECALL PUSH_NULL POP_TOP COPY SWAP KW_NAMES CALL CALL_FUNCTION_EX "
    "LOAD_CONST LOAD_FAST STORE_FAST DELETE_FAST LOAD_GLOBAL LOAD_ATTR LOAD_METHOD LOAD_DEREF LOAD_CLOSURE MAKE_CELL "
    "COPY_FREE_VARS MAKE_FUNCTION BUILD_TUPLE BUILD_LIST BUILD_MAP BUILD_CONST_KEY_MAP BUILD_SLICE BUILD_STRING "
    "FORMAT_VALUE LIST_EXTEND LIST_APPEND LIST_TO_TUPLE DICT_MERGE DICT_UPDATE MAP_ADD UNPACK_SEQUENCE UNPACK_EX "
    "BINARY_OP BINARY_SUBSCR UNARY_NEGATIVE UNARY_POSITIVE UNARY_INVERT UNARY_NOT COMPARE_OP CONTAINS_OP IS_OP "
    "GET_ITER GET_LEN FOR_ITER JUMP_FORWARD JUMP_BACKWARD JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP "
    "POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_FORWARD_IF_NONE POP_JUMP_FORWARD_IF_NOT_NONE "
    "POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE "
    "LOAD_ASSERTION_ERROR RAISE_VARARGS RETURN_GENERATOR YIELD_VALUE RETURN_VALUE".split()
)
"""What the code of such a function may consist of, in the words of Python 3.11; another word is not shown."""
_BUILT_IN = frozenset(
    "len range zip enumerate tuple list dict isinstance int float bool abs min max sum round reversed divmod slice all "
    "any ValueError TypeError RuntimeError AssertionError NotImplementedError IndexError KeyError".split()
)
"""Built-in functions that change nothing."""
_CHANGING = frozenset(
    "append extend insert remove pop popitem clear update setdefault sort reverse is_leaf grad grad_fn data_ptr data "
    "output_nr names is_neg is_conj is_inference".split()
)
"""Methods that change a container, and attributes that differ where the function is evaluated again."""
_ATTRIBUTES = frozenset(name for kind in (torch.Tensor, tuple, list, dict, str, float) for name in dir(kind))
_UNSTEADY = frozenset(
    "empty empty_like empty_strided empty_permuted empty_quantized new new_empty new_empty_strided from_file "
    "requires_grad set resize scaled_dot_product_attention multi_head_attention_forward get:data get:grad".split()
)
"""Operations whose results are not told by their arguments: memory that is not written yet, kernels that are chosen."""
_MISSING = object()


class NotShown(Exception):
    """Why it is not shown that a function computes and does nothing else."""


class Purity:
    """What shows that some functions compute and do nothing else, as long as it is unchanged.

    Raises:
        NotShown: it is not shown.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._names: list[tuple[Mapping[str, Any], str, Any]] = []
        self._functions: list[tuple[Any, types.CodeType, Any, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._seen: dict[int, Any] = {}
        self.attributes = False
        """Whether an attribute of an argument may be read, which a tensor can be given by anybody."""
        for root in roots:
            self._value(root)

    def unchanged(self) -> bool:
        """Whether all that was looked at is there as it was."""
        for held, name, value in self._names:
            if held.get(name, _MISSING) is not value:
                return False
        for fn, code, defaults, named in self._functions:
            own = fn.__code__ is code and fn.__defaults__ is defaults and fn.__kwdefaults__ is named
            if not own or fn.__dict__:
                return False
        return all(_content(cell) is value for cell, value in self._cells)

    def _value(self, value: Any) -> None:
        """A value that a function reads or calls."""
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen or (kind in _FUNCTIONS and _is_operation(value)):
            return
        self._seen[id(value)] = value
        if kind is types.FunctionType:
            self._function(value)
        elif kind is tuple:
            for part in value:
                self._value(part)
        elif kind is types.MethodType and isinstance(value.__self__, Law):
            self._value(value.__self__)
        elif (isinstance(value, Law) and value.computes) or kind is OfFunction or kind is Rounded:
            held = vars(value)
            self._read(held, list(held))
        elif kind is not Grid:
            raise NotShown(f"an object of {kind.__name__}")

    def _read(self, held: Mapping[str, Any], names: Iterable[str]) -> None:
        for name in names:
            self._names.append((held, name, held[name]))
            self._value(held[name])

    def _function(self, fn: types.FunctionType) -> None:
        if fn.__dict__ or fn.__kwdefaults__:
            raise NotShown(f"{fn.__name__} has attributes or defaults by name")
        self._functions.append((fn, fn.__code__, fn.__defaults__, None))
        self._value(fn.__defaults__)
        for cell in fn.__closure__ or ():
            self._cells.append((cell, _content(cell)))
            self._value(_content(cell))
        self._code(fn.__code__, fn.__globals__)

    def _code(self, code: types.CodeType, given: Mapping[str, Any]) -> None:
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
        for i, step in enumerate(steps):
            if not _is_shown(step, steps[i - 1] if i else None):
                raise NotShown(f"{code.co_name} does `{step.opname} {step.argrepr}`")
            if step.opname == "LOAD_GLOBAL":
                self._global(step.argval, given, steps[i + 1 :])
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                self.attributes = True
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                self._code(part, given)

    def _global(self, name: str, given: Mapping[str, Any], behind: Sequence[dis.Instruction]) -> None:
        """A global name; of a module what the attributes behind it lead to."""
        found = given.get(name, _MISSING)
        self._names.append((given, name, found))
        if found is _MISSING:
            value = getattr(builtins, name, None)
            if name not in _BUILT_IN:
                raise NotShown(f"`{name}`")
            self._names.append((vars(builtins), name, value))
            return
        for step in behind:
            if not isinstance(found, types.ModuleType) or step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                break
            held = vars(found)
            found = held.get(step.argval, _MISSING)
            self._names.append((held, step.argval, found))
        self._value(found)


def _is_shown(step: dis.Instruction, before: dis.Instruction | None) -> bool:
    """Whether a step of code changes nothing that outlives it."""
    name = step.opname
    if name not in _STEPS:
        return False
    if name in ("LOAD_ATTR", "LOAD_METHOD"):
        own = not step.argval.startswith("_") and step.argval not in _CHANGING
        return own and (step.argval in _ATTRIBUTES or (before is not None and before.opname in _LEADING))
    if name == "BINARY_OP":
        return not step.argrepr.endswith("=")  # `+=` writes into tensors and lists
    if name == "IS_OP":
        return before is not None and before.opname == "LOAD_CONST" and before.argval is None
    return True


_LEADING = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD")
"""The steps before an attribute that may be that of a module."""


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return _MISSING


_FUNCTIONS = (types.BuiltinFunctionType, types.FunctionType)


@cache
def _is_operation(value: Any) -> bool:
    """Whether a function is one of torch's operations, of which function modes hear, or one of numbers."""
    module = getattr(value, "__module__", None) or ""
    if type(value) is types.FunctionType:
        own = sys.modules[module] if module in ("torch.functional", "torch.nn.functional") else None
        torchs = vars(own).get(value.__name__) is value if own is not None else False  # a wrapper copies both names
    else:
        torchs = module.startswith("torch._C") or value.__self__ is torch.exp.__self__
    return _computes(function_name(value)) if torchs else getattr(value, "__self__", None) is math


@cache
def _computes(name: str) -> bool:
    """Whether an operation of this name gives a tensor that its arguments tell."""
    if name in _UNSTEADY or name.startswith("_"):
        return False
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return name in OPERATIONS
    returned = (r for overload in packet.overloads() for r in getattr(packet, overload)._schema.returns)
    return any("Tensor" in str(r.type) for r in returned)


class Look:
    """A look at the calls of torch that a function makes: whether each gives tensors, by its arguments alone."""

    def __init__(self) -> None:
        self.harmless = True
        self.seen = False
        """Whether there was a call to look at."""

    def ends(self, harmless: bool = True) -> None:
        """The call has ended, or there is something in it that has to be watched."""
        self.seen, self.harmless = True, self.harmless and harmless

    def hears(self, function: Function, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Look at a call."""
        if self.harmless:
            entry = function.entry
            other = entry.asks != "no" or entry.saves_early or entry.registers or entry.differentiates or entry.exits
            writes = function.writes(args, kwargs) or bool(function.written(args, kwargs)) or "out" in kwargs
            known = _computes(function.name)
            gives = isinstance(result, torch.Tensor) or bool(tree.tensors(result))
            self.harmless = known and gives and not (other or writes or function.draws(args, kwargs))


def looking(look: Look | None) -> AbstractContextManager:
    """A context in which a look is taken, if it is one."""
    return nullcontext() if look is None else _Looking(look)


class _Looking(Listener):
    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = function.func(*args, **kwargs)
        self._look.hears(function, args, kwargs, result)
        return result
