"""The table of what no one library has, each beside the figures of the work that it comes from, or its code.

Peers that are installed are run: `torchjd` and `curvlinops-for-pytorch` (which needs einconv and linear_operator). For
the others the figure stands that they have published.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from scipy.sparse.linalg import eigsh
from torch import nn
from torch.func import grad, jacrev, vmap

import invfunc
from invfunc import tree

from .measure import difference, medians, peak_here
from .report import announce, print_table

ANCHORS = "anchors"
_CPU = torch.device("cpu")


class _Found(NamedTuple):
    ours: str
    anchor: str


class _Net:
    """A classifier of digits' size, the gradient of whose mean loss is the unit of time."""

    def __init__(self, classes: int = 10, n: int = 64, width: int = 64, sharp: float = 1.0) -> None:
        torch.manual_seed(0)
        last = nn.Linear(width, classes)
        self.module = nn.Sequential(nn.Linear(64, width), nn.Tanh(), last)
        self.x, self.y = torch.randn(n, 64), torch.randint(classes, (n,))
        with torch.no_grad():
            last.weight.mul_(sharp)
        self.f, self.params = invfunc.functional(self.module)
        self.losses = lambda p, x, y: F.cross_entropy(self.f(p, x), y, reduction="none")
        self.given = self.params, self.x, self.y

    def gradient(self) -> Any:
        return grad(lambda p: self.losses(p, self.x, self.y).mean())(self.params)

    def times(self, repeats: int, **calls: Callable[[], Any]) -> dict[str, float]:
        """The seconds of some calls in those of a gradient."""
        every = {"gradient": self.gradient, **calls}
        for call in every.values():
            call()
        found = medians(every, dict.fromkeys(every, repeats), _CPU, lambda text: None)
        return {name: found[name] / found["gradient"] for name in calls}


def _flat(of: Any) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tree.tensors(of)])


def _off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


def _gram(repeats: int) -> _Found:
    net = _Net()
    ours, calls, wanted = invfunc.gram(net.losses), {}, None
    try:
        from torchjd.autogram import Engine  # pyright: ignore[reportMissingImports]

        module = copy.deepcopy(net.module)  # which has its hooks
        engine = Engine(module, batch_dim=0)

        def theirs() -> torch.Tensor:
            return engine.compute_gramian(F.cross_entropy(module(net.x), net.y, reduction="none"))

        calls, wanted = {"torchjd": theirs}, theirs()
    except ImportError:
        pass
    times = net.times(repeats, ours=lambda: ours(*net.given), **calls)
    between = invfunc.gram(net.losses, others=(net.x[:16], net.y[:16]))(*net.given)
    assert between.shape == (64, 16)
    if wanted is None:
        return _Found(f"{times['ours']:.1f} gradients; also train x test", "torchjd is not installed")
    same = difference(ours(*net.given), wanted)
    return _Found(
        f"{times['ours']:.1f} gradients; also train x test, recurrent, BatchNorm",
        f"{times['torchjd']:.1f}, same to {same:.0e}",
    )


def _sketched(repeats: int) -> _Found:
    net = _Net(n=256, width=1024)
    sketch = invfunc.sketched_grad(net.losses, rows=16, columns=16, generator=torch.Generator().manual_seed(0))
    shares = invfunc.batch_grad(net.losses)
    times = net.times(repeats, ours=lambda: sketch(*net.given), whole=lambda: shares(*net.given))
    g = torch.cat([t.flatten(1) for t in tree.tensors(shares(*net.given))], 1)
    s = torch.cat(tree.tensors(sketch(*net.given)), 1)
    off = (s @ s.T - g @ g.T).square().mean().sqrt() / g.square().sum(1).mean()
    return _Found(
        f"{times['ours']:.1f} gradients, {s.nbytes / g.nbytes:.1%} of the shares' memory, products off by {off:.2f}",
        f"LoGra: linear layers alone (GraSS: +165 % samples a second over it); whole shares {times['whole']:.1f}",
    )


def _solve(repeats: int) -> _Found:
    net, damping = _Net(n=32), 1e-2
    pairs = invfunc.eigenpairs(net.f, F.cross_entropy)(*net.given)
    v = net.gradient()
    product, product_at = invfunc.ggnvp(net.f, F.cross_entropy), (net.x, net.y)

    def residual(of: Any) -> float:
        return _off(_flat(product(net.params, of, *product_at)) + damping * _flat(of), _flat(v))

    calls: dict[str, Callable] = {"whole": lambda: invfunc.eigenpairs(net.f, F.cross_entropy)(*net.given)}
    calls["solve"] = lambda: pairs.solve(v, damping)
    theirs, inverse = "curvlinops is not installed", None
    curvlinops, ggn = _curvlinops(net)
    if curvlinops is not None:
        eye = curvlinops.IdentityLinearOperator([p.shape for p in net.params.values()], _CPU, torch.float32)
        inverse = curvlinops.CGInverseLinearOperator(ggn + damping * eye, eps=0, tolerance=1e-6, max_iter=1000)
        calls["theirs"] = partial(inverse.__matmul__, list(v.values()))
    times = net.times(repeats, **calls)
    if inverse is not None:
        found = dict(zip(v, inverse @ list(v.values()), strict=True))
        theirs = f"curvlinops' CG {times['theirs']:.0f} a vector, residual {residual(found):.0e}"
    return _Found(
        f"eigenpairs {times['whole']:.0f} gradients, then {times['solve']:.1f} a vector, residual "
        f"{residual(pairs.solve(v, damping)):.0e}",
        theirs,
    )


def _curvlinops(net: _Net) -> tuple[Any, Any]:
    """Their package and GGN of the mean loss, where it can be imported."""
    try:
        import curvlinops  # pyright: ignore[reportMissingImports]
        from curvlinops.examples import IdentityLinearOperator  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None, None
    setattr(curvlinops, "IdentityLinearOperator", IdentityLinearOperator)  # noqa: B010
    data = [(net.x, net.y)]
    params = list(net.module.parameters())
    return curvlinops, curvlinops.GGNLinearOperator(net.module, nn.CrossEntropyLoss(), params, data)


def _eigen(repeats: int) -> _Found:
    net, theirs = _Net(n=32), "curvlinops is not installed"
    values = invfunc.eigenpairs(net.f, F.cross_entropy)(*net.given).values[:5]
    calls: dict[str, Callable] = {"ours": lambda: invfunc.eigenpairs(net.f, F.cross_entropy)(*net.given)}
    curvlinops, ggn = _curvlinops(net)
    if curvlinops is not None:
        calls["theirs"] = lambda: eigsh(ggn.to_scipy(), 5)
    times = net.times(repeats, **calls)
    if curvlinops is not None:
        off = _off(torch.from_numpy(eigsh(ggn.to_scipy(), 5)[0]).flip(0), values.double())
        theirs = f"scipy on curvlinops' GGN, the 5 largest alone: {times['theirs']:.0f}, same to {off:.0e}"
    return _Found(f"all {32 * 9} pairs, exact: {times['ours']:.0f} gradients", theirs)


def _trace(repeats: int) -> _Found:
    net, theirs = _Net(n=32), "curvlinops is not installed"
    curvlinops, ggn = _curvlinops(net)
    if curvlinops is None:
        return _Found("-", theirs)
    ours = invfunc.linear_operator(invfunc.ggnvp(net.f, F.cross_entropy), kind="torch")(*net.given)

    def estimated(of: Any) -> torch.Tensor:
        torch.manual_seed(0)
        return curvlinops.hutchpp_trace(of, 30)

    times = net.times(repeats, ours=lambda: estimated(ours), theirs=lambda: estimated(ggn))
    exact = invfunc.ggn_trace(net.f, F.cross_entropy)(*net.given)
    exact = sum(t.sum() for t in tree.tensors(exact))
    off, same = _off(estimated(ours), torch.as_tensor(exact)), _off(estimated(ours), estimated(ggn))
    return _Found(
        f"Hutch++ on our product: {times['ours']:.0f} gradients, off by {off:.0e}",
        f"on curvlinops' own {times['theirs']:.0f}, same to {same:.0e}",
    )


def _predictive(repeats: int) -> _Found:
    net = _Net(width=256)
    variances = {name: torch.rand_like(p) for name, p in net.params.items()}
    ours = invfunc.predictive_covariance(net.f, variances)

    def by_jacobian() -> torch.Tensor:
        jacobians = vmap(jacrev(lambda p, x: net.f(p, x[None])[0]), in_dims=(None, 0))(net.params, net.x)
        flat = torch.cat([j.flatten(2) for j in jacobians.values()], 2)
        return torch.einsum("ncp,p,ndp->ncd", flat, _flat(variances), flat)

    times = net.times(repeats, ours=lambda: ours(net.params, net.x), theirs=by_jacobian)
    same = difference(ours(net.params, net.x), by_jacobian())
    peaks = [peak_here(call, _CPU) / 2**20 for call in (lambda: ours(net.params, net.x), by_jacobian)]
    return _Found(
        f"{times['ours']:.1f} gradients, {peaks[0]:.0f} MiB",
        f"Laplace's way, by the Jacobian: {times['theirs']:.1f}, {peaks[1]:.0f} MiB, same to {same:.0e}",
    )


def _nearest(repeats: int) -> _Found:
    net = _Net(n=128, width=12)
    dense = invfunc.sqrt_ggn(net.f, F.cross_entropy)(*net.given)["0.weight"].flatten(2).flatten(0, 1)
    block, off = dense.T @ dense, {}
    kinds = {"kfac": partial(invfunc.kfac, fisher="exact"), "kfoc": partial(invfunc.kronecker.kfoc, fisher="exact")}
    kinds["shampoo"] = partial(invfunc.kronecker.kfoc, fisher="exact", sweeps=1)
    calls = {name: make(net.f, F.cross_entropy) for name, make in kinds.items()}
    times = net.times(repeats, **{name: partial(call, *net.given) for name, call in calls.items()})
    for name, call in calls.items():
        off[name] = _off(call(*net.given)["0.weight"].dense(), block)
    s = dense.view(-1, *net.params["0.weight"].shape)
    rows = torch.einsum("voi,vpj->opij", s, s).reshape(12 * 12, -1)
    best = (rows.square().sum() - torch.linalg.svdvals(rows)[0] ** 2).sqrt() / rows.norm()
    return _Found(
        f"the block is off by {off['kfoc']:.3f} ({times['kfoc']:.0f} gradients); "
        f"Shampoo's, one sweep, {off['shampoo']:.3f}",
        f"the best there is, by an SVD of the rearranged block (curvlinops' KFOC): {best:.3f}; kfac {off['kfac']:.3f}",
    )


def _peeled(repeats: int) -> _Found:
    gains = []
    for sharp in (1.0, 5.0, 15.0):
        net = _Net(classes=50, sharp=sharp, n=32)
        exact = _flat(invfunc.diag_ggn(net.f, F.cross_entropy)(*net.given))
        spread = []
        for peel in (None, "auto"):
            generator = torch.Generator().manual_seed(1)
            drawn = invfunc.diag_ggn(net.f, F.cross_entropy, mc_samples=4, peel=peel, generator=generator)
            spread.append(torch.stack([(_flat(drawn(*net.given)) - exact).square().sum() for _ in range(100)]).mean())
        likeliest = net.f(net.params, net.x).softmax(1).amax(1).mean()
        gains.append(f"{spread[0] / spread[1]:.1f} (p {likeliest:.2f})")
    net, covered = _Net(classes=50, sharp=5.0, n=32), []
    exact = _flat(invfunc.diag_ggn(net.f, F.cross_entropy)(*net.given))
    with_error = invfunc.diag_ggn(
        net.f, F.cross_entropy, mc_samples=8, peel="auto", with_error=True, generator=torch.Generator().manual_seed(0)
    )
    for _ in range(20):
        value, error = map(_flat, with_error(*net.given)[:2])
        covered.append(((value - exact).abs() <= 2 * error).double().mean())
    return _Found(
        f"variance {', '.join(gains)} times less at 4 columns; two sigma cover {torch.stack(covered).mean():.1%}",
        "simulated for the split: 1.2 to 12 times; Fast Gauss-Newton keeps the first column alone, biased, no error",
    )


def _solver(repeats: int) -> _Found:
    step = invfunc.pairs.reversible_step(invfunc.pairs.runge_kutta(lambda x, t: (x[1], -x[0].sin())))
    solve, x0, found = invfunc.repeated(step), tuple(torch.tensor(a).double() for a in (1.5, 0.0)), {}
    for steps in (1000, 40, 80):
        times = torch.linspace(0, 6, steps + 1).double()
        ends = times[:-1], times[1:]
        last = solve((x0, x0), ends)
        found[steps] = last[0][0]
    lost = max((a - b).abs().item() for a, b in zip(invfunc.invert(solve)(last, ends)[0], x0, strict=True))
    order = math.log2((found[40] - found[1000]).abs() / (found[80] - found[1000]).abs())
    return _Found(
        f"RK4: order {order:.2f}, {lost:.0e} lost in 80 steps and back", "McCallum & Foster: order 4; 2e-15 in 160"
    )


def _resting(repeats: int) -> _Found:
    torch.manual_seed(0)
    weight, drive = 0.6 * torch.randn(64, 64) / 8, torch.randn(2000, 64)
    weight.requires_grad_()
    x, told = torch.zeros_like(drive), []
    for tolerance in (1e-2, 1e-3):
        solve = invfunc.pairs.equilibrium(lambda x, w, d: torch.tanh(x @ w + d), beta=0.8, tolerance=tolerance)
        told.append(solve(x, weight, drive).evaluations)
    return _Found(
        f"{told[0]} and {told[1]} evaluations to 1e-2 and 1e-3, exact gradient of them", "RevDEQ: 12 evaluations, fixed"
    )


def _bits(repeats: int) -> _Found:
    pair, grid = invfunc.pairs.bdia(torch.tanh), invfunc.pairs.Grid()
    state = grid.enter((torch.rand(64, 32), torch.rand(64, 32)))
    steps = [(torch.rand(64) < 0.5,) for _ in range(50)]
    return _Found(
        f"{invfunc.pairs.drift(pair, state, steps)[-1]:g} lost in 50 blocks, 1 bit an entry and block", "BDIA: 0, 1 bit"
    )


def _glow(repeats: int) -> _Found:
    import normflows  # pyright: ignore[reportMissingImports]: of the group dev

    torch.manual_seed(0)
    x, peaks, same = torch.rand(64, 8, 16, 16).double(), {}, 0.0
    for depth in (4, 16):
        blocks, state = [normflows.flows.GlowBlock(8, 16).double() for _ in range(depth)], x
        for block in blocks:
            state = block(state)[0].detach()  # its norms start from a first batch
        flow = invfunc.with_log_det(invfunc.chain(*map(invfunc.pairs.from_module, blocks)))
        flow = invfunc.invertible_checkpoint(flow, check="off")  # log-determinants that begin at 0 are not compared
        own = [p for block in blocks for p in block.parameters() if p.requires_grad]

        def plain(given: Any, blocks: Any = blocks) -> Any:
            z, log_det = given
            for block in blocks:
                z, more = block(z)
                log_det = log_det + more
            return z, log_det

        def slopes(f: Callable, own: Any = own) -> tuple[torch.Tensor, ...]:
            z, log_det = f((x, x.new_zeros(len(x))))
            return torch.autograd.grad(z.square().mean() - log_det.mean(), own)

        same = max(same, _off(_flat(slopes(flow)), _flat(slopes(plain))))
        for name, f in (("ours", flow), ("plain", plain)):
            peaks[name, depth] = peak_here(partial(slopes, f), _CPU) / 2**20
    both = [f"{peaks[name, 4]:.0f} -> {peaks[name, 16]:.0f} MiB" for name in ("ours", "plain")]
    return _Found(
        f"its blocks, 4 -> 16: {both[0]}", f"normflows' Glow by itself: {both[1]}, gradients same to {same:.0e}"
    )


def _training(repeats: int) -> _Found:
    net, steps = _Net(), 200
    batches, c = {"i": torch.randint(64, (steps, 32))}, torch.ones(64).double().requires_grad_()
    x, y = net.x.double(), net.y
    params = {name: p.double() for name, p in net.params.items()}

    def loss(p: Any, each: Any, c: torch.Tensor) -> torch.Tensor:
        return (c[each["i"]] * F.cross_entropy(net.f(p, x[each["i"]]), y[each["i"]], reduction="none")).mean()

    told = []
    for make in (invfunc.pairs.reversible_sgd, invfunc.pairs.reversible_adam):
        step = make(loss, lr=0.01)
        train, start = invfunc.repeated(step), step.start(params)

        def whole(train: Any = train, start: Any = start) -> Any:
            with torch.no_grad():
                return train(start, batches, c)

        def forth_and_back(train: Any = train, start: Any = start) -> Any:
            return torch.autograd.grad(_flat(train(start, batches, c).params).square().sum(), c)

        last = whole()
        with torch.no_grad():
            assert torch.equal(invfunc.invert(train)(last, batches, c).weights, start.weights)
        forth_and_back()
        times = medians({"train": whole, "all": forth_and_back}, {"train": 3, "all": 3}, _CPU, lambda text: None)
        bits = (last.digits[0][0] + 1.0).log2().mean().item() / steps
        told.append(f"{times['all'] / times['train']:.1f} trainings forth and back, {bits:.3f} bits")
    return _Found(
        f"SGD {told[0]}; Adam {told[1]}; to the bit", "Maclaurin: 0.152 bits at 0.9; REPLAY trains log_k T times again"
    )


_ROWS: dict[str, Callable[[int], _Found]] = {
    "gram, [N, N] of 64 samples": _gram,
    "sketched_grad 16 x 16": _sketched,
    "damped inverse, in the space of samples": _solve,
    "eigenpairs of the GGN (ViViT)": _eigen,
    "linear_operator(kind='torch')": _trace,
    "predictive_covariance, diagonal": _predictive,
    "kfoc, Shampoo": _nearest,
    "peel=, with_error=": _peeled,
    "reversible_step": _solver,
    "equilibrium": _resting,
    "bdia": _bits,
    "a Glow's memory": _glow,
    "training run backwards": _training,
}
_TOLD = {
    "Laplace backends": _Found(
        "1057 pass, 6 fail, 7 skipped of Laplace's own suite, all backends replaced", "its own: the same 6 fail"
    ),
    "linear datamodelling score (lesson 12)": _Found("0.90, EK-FAC 0.81, a tenth left out", "MAGIC: 0.98, EK-FAC 0.26"),
}


def anchors(name: str, options: argparse.Namespace) -> None:
    """Measure the table and print it."""
    lines = []
    for row, measure in _ROWS.items():
        announce(name, row)
        lines.append({"": row, **measure(options.repeats)._asdict()})
    announce(name, "")
    print(f"{name}: times in gradients of the mean loss, cpu, one thread, median of {options.repeats} rounds")
    print_table([*lines, *({"": row, **found._asdict()} for row, found in _TOLD.items())])
    print("figures of others that are not run are published ones; the last two rows are of earlier runs\n")
