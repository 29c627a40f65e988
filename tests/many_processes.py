"""Programs of several processes for `tests/data_sets/test_distributed.py`, which starts them as torchrun does."""

import atexit
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import invfunc
from invfunc import compiled, distributed, streamed, tree
from invfunc.evaluation.processes import named
from invfunc.spectra import spectral_density
from invfunc.testing import assert_trees_close
from tests.data_sets.test_streamed import EXACT, FLOOR, batches, dense, linear, losses
from tests.networks import LOSSES, network, samples_loss
from tests.rows import LEAVES, LOSS, MODEL, PRODUCTS, ROWS, TREES, picks
from tests.strategies import Numbers


@contextmanager
def alone() -> Iterator[None]:
    """In a process group of this process, if it has none.

    Gloo's threads let go of Python objects when they have reduced something, and need the interpreter for that. To
    destroy the group waits for them, without giving it away: so they get it before.
    """
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        time.sleep(0.2)
        dist.destroy_process_group()


@dataclass(frozen=True)
class Example:
    """A statistic of a drawn network, or a product, and how its samples are divided."""

    name: str
    form: str
    net: str
    n: int
    loss: int
    reduction: str
    edges: list[int]
    """Of the samples of all processes, one behind the other."""
    within: list[int] | None
    """Ends of the batches of a process, if its samples come from a loader."""
    gather: bool
    laid: list[tuple[str, str]]
    """Placements of the parameters, in turn, along the first axis of a mesh and the second; if empty, each process has
    them whole."""
    grid: bool
    """True if the mesh has two axes."""
    planned: bool
    """True if batches are evaluated by plans."""


LAID = ["whole", "replicas", "rows", "columns"]
"""Of DTensors all but the first."""


@cache
def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def laid_out(params: Any, e: Example, turned: bool = False, lead: int = 0) -> Any:
    """Trees of DTensors; those of a vector are others, behind some axes."""
    leaves, structure = tree.flatten(params)
    kinds = itertools.cycle(e.laid[:: -1 if turned else 1] or [("whole", "whole")])
    own = mesh(2, 2) if e.grid else mesh(dist.get_world_size())

    def one(x: torch.Tensor, kind: tuple[str, str]) -> torch.Tensor:
        axes = {"rows": lead, "columns": min(lead + 1, x.ndim - 1)}
        along = [Shard(axes[k]) if k in axes and x.ndim > lead else Replicate() for k in kind[: own.ndim]]
        return x if kind[0] == "whole" else distribute_tensor(x, own, along, src_data_rank=None)

    return tree.unflatten([one(x, kind) for x, kind in zip(leaves, kinds, strict=False)], structure)


def full(x: Any) -> Any:
    return tree.map_tensors(lambda y: y.full_tensor() if isinstance(y, DTensor) else y, x)


def wrongly_laid(e: Example, found: Any, params: Any) -> str:
    """A result that is not laid out as its parameter is; results of other shapes have to be plain tensors."""
    row = ROWS.get(e.name.removesuffix(" drawn"))
    if row is None:
        like, rest = [found], []
    elif row.gives == TREES and "trace" not in e.name:
        trees = 1 if picks(e.name.removesuffix(" drawn")) is not None or "noise" in e.name else 2
        like, rest = found[:trees], found[trees:]
    else:
        entries = row.gives == LEAVES and picks(e.name.removesuffix(" drawn")) is None and "trace" not in e.name
        like, rest = ([found], []) if entries else ([], [found])
    leaves = tree.tensors((params,))
    for x, p in zip(tree.tensors(tuple(like)), leaves * len(like), strict=True):
        lead = x.ndim - p.ndim
        wanted = [Shard(k.dim + lead) if k.is_shard() else k for k in getattr(p, "placements", ())]
        if isinstance(x, DTensor) != isinstance(p, DTensor) or wanted != [*getattr(x, "placements", ())]:
            return f"{x} beside {p}"
        if isinstance(x, DTensor) and (
            x.device_mesh != p.device_mesh or x.to_local().untyped_storage().nbytes() > x.to_local().nbytes
        ):
            return f"{x} on another mesh than {p}, or keeping the whole"
    return f"{rest}" * any(isinstance(x, DTensor) for x in tree.tensors(tuple(rest)))


def forked() -> str:
    """Start method that takes a second: torch and these programs are imported once, in the process that forks."""
    get_context("forkserver").set_forkserver_preload(["tests.processes_failing"])
    return "forkserver"


def start(size: int, program: Any, *args: Any) -> list[Any]:
    """Results of a program in each of `size` processes, which torch's launcher starts."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=size, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
        run_id=f"{program.__name__}-{size}-{time.time_ns()}", max_restarts=0, monitor_interval=0.1,
        start_method=forked(),
    )  # fmt: skip
    found = elastic_launch(config, _joined)(program, *args)
    return [found[rank] for rank in range(size)]


def _joined(program: Any, *args: Any) -> Any:
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # there may be fewer of them than processes
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    try:
        found = program(*args)
    finally:
        dist.destroy_process_group()
    atexit.register(os._exit, 0)  # at the end of a process, gloo of torch 2.13 aborts now and then
    return found


def made(e: Example) -> tuple[Any, Any, tuple]:
    """A statistic or product, its parameters, and all samples."""
    net, loss = network(e.net, e.n), LOSSES[e.loss]
    args = net.x, loss.target(Numbers(1), e.n)
    make = ROWS[e.name].make if e.name in ROWS else PRODUCTS[e.name]
    if e.form == LOSS:
        return make(samples_loss(net, loss)), net.params, args
    if e.form == MODEL:
        return make(net.f), net.params, args[:1]
    if e.reduction == "none":
        return make(net.f, lambda z, y: loss(z, y, "none").reshape(len(z), -1).sum(1)), net.params, args
    return make(net.f, lambda z, y: loss(z, y, e.reduction)), net.params, args


def own_part(e: Example, args: tuple) -> tuple[tuple, torch.Tensor]:
    """The samples of this process, and their places among all."""
    edges = [min(i, e.n) for i in e.edges]
    part, (place,) = (batches(edges, *x)[dist.get_rank()] for x in (args, [torch.arange(e.n)]))
    return part, place


def hold(examples: list[Example]) -> list[tuple[str, str, dict[str, str]]]:
    """Of each example, "right", why it was refused, or what is wrong; and a hash of the result."""
    return [_held(e) for e in examples]


def _held(e: Example) -> tuple[str, str, dict[str, str]]:
    t, params, args = made(e)
    part, place = own_part(e, args)
    lead = [] if e.name in ROWS else [tree.map_tensors(lambda p: Numbers(5)(*_lead(t), *p.shape), params)]
    try:
        wanted, refused = streamed(t)(params, *lead, [args]), ""
    except invfunc.InvFuncError as error:
        wanted, refused = None, type(error).__name__
    t, params, _ = made(e)  # whose generator begins anew
    own = compiled(t) if e.planned else t
    params = laid_out(params, e)
    lead = [laid_out(v, e, turned=True, lead=t.lead) for v in lead]
    options = {"each": "gather"} if e.gather and e.name in ROWS else {}
    try:
        if e.within is None:
            found = distributed(own, **options)(params, *lead, *part)
        else:
            n = len(place)
            parts = batches([min(i, n) for i in e.within], *part)
            found = distributed(streamed(own), **options)(params, *lead, parts)
    except invfunc.InvFuncError as error:
        return ("right" if type(error).__name__ == refused else repr(error)), refused, {}
    if wrong := wrongly_laid(e, found, params):
        return wrong, refused, {}
    found = full(found)
    picked = picks(e.name.removesuffix(" drawn"))
    if picked is not None and not e.gather:
        wanted = picked(wanted, place)
    try:
        assert_trees_close(dense(found), dense(wanted), EXACT, FLOOR)
    except AssertionError as error:
        return f"{error}", refused, {}
    return "right", refused, {} if picked is not None else named("", found)


def _lead(t: Any) -> list[int]:
    return [2] * t.lead


def data(size: int = 12) -> tuple[Any, tuple]:
    rand = Numbers(0)
    params = {"w": rand(4, 3), "b": rand(3)}
    own = [rand(size, 4), torch.arange(size) % 3]
    rank, processes = dist.get_rank(), dist.get_world_size()
    return params, tuple(x[rank::processes] for x in own)


def grams(compare: Any, params: Any, own: tuple, each: list[tuple]) -> None:
    """Products of the samples of each process with those of another batch, which all have."""
    whole, rank = tuple(map(torch.cat, zip(*each, strict=True))), dist.get_rank()
    start = sum(len(y) for _, y in each[:rank])
    t = invfunc.gram(losses, others=tuple(z[:4] for z in whole))
    compare("gram with others", distributed(t)(params, *own), t(params, *whole)[start : start + len(own[1])])
    compare("gathered", distributed(streamed(t), each="gather")(params, batches([0, 2], *own)), t(params, *whole))


def composed() -> list[str]:
    """Errors of compositions, compared with all samples in one process."""
    rank, (params, (x, y)) = dist.get_rank(), data()
    each = [None] * dist.get_world_size()
    dist.all_gather_object(each, (x, y))
    whole = tuple(torch.cat(parts) for parts in zip(*each, strict=True))
    wrong: list[str] = []

    def compare(name: str, found: Any, wanted: Any) -> None:
        try:
            assert_trees_close(found, wanted, EXACT, FLOOR)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")

    v, g = invfunc.variance(losses), partial(torch.Generator().manual_seed, 0)
    several = invfunc.together(v, invfunc.batch_l2_grad(losses), invfunc.diag_ggn(losses))
    compare("together", distributed(several, each="gather")(params, x, y), several(params, *whole))
    seen: list[str] = []
    summed = invfunc.reduced(v, lambda path, q: seen.append(path) or q.sum())
    compare("reduced", distributed(summed)(params, x, y), tree.map_tensors(torch.sum, v(params, *whole)))
    compare("once for each", torch.tensor(len(seen)), torch.tensor(2))
    for over in ("samples", "outputs", "params"):
        t = invfunc.chunked(invfunc.diag_ggn(linear, F.cross_entropy), 2, over=over)
        compare(f"chunked over {over}", distributed(t)(params, x, y), t(params, *whole))
    p = invfunc.ggnvp(linear, F.cross_entropy)
    dense = invfunc.linear_operator(p)(params, *whole) @ torch.eye(15, dtype=torch.float64).numpy()
    found = invfunc.linear_operator(distributed(p))(params, x, y) @ torch.eye(15, dtype=torch.float64).numpy()
    compare("operator", torch.from_numpy(found), torch.from_numpy(dense))
    largest = invfunc.eigenpairs(distributed(p), top=3)(params, x, y)
    wanted = torch.linalg.eigvalsh(torch.from_numpy(dense)).flip(0)[:3]
    compare("largest eigenvalues", largest.values, wanted)
    compare("inside of their bounds", (largest.values - wanted).abs() <= largest.bounds, wanted > 0)
    of = partial(invfunc.estimate_trace, probes=3)
    compare("trace", of(distributed(p), generator=g())(params, x, y).value, of(p, generator=g())(params, *whole).value)
    with_aux = invfunc.variance(lambda *args: (losses(*args), len(args[1])), has_aux=True)
    compare("aux", torch.tensor(distributed(with_aux)(params, x, y)[1]), torch.tensor(len(x)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double().eval()
    of_ddp, ps = invfunc.functional(torch.nn.parallel.DistributedDataParallel(model))
    t = invfunc.diag_ggn(of_ddp, F.cross_entropy)
    compare("a module under DDP", distributed(t)(ps, x, y), t(ps, *whole))
    compare("its names", torch.tensor(sorted(ps) == sorted(invfunc.functional(model)[1])), torch.tensor(True))
    t = invfunc.ekfac(lambda p, x: x @ p["w"].exp() + p["b"], F.cross_entropy, fisher="exact", unsupported="skip")
    none = {
        name: torch.tensor(k is None)
        for name, k in distributed(t)(params, x[: len(x) * rank], y[: len(x) * rank]).items()
    }
    compare("factors that no process has", none, {"w": torch.tensor(True), "b": torch.tensor(False)})
    half, t = tree.map_tensors(torch.Tensor.bfloat16, params), invfunc.grad_and_variance(losses)
    found = distributed(t)(half, x[: len(x) * rank].bfloat16(), y[: len(x) * rank])
    compare("halves that are kept as floats", found, t(half, each[1][0].bfloat16(), each[1][1]))
    grams(compare, params, (x, y), each)
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    compare("a group of one", distributed(v, groups[dist.get_rank()])(params, x, y), v(params, x, y))
    wrong += of_parts(params, (x, y), whole)
    return wrong


def hidden(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh()


def some(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Losses that the weights have no part in, in some batches."""
    return losses(params, x, y) if x.ndim == 2 else x.flatten(1).sum(1) * params["b"].square().sum()


def of_parts_in_turn(compare: Any) -> None:
    """Columns one after the other, what is told of each parameter alone, and products of samples."""
    for over in ("outputs", "params", "samples"):
        t = invfunc.chunked(invfunc.diag_ggn(linear, F.cross_entropy), 2, over=over)
        compare(f"columns of parts over {over}", lambda around, t=t: around(t))
    named = invfunc.reduced(invfunc.noise_scale(losses, groups=lambda path: path), lambda path, q: q.flatten()[:1])
    compare("noise of parts, reduced", lambda around: lambda *args: around(named)(*args)[0], parts=False)
    together = invfunc.together(invfunc.noise_scale(losses), invfunc.batch_l2_grad(losses))
    compare("noise of parts", lambda around: lambda *args: around(together)(*args)[0][0])
    compare("its numbers", lambda around: lambda *args: [*around(together)(*args)[0][1]], parts=False)


def of_parts(params: Any, own: tuple, whole: tuple) -> list[str]:
    """Errors of compositions where each process has a shard of the parameters."""
    placed = {name: distribute_tensor(p, mesh(2), [Shard(0)], src_data_rank=None) for name, p in params.items()}
    v, p, wrong = invfunc.variance(losses), invfunc.ggnvp(linear, F.cross_entropy), list[str]()

    def compare(name: str, t: Any, *rest: Any, parts: bool = True) -> None:
        found, wanted = t(distributed)(placed, *own), t(lambda t: t)(params, *whole)
        if parts != all(isinstance(x, DTensor) for x in tree.tensors((found,))):
            wrong.append(f"{name} is laid out as {found}")
        try:
            assert_trees_close(full(found), wanted, EXACT, FLOOR)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")

    g = partial(torch.Generator().manual_seed, 0)
    compare("together of parts", lambda around: around(invfunc.together(v, invfunc.diag_ggn(losses))))
    compare("reduced of parts", lambda around: around(invfunc.reduced(v, lambda path, q: q * 2)), parts=False)
    compare("a tuple of parts", lambda around: around(invfunc.variance(losses, argnums=(0,))))
    compare("diagonal of parts", lambda around: invfunc.estimate_diagonal(around(p), probes=2, generator=g()))
    options = {"probes": 4, "method": "xdiag"}
    compare("xdiag of parts", lambda around: invfunc.estimate_diagonal(around(p), generator=g(), **options))
    v_of = {name: p.flip(0) for name, p in params.items()}
    products = invfunc.hvp(losses), invfunc.ggnvp(linear, F.cross_entropy, fisher="empirical"), invfunc.ggnvp(losses)
    for one in products:
        compare(f"{one}", lambda around, one=one: lambda params, *args: around(one)(params, v_of, *args))
    with TemporaryDirectory() as folder:

        def kept(around: Any) -> Any:
            """With a file, in which sums are whole."""
            t = (
                around(products[0])
                if around is not distributed
                else distributed(streamed(products[0], checkpoint=folder + "/a"))
            )
            return lambda params, *args: t(params, v_of, *([[args]] if around is distributed else args))

        compare("a product with a file", kept)
    aside = invfunc.hvp(lambda p, *args: (losses(p, *args), p["w"].T), has_aux=True)
    if not torch.equal(distributed(aside)(placed, placed, *own)[1], params["w"].T):
        wrong.append("aux of a product that is a parameter")
    of_parts_in_turn(compare)
    largest = partial(invfunc.eigenpairs, top=3)
    compare("eigenvalues of parts", lambda around: lambda *a: largest(around(p))(*a).values, parts=False)
    compare("eigenpairs times parts", lambda around: lambda *a: largest(around(p))(*a) @ a[0], parts=False)
    density = partial(spectral_density, probes=2, steps=5)
    compare("density of parts", lambda around: lambda *a: density(around(p), generator=g())(*a).nodes, parts=False)
    for trace in (partial(invfunc.estimate_trace, probes=4, method=m) for m in ("hutchinson", "xtrace")):
        compare("trace of parts", lambda around, of=trace: of(around(p), generator=g()), parts=False)
    scripted = torch.jit.script(hidden)
    t = invfunc.diag_ggn(
        lambda p, x, y: F.cross_entropy(x @ p["w"] + scripted(p["w"].detach(), x), y, reduction="none")
    )
    compare("what torch.jit reads", lambda around: around(t))
    with_aux = distributed(invfunc.variance(lambda p, *args: (losses(p, *args), p["w"].T), has_aux=True))
    if not torch.equal(with_aux(placed, *own)[1], params["w"].T):
        wrong.append("aux that is a parameter")
    each = batches([2, 4], *whole)
    each[1] = each[1][0][:, None], each[1][1]
    uneven = [each[1:2], each[::2]][dist.get_rank()]
    found = distributed(streamed(invfunc.grad_and_variance(some)))(placed, uneven)
    wanted = streamed(invfunc.grad_and_variance(some))(params, each)
    found = found, distributed(streamed(invfunc.hvp(some)))(placed, placed, uneven)
    wanted = wanted, streamed(invfunc.hvp(some))(params, params, each)
    try:
        assert_trees_close(full(found), wanted, EXACT, FLOOR)
    except AssertionError as error:
        wrong.append(f"parameters that some batches do not reach: {error}")
    at = distributed(p).linearize(placed, *own)
    twice = at(at(placed))  # a vector with placements
    try:
        assert_trees_close(full(twice), p(params, p(params, params, *whole), *whole), EXACT, FLOOR)
        operator = invfunc.linear_operator(distributed(p))(placed, *own)
        flat = torch.cat([x.flatten() for x in params.values()])
        wanted = torch.cat([x.flatten() for x in p(params, params, *whole).values()])
        assert_trees_close(torch.from_numpy(operator @ flat.numpy()), wanted, EXACT, FLOOR)
    except AssertionError as error:
        wrong.append(f"products of parts: {error}")
    return wrong
