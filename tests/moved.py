"""Programs in which one parameter is used in several ways, around moves of samples by their data.

A program is drawn by a `random.Random`. `plain` is the same without the moves, in terms of which the shares of a scalar
loss are defined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F

D = 4
Rows = dict[str, torch.Tensor]
"""Data of a program's samples: `x`, `i`, numbers below D, and keys `k`."""


def layer_norm(h, w, e):
    return F.layer_norm(h, (D,), w[2], w[3])


def conv(h, w, e):
    return F.conv1d(h[:, None], w[None, :1, :3], padding=1)[:, 0]


def conv_of_a_view(h, w, e):
    return F.conv1d(h.view(-1, 2, 2), w.view(2, 2, 4)[..., :3], padding=1).flatten(1)


def gather_of_a_layer(h, w, e):
    return (h @ w).gather(1, (e["i"][:, None] + torch.arange(D)) % D)


USES: dict[str, Callable] = {
    "elementwise": lambda h, w, e: h * w[0],
    "bias": lambda h, w, e: h + w[1],
    "matmul": lambda h, w, e: (h @ w).tanh(),
    "linear": lambda h, w, e: F.linear(h, w, w[0]).tanh(),
    "in place": lambda h, w, e: h.clone().mul_(w[3]),
    "embedding": lambda h, w, e: h + F.embedding(e["i"], w),
    "embedding times": lambda h, w, e: h * F.embedding(e["i"], w),
    "index": lambda h, w, e: h + w[e["i"]],
    "one-hot": lambda h, w, e: h + F.one_hot(e["i"], D).to(h.dtype) @ w,
    "gather of w": lambda h, w, e: h * w.gather(0, e["i"][:, None].expand(-1, D)),
    "gather": gather_of_a_layer,
    "slice": lambda h, w, e: torch.cat([h[:, :2] @ w[:2, :2], h[:, 2:]], 1).sin(),
    "conv": conv,
    "conv of a view": conv_of_a_view,
    "norm": layer_norm,
    "data": lambda h, w, e: h * e["x"].sin() + e["x"] @ w,
    "where": lambda h, w, e: torch.where((e["i"] % 2 == 0)[:, None], h @ w, h * w[0]),
    "nothing": lambda h, w, e: h.cos(),
}


# Orders, from the data alone


def by_items(e):
    return torch.tensor(sorted(range(len(e["k"])), key=lambda n: e["k"][n].item()))


def by_masks(e):
    return torch.cat([(e["i"] != 2).nonzero()[:, 0], (e["i"] == 2).nonzero()[:, 0]])


ORDERS: dict[str, Callable] = {
    "argsort": lambda e: e["k"].argsort(),
    "sort": lambda e: e["k"].sort(descending=True).indices,
    "topk": lambda e: e["k"].topk(len(e["k"])).indices,
    "by x": lambda e: e["x"][:, 0].argsort(),
    "items": by_items,
    "masks": by_masks,
    "flip": lambda e: torch.arange(len(e["k"])).flip(0),
}


def taken(e: Rows, q: torch.Tensor | slice) -> Rows:
    return {name: rows[q] for name, rows in e.items()}


# Ways to move h there and back around a function of rows


def written(h, q, z):
    out = torch.empty_like(z)
    out[q] = z
    return out


def in_a_loop(h, q, z):
    out = torch.zeros_like(z)
    for j, n in enumerate(q.tolist()):
        out[n] = z[j]
    return out


def stacked(h, q, z):
    rows = {n: z[j] for j, n in enumerate(q.tolist())}
    return torch.stack([rows[n] for n in range(len(q))])


BACK: dict[str, Callable] = {
    "index_add": lambda h, q, z: torch.zeros_like(z).index_add(0, q, z),
    "added": lambda h, q, z: h.index_add(0, q, z),
    "index_copy": lambda h, q, z: torch.zeros_like(z).index_copy(0, q, z),
    "scatter": lambda h, q, z: torch.zeros_like(z).scatter(0, q[:, None].expand(-1, D), z),
    "inverse": lambda h, q, z: z[q.argsort()],
    "index_select": lambda h, q, z: z.index_select(0, q.argsort()),
    "gather": lambda h, q, z: z.gather(0, q.argsort()[:, None].expand(-1, D)),
    "written": written,
    "loop": in_a_loop,
    "stack": stacked,
}
GO: dict[str, Callable] = {
    "index": lambda h, q: h[q],
    "index_select": lambda h, q: h.index_select(0, q),
    "gather": lambda h, q: h.gather(0, q[:, None].expand(-1, D)),
    "stack": lambda h, q: torch.stack([h[n] for n in q.tolist()]),
    "unbind": lambda h, q: torch.stack([h.unbind()[n] for n in q.tolist()]),
}


@dataclass
class Moved:
    """Steps around which the samples are put in another order; `others` is what is left where it was, wrongly unless
    nobody reads it."""

    order: str
    go: str
    back: str
    steps: list
    left: tuple[str, ...] = ()
    matrix: bool = False

    def __call__(self, h, w, e):
        q = ORDERS[self.order](e)
        there = taken(e, q) | {name: e[name] for name in self.left}
        if self.matrix:
            p = torch.eye(len(q), dtype=h.dtype)[q]
            return p.mT @ run(self.steps, p @ h, w, there)
        return BACK[self.back](h, q, run(self.steps, GO[self.go](h, q), w, there))

    def plain(self, h, w, e):
        z = plain(self.steps, h, w, e)
        return h + z if self.back == "added" and not self.matrix else z


@dataclass
class ByMask:
    """Each half of the samples on its own."""

    steps: tuple[list, list]

    def __call__(self, h, w, e):
        out = torch.zeros_like(h)
        for own, steps in enumerate(self.steps):
            mask = e["i"] % 2 == own
            if mask.any():
                out[mask] = run(steps, h[mask], w, taken(e, mask))
        return out

    def plain(self, h, w, e):
        first, second = (plain(steps, h, w, e) for steps in self.steps)
        return torch.where((e["i"] % 2 == 0)[:, None], first, second)


@dataclass
class InOrder:
    """Sample by sample, in the order of the keys."""

    steps: list
    order: str
    cat: bool

    def __call__(self, h, w, e):
        found = dict[int, torch.Tensor]()
        for n in ORDERS[self.order](e).tolist():
            found[n] = run(self.steps, h[n : n + 1], w, taken(e, slice(n, n + 1)))
        rows = [found[n] for n in range(len(h))]
        return torch.cat(rows) if self.cat else torch.stack([row[0] for row in rows])

    def plain(self, h, w, e):
        return plain(self.steps, h, w, e)


def run(steps, h, w, e):
    for step in steps:
        h = USES[step](h, w, e) if isinstance(step, str) else step(h, w, e)
    return h


def plain(steps, h, w, e):
    for step in steps:
        h = USES[step](h, w, e) if isinstance(step, str) else step.plain(h, w, e)
    return h


def steps_of(r: Random, depth: int, careless: bool, whole: bool) -> list:
    found: list = []
    for _ in range(r.choice([1, 1, 2, 2, 3])):
        kinds = ["use", "moved"] if whole else ["use", "moved"] * 3 + ["mask", "loop"]
        kind = r.choice(kinds) if depth else "use"
        if kind == "use":
            found.append(r.choice(list(USES)))
        elif kind == "moved":
            left = tuple(name for name in "xik" if careless and r.random() < 0.2)
            order, go, back = (r.choice(list(of)) for of in (ORDERS, GO, BACK))
            found.append(Moved(order, go, back, steps_of(r, depth - 1, careless, whole), left, r.random() < 0.1))
        elif kind == "mask":
            found.append(ByMask((steps_of(r, depth - 1, careless, whole), steps_of(r, depth - 1, careless, whole))))
        else:
            found.append(InOrder(steps_of(r, depth - 1, careless, whole), r.choice(list(ORDERS)), r.random() < 0.5))
    return found


def program(r: Random, careless: bool = False, whole: bool = False) -> tuple[Callable, Callable]:
    """A model function of `(w, x, i, k)` that moves its samples, and the same without moves. `careless` programs
    may leave some data where they were; what comes out is then no function of the samples, one by one. In `whole` ones
    each step is of all samples."""
    steps = steps_of(r, 2, careless, whole)

    def called(follow: Callable) -> Callable:
        def model(w, x, i, k):
            return follow(steps, x, w, {"x": x, "i": i, "k": k})

        model.steps = steps
        return model

    return called(run), called(plain)


def arguments(r: Random) -> tuple[torch.Tensor, ...]:
    n, seed = r.choice([1, 2, 3, 3, 4, 5]), r.randrange(1000)
    g = torch.Generator().manual_seed(seed)
    w, x = (torch.randn(size, D, generator=g, dtype=torch.float64) for size in (D, n))
    return w, x, torch.randint(D, (n,), generator=g), torch.randn(n, generator=g, dtype=torch.float64)
