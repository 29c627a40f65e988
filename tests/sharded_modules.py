"""Programs of several processes with modules that torch has wrapped, for `tests/test_sharded_modules.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor

import invfunc
from invfunc import InvFuncError, additive_coupling, distributed, functional, invertible_checkpoint, tree
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import EXACT
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

N, WIDTH, SHALLOW, DEEP = 256, 4, 2, 6
"""Wide batches and few parameters, so that activations are what counts."""


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(b))


class Block(nn.Module):
    """A coupling of two modules."""

    def __init__(self, wrap: Callable) -> None:
        super().__init__()
        self.first, self.second = Part(), Part()
        self.coupling = wrap(additive_coupling(self.first, self.second))

    def forward(self, state: Any) -> Any:
        return self.coupling(state)


class Reversible(nn.Module):
    """Pairs of blocks; the last ones are evaluated, but may have no part in the loss."""

    def __init__(self, pairs: int, wrap: Callable, without: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(Block(wrap), Block(wrap)) for _ in range(pairs))
        self.head, self.without = nn.Linear(2 * WIDTH, 1), without
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [x.chunk(2, 1)]
        for block in self.blocks:
            states = [*states[-self.without :], block(states[-1])] if self.without else [block(states[-1])]
        return self.head(torch.cat([part.sin() for part in states[0]], 1)).square().mean()


def of_model(net: Reversible) -> nn.Module:
    return fully_shard(net)


def of_blocks(net: Reversible) -> nn.Module:
    for block in net.modules():
        if isinstance(block, Block):
            fully_shard(block)
    return fully_shard(net)


def of_pairs(net: Reversible) -> nn.Module:
    for pair in net.blocks:
        fully_shard(pair)
    return fully_shard(net)


def of_parts(net: Reversible, **options: Any) -> nn.Module:
    for part in net.modules():
        if isinstance(part, Part):
            fully_shard(part, **options)
    return fully_shard(net, **options)


def of_kept_parts(net: Reversible) -> nn.Module:
    return of_parts(net, reshard_after_forward=False)


WAYS = {
    "DDP": nn.parallel.DistributedDataParallel,
    "the model": of_model,
    "each block": of_blocks,
    "each pair": of_pairs,
    "the parts": of_parts,
    "the parts, kept": of_kept_parts,
}


def as_it_is(pair: Any) -> Any:
    return pair


def full(x: Any) -> Any:
    return tree.map_tensors(lambda y: y.full_tensor() if isinstance(y, DTensor) else y.detach(), x)


def blocks() -> dict[str, Any]:
    """Of each way: the gradients of a network of invertible blocks, or the error; and the bytes at two depths."""
    x = Numbers(1)(dist.get_world_size() * N, 2 * WIDTH)
    own, found = x.chunk(dist.get_world_size())[dist.get_rank()], dict[str, Any]()
    for name, way in WAYS.items():
        try:
            net = way(Reversible(2, invertible_checkpoint))
            net(own).backward()
            found[name] = {key.removeprefix("module."): full(p.grad) for key, p in net.named_parameters()}
        except InvFuncError as error:
            found[name] = f"{type(error).__name__}: {error}"
            continue
        if name != "DDP":  # which wants a gradient of each parameter
            net = way(Reversible(3, invertible_checkpoint, without=2))
            net(own).backward()
            found[name, "without"] = {key: full(p.grad) for key, p in net.named_parameters() if p.grad is not None}
        for wrap in (as_it_is, invertible_checkpoint):
            found[name, wrap.__name__] = [peak(way(Reversible(depth, wrap)), own) for depth in (SHALLOW, DEEP)]
    return found


def peak(net: nn.Module, x: torch.Tensor) -> float:
    """In inputs, of a forward and a backward pass behind a first one."""
    net(x).backward()
    with nothing_collected(), Meter() as meter:
        net(x).backward()
        return meter.peak() / x.nbytes


# `functional` of a module to which fully_shard was applied


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(Part() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.head.register_forward_hook(lambda module, args, z: 2 * z)  # one of the user's, which stays
        self.double()

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x))


def sharded(*modules: str, **options: Any) -> Classifier:
    """One with fully_shard on some of its modules, on those that are named in one word together."""
    model = Classifier()
    for names in modules:
        together = [model.get_submodule(name) for name in names.split()] or [model]
        fully_shard(together if len(together) > 1 else together[0], **options)
    return model


LAID = {
    "the model": ("",),
    "each part": ("parts.0", "parts.1", ""),
    "parts together": ("parts.0 parts.1", ""),
    "one part": ("parts.0",),
}


def functions() -> list[str]:
    """Errors of functions and statistics of sharded modules."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), list[str]()
    x, y = Numbers(2)(6 * size, WIDTH), torch.arange(6 * size) % 3
    own, whole = (x[rank::size], y[rank::size]), (x, y)
    g, plain = functional(Classifier())

    def compare(name: str, found: Any, wanted: Any) -> None:
        try:
            assert_trees_close(full(found), full(wanted), EXACT)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")

    for name, modules in LAID.items():
        model = sharded(*modules)
        before = {key: (id(p), type(p)) for key, p in model.named_parameters()}
        f, params = functional(model)
        given = full(params)
        with mock.patch.object(FSDPParamGroup, "pre_forward", side_effect=AssertionError("a hook runs")):
            compare(f"the value, {name}", f(given, x), g(plain, x))
        for t in (invfunc.diag_ggn, partial(invfunc.kfac, fisher="exact")):
            found = distributed(t(f, F.cross_entropy))(params, *own)
            compare(f"{t}, {name}", found, t(g, F.cross_entropy)(plain, *whole))
        if {key: (id(p), type(p)) for key, p in model.named_parameters()} != before:
            wrong.append(f"the module has changed, {name}")
    model = sharded(*LAID["each part"])
    register_fsdp_forward_method(model, "encode")
    f, params = functional(model.encode)
    given = full(params)
    with mock.patch.object(FSDPParamGroup, "pre_forward", side_effect=AssertionError("a hook runs")):
        compare("a method", f(given, x), functional(Classifier().encode)[0](plain, x))
        compare("compiled", torch.compile(f)(given, x), functional(Classifier().encode)[0](plain, x))
    return wrong


def refused() -> dict[str, str]:
    """Messages where a function of a sharded module is not what the module computes."""
    x, found = Numbers(2)(3, WIDTH), dict[str, str]()

    def gathered() -> None:
        model = sharded("")
        with torch.no_grad():
            model(x)
        functional(model)

    def frozen() -> None:
        model = sharded("")
        model.head.bias.requires_grad_(False)
        f, params = functional(model)
        f({**full(params), "head.bias": full(model.head.bias)}, x)
        f(full(params), x)

    def kept() -> None:
        model = sharded("")
        Kept.model = model
        model.head.register_forward_hook(lambda module, args, z: z + 0 * Kept.model.head.weight.sum())
        f, params = functional(model)
        f(full(params), x)

    cases = {
        "gathered": gathered,
        "another precision": lambda: functional(sharded("", mp_policy=MixedPrecisionPolicy(torch.bfloat16))),
        "another precision of outputs": lambda: functional(
            sharded("parts.1", "", mp_policy=MixedPrecisionPolicy(output_dtype=torch.float32))
        ),
        "frozen": frozen,
        "kept outside": kept,
        "sums in another precision": lambda: functional(
            sharded("", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        ),
    }
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except InvFuncError as error:
            found[name] = f"{error}"
    return found


class Kept:
    model: Any = None


def told_of_modules() -> tuple:
    return blocks(), functions(), refused()
