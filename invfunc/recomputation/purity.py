"""Functions whose code shows that they compute with torch and do nothing else, so that they need not be watched.

The values in such a function are its arguments (tensors, numbers, tuples, lists and dicts of them), constants, tensors
that it closes over, functions of torch, further such functions, and modules whose methods are such functions, whatever
they are passed through; it writes no attribute, item or global name, and calls nothing that could. What it does at
arguments of one form is then the same each time, unless a tensor's numbers decide it, which is seen in a call that is
watched (`look`). All else (other objects and containers that it closes over, methods of other objects, `with`, `try`,
`import`) is not shown: that is watched in every call.
"""

from __future__ import annotations

import builtins
import dis
import math
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from invfunc.functional.module_copy import REGISTERED
from invfunc.operations.naming import function_name
from invfunc.operations.operation import OPERATIONS
from invfunc.pairs.exact import Grid
from invfunc.pairs.pair import Law
from invfunc.pairs.part import OfFunction, OfModule, Rounded, Unwritten
from invfunc.pairs.value import Value
from invfunc.recomputation.readings import CONTAINERS, MISSING, TENSORS, Readings, content, is_helper, strange_in

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
    "LOAD_ASSERTION_ERROR RAISE_VARARGS RETURN_GENERATOR YIELD_VALUE RETURN_VALUE "
    # of 3.12
    "BINARY_SLICE CALL_INTRINSIC_1 END_FOR LOAD_FAST_AND_CLEAR LOAD_FAST_CHECK POP_JUMP_IF_FALSE POP_JUMP_IF_TRUE "
    "POP_JUMP_IF_NONE POP_JUMP_IF_NOT_NONE RERAISE RETURN_CONST "
    # of 3.13
    "CALL_KW CONVERT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC LOAD_FAST_LOAD_FAST SET_FUNCTION_ATTRIBUTE "
    "STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST TO_BOOL".split()
)
"""What the code of such a function may consist of, in the words of Python 3.11 to 3.13; another word is not shown."""
_INTRINSICS = ("INTRINSIC_LIST_TO_TUPLE", "INTRINSIC_STOPITERATION_ERROR", "INTRINSIC_UNARY_POSITIVE")
"""What of Python's own it may call."""
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
_OF_MODULES = frozenset(name for name in dir(nn.Module) if not hasattr(torch.Tensor, name)) - {"forward"}
"""Methods of modules, which lead to other modules (`children`) or change them (`eval`)."""
_KINDS = (nn.Parameter, tuple, list, dict, str, float)
_ATTRIBUTES = frozenset(name for kind in _KINDS for name in dir(kind) if not name.startswith("_"))
_PRIVATE = frozenset(name for kind in (*_KINDS, nn.Module) for name in dir(kind) if name.startswith("_"))
_UNSTEADY = frozenset(
    "empty empty_like empty_strided empty_permuted empty_quantized new new_empty new_empty_strided from_file "
    "requires_grad set resize scaled_dot_product_attention multi_head_attention_forward get:data get:grad".split()
)
"""Operations whose results are not told by their arguments: memory that is not written yet, kernels that are chosen."""
_MOST = 64
"""How many modules are looked at: comparing them takes time in each call."""


class NotShown(Exception):
    """Why it is not shown that a function computes and does nothing else."""


class Purity:
    """What shows that some functions compute and do nothing else, as long as it is unchanged.

    Raises:
        NotShown: it is not shown.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._read = Readings()
        self._seen: dict[int, Any] = {}
        self._modules: list[nn.Module] = []
        self._classes: dict[type, Mapping[str, Any]] = {}
        """What they have."""
        self._found: set[str] = set()
        self._only: dict[str, str] = {}
        """The attributes that nothing but a module may have, with where they are read."""
        self.names = {"forward"}
        """The attributes that are read, whatever of. A tensor can be given any of them by anybody."""
        self.takes_no_dicts = False
        """Whether a dict among the arguments may be parameters that take the place of a module's own."""
        for root in roots:
            self._value(root)
        for name, where in self._only.items():
            if name not in self._found:
                raise NotShown(where)
        self._read.lay_out()
        del self._seen, self._modules, self._classes, self._found, self._only  # of each block, of which there are many

    @property
    def has_tensors(self) -> bool:
        """Whether any are closed over."""
        return self._read.has_tensors

    def unchanged(self) -> bool:
        """Whether all that was looked at is there as it was, but for tensors."""
        return self._read.unchanged()

    def tensors(self) -> list[torch.Tensor] | None:
        """The tensors that are closed over now; None if anything else is where one was."""
        return self._read.tensors()

    def _value(self, value: Any) -> None:
        """A value that a function reads or calls."""
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen or (kind in _FUNCTIONS and _is_operation(value)):
            return
        self._seen[id(value)] = value
        if kind is types.FunctionType:
            self._function(value)
        elif kind in (tuple, torch.Size):
            for part in value:
                self._value(part)
        elif kind is types.MethodType and isinstance(value.__self__, (Law, nn.Module)):
            self._value(value.__self__)
            if isinstance(value.__self__, nn.Module):
                self._value(value.__func__)
        elif (isinstance(value, Value) and getattr(value, "computes", False)) or kind in _PARTS:
            for name in vars(value):
                self._at(vars(value), name)
        elif kind is OfModule:
            self.takes_no_dicts = True
            self._at(vars(value), "module")
        elif isinstance(value, nn.Module):
            self._module(value)
        elif kind is not Grid:
            raise NotShown(f"an object of {kind.__name__}")

    def _at(self, held: Mapping[str, Any], name: str) -> None:
        """What is under a name, if anything is."""
        value = held.get(name, MISSING)
        if type(value) in TENSORS:
            self._read.place(held, name)
            return
        self._read.name(held, name, value)
        if value is not MISSING:
            self._value(value)

    def _function(self, fn: types.FunctionType) -> None:
        if fn.__dict__ or fn.__kwdefaults__:
            raise NotShown(f"{fn.__name__} has attributes or defaults by name")
        self._read.function(fn)
        if is_helper(fn):
            return
        self._value(fn.__defaults__)
        for cell in fn.__closure__ or ():
            value = content(cell)
            if type(value) in TENSORS:
                self._read.place(cell)
            else:
                self._read.cell(cell, value)
                self._value(value)
        self._code(fn.__code__, fn.__globals__)

    def _module(self, module: nn.Module) -> None:
        """A module that may be called, and whose attributes may be read by a name that the code reads of anything."""
        if len(self._modules) == _MOST:
            raise NotShown(f"more than {_MOST} modules")
        strange = strange_in(type(module))
        if strange is None and vars(module).get("_compiled_call_impl") is not None:
            strange = "_compiled_call_impl"
        if strange is None and isinstance(module, nn.ParameterDict):
            strange = "__getitem__"
        if strange:
            raise NotShown(f"`{strange}` of {type(module).__name__}")
        self._modules.append(module)
        self._read.module(module)
        for name in [*self.names]:
            self._attribute(module, name)
        if isinstance(module, CONTAINERS):
            self._entries(module)

    def _entries(self, module: nn.Module) -> None:
        """What is in a container."""
        self._read.whole(module._modules)
        for child in module._modules.values():
            self._value(child)
        if isinstance(module, nn.ParameterList):
            self._at(vars(module), "_size")
            if len(module._parameters) < len(module):
                raise NotShown("a list of other things than parameters")
            for name in module._parameters:
                self._at(module._parameters, name)

    def _attribute(self, module: nn.Module, name: str) -> None:
        """What a module has under a name. Where it has nothing, no code that came to an end has read it."""
        own, classes = vars(module), type(module).__mro__
        of_class = next((i for i, cls in enumerate(classes) if name in vars(cls)), None)
        if of_class is not None and classes[of_class] in (nn.Module, object):
            if name in self._only:
                raise NotShown(self._only[name])
            return  # of a tensor; a module would write its parameters, which is heard
        if of_class is not None:
            for cls in classes[: of_class + 1]:
                self._at(self._classes.setdefault(cls, vars(cls)), name)
        held = next((held for held in (own, *map(own.__getitem__, REGISTERED)) if name in held), None)
        if held is not None and held is not own:
            self._read.name(own, name, MISSING)
        if held is not None or of_class is not None:
            self._found.add(name)
            self._at(own if held is None else held, name)

    def _code(self, code: types.CodeType, given: Mapping[str, Any]) -> None:
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
        for i, step in enumerate(steps):
            where = f"{code.co_name} does `{step.opname} {step.argrepr}`"
            before = steps[i - 1] if i else None
            if not _is_shown(step, before):
                raise NotShown(where)
            if step.opname == "LOAD_GLOBAL":
                self._global(step.argval, given, steps[i + 1 :])
            elif step.opname in _ATTRIBUTE:
                self._named(step.argval, where, before)
        for part in code.co_consts:
            if isinstance(part, types.CodeType):
                self._code(part, given)

    def _named(self, name: str, where: str, before: dis.Instruction | None) -> None:
        """An attribute that is read."""
        led = before is not None and before.opname in _LEADING and not name.startswith("_")
        if not (led or name in _ATTRIBUTES):
            self._only[name] = where
        if name not in self.names or name in self._only:
            self.names.add(name)
            for module in [*self._modules]:
                self._attribute(module, name)

    def _global(self, name: str, given: Mapping[str, Any], behind: Sequence[dis.Instruction]) -> None:
        """A global name; of a Python module what the attributes behind it lead to."""
        if name not in given:
            self._read.name(given, name, MISSING)
            if name not in _BUILT_IN:
                raise NotShown(f"`{name}`")
            self._read.name(vars(builtins), name, getattr(builtins, name))
            return
        held: Mapping[str, Any] = given
        for step in behind:
            found = held.get(name)
            if type(found) is not types.ModuleType or step.opname not in _ATTRIBUTE:
                break
            self._read.name(held, name, found)
            held, name = vars(found), step.argval
            if name not in held:
                raise NotShown(f"`{name}`, which a module makes when it is asked for")
        self._at(held, name)


def _is_shown(step: dis.Instruction, before: dis.Instruction | None) -> bool:
    """Whether a step of code changes nothing that outlives it."""
    name = step.opname
    if name not in _STEPS:
        return False
    if name in _ATTRIBUTE:
        return not any(step.argval in names for names in (_CHANGING, _PRIVATE, _OF_MODULES))
    if name == "CALL_INTRINSIC_1":
        return step.argrepr in _INTRINSICS
    if name == "BINARY_OP":
        return not step.argrepr.endswith("=")  # `+=` writes into tensors and lists
    if name == "IS_OP":
        return before is not None and before.opname == "LOAD_CONST" and before.argval is None
    return True


_PARTS = (OfFunction, Rounded, Unwritten)
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_LEADING = ("LOAD_GLOBAL", *_ATTRIBUTE)
"""The steps before an attribute that may be that of a Python module."""
_FUNCTIONS = (types.BuiltinFunctionType, types.FunctionType)


def _is_operation(value: Any) -> bool:
    """Whether a function is one of torch's operations, of which function modes hear, or one of numbers."""
    module = getattr(value, "__module__", None) or ""
    if type(value) is types.FunctionType:
        own = sys.modules[module] if module in ("torch.functional", "torch.nn.functional") else None
        torchs = vars(own).get(value.__name__) is value if own is not None else False  # a wrapper copies both names
    else:
        torchs = module.startswith("torch._C") or value.__self__ is torch.exp.__self__
    return gives_tensors(function_name(value)) if torchs else getattr(value, "__self__", None) is math


@cache
def gives_tensors(name: str) -> bool:
    """Whether an operation of this name gives a tensor that its arguments tell."""
    if name in _UNSTEADY or name.startswith("_"):
        return False
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not hasattr(packet, "overloads"):
        return name in OPERATIONS
    returned = (r for overload in packet.overloads() for r in getattr(packet, overload)._schema.returns)
    return any("Tensor" in str(r.type) for r in returned)
