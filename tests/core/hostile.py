"""Programs in which samples mix, or parameters are read in ways that are hard to see: functions `f(p, x, y)`.

`p` has w `[4, 4]`, v `[4, 4]` and b `[4]`; x and y are `[N, 4]`. The result is `[N]`, or a number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from tests.strategies import Numbers

SIZES = 1, 4, 5
"""Numbers of samples: one, as many as there are features, and another one."""


def data(n: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """The arguments of all programs."""
    params = {"w": Numbers(0)(4, 4), "v": Numbers(1)(4, 4), "b": Numbers(2)(4)}
    return params, Numbers(3)(n, 4), Numbers(4)(n, 4)


def rows(z: torch.Tensor) -> torch.Tensor:
    """`[N]` losses of outputs."""
    return z.square().reshape(len(z), -1).sum(1)


class Mixing(torch.autograd.Function):
    """A function whose backward pass adds the samples up."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return z.clone()

    @staticmethod
    def backward(ctx: Any, *d: torch.Tensor) -> Any:
        return d[0].sum(0).expand(d[0].shape)


class Scaled(torch.autograd.Function):
    """A product with a weight, as a user writes it."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(z, w)
        return z * w

    @staticmethod
    def backward(ctx: Any, *d: torch.Tensor) -> Any:
        z, w = ctx.saved_tensors
        return d[0] * w, (d[0] * z).sum(0)


def written(p, x, y):
    z = x @ p["w"]
    z[0] = z[-1]
    return rows(z)


def shifted(p, x, y):
    z = x @ p["w"]
    out = torch.zeros_like(z)
    out[1:] = z[:-1]
    return rows(out + z)


def into_empty(p, x, y):
    z = x @ p["w"]
    out = torch.empty(len(x), 8, dtype=x.dtype)
    out[:, :4], out[:, 4:] = z, z.sin()
    return rows(out)


def into_a_view_mixed(p, x, y):
    z = x @ p["w"]
    out = z.clone()
    out[:1].copy_(z[-1:])
    return rows(out)


def into_a_transposed_view(p, x, y):
    z = x @ p["w"]
    out = torch.zeros(4, len(x), dtype=x.dtype)
    out.T.copy_(z)
    return rows(out.T)


def into_a_row(p, x, y):
    z = (x @ p["w"]).clone()
    z[0] += z[-1]
    return rows(z)


def a_row_in_place(p, x, y):
    z = (x @ p["w"]).clone()
    row = z[0]
    row.mul_(3)
    return rows(z)


def input_in_place(p, x, y):
    h = x.clone()
    z = h @ p["w"]
    h.mul_(2)
    return rows(z)


def input_by_a_view_in_place(p, x, y):
    h = x.clone()
    u = h.view(-1)
    z = h * p["b"]
    u.mul_(2)
    return rows(z) + rows(h @ p["w"])


def norm_input_in_place(p, x, y):
    h = x.clone()
    z = F.layer_norm(h, (4,), p["b"])
    h.mul_(torch.arange(4, dtype=x.dtype))
    return rows(z)


def index_in_place(p, x, y):
    i = (x[:, 0] > 0).long()
    z = F.embedding(i, p["w"])
    i.add_(1)
    return rows(z)


def mask_in_place(p, x, y):
    m = x > 0
    z = torch.where(m, p["b"], x)
    m.logical_not_()
    return rows(z)


def weight_in_place(p, x, y):
    w = p["w"].clone()
    z = x @ w
    with torch.no_grad():
        w.mul_(2)
    return rows(z) + rows((x @ w).sin())


def weight_by_no_grad(p, x, y):
    with torch.no_grad():
        scale = p["w"].norm()
    return rows(x @ (p["w"] / scale))


def inside_vjp(p, x, y):
    z, pull = vjp(lambda x: (x @ p["w"]).sin(), x)
    return rows(pull(y)[0])


def inside_gradient_of_w(p, x, y):
    """An inner step on the whole batch, as in meta-learning."""
    w = p["w"] - 0.1 * grad(lambda w: (x @ w - y).square().mean())(p["w"])
    return rows(x @ w - y)


def inside_autograd(p, x, y):
    h = x.clone().requires_grad_()
    (d,) = torch.autograd.grad((h @ p["w"]).cos().sum(), h, create_graph=True)
    return rows(d)


def inside_autograd_mixed(p, x, y):
    h = x.clone().requires_grad_()
    (d,) = torch.autograd.grad((h @ p["w"]).cos().sum(0).square().sum(), h, create_graph=True)
    return rows(d)


def inside_autograd_of_w(p, x, y):
    """A penalty of a gradient in the parameters themselves, of which a copy has none."""
    options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    (d,) = torch.autograd.grad((y @ p["w"]).cos().sum(), p["w"], **options)
    return rows(x @ (p["w"] + d))


def inside_autograd_of_w_for_each(p, x, y):
    options = {"create_graph": True, "materialize_grads": True}
    each = [torch.autograd.grad((r @ p["w"]).cos().sum(), p["w"], **options)[0] for r in y]
    return torch.stack([(r @ (p["w"] + d)).square().sum() for r, d in zip(x, each, strict=True)])


def ghost_batch_norm(p, x, y):
    """The samples as channels of one image."""
    z = (x @ p["w"]).view(1, -1, 4)
    return rows(F.group_norm(z, 1, None, None)[0])


def contrastive(p, x, y):
    a, b = F.normalize(x @ p["w"], dim=1), F.normalize(y @ p["v"], dim=1)
    return F.cross_entropy(a @ b.T, torch.arange(len(x)), reduction="none")


def contrastive_mean(p, x, y):
    a, b = F.normalize(x @ p["w"], dim=1), F.normalize(y @ p["v"], dim=1)
    return F.cross_entropy(a @ b.T, torch.arange(len(x)))


def reshaped_in(p, x, y):
    z = (x @ p["w"]).flatten()
    return rows(F.layer_norm(z, z.shape).view(-1, 4))


def expanded_weight(p, x, y):
    w = p["w"].expand(len(x), 4, 4)
    return rows(torch.bmm(w, x[..., None])[..., 0])


def tiled_weight(p, x, y):
    b = p["b"].repeat(len(x)).view(len(x), 4)
    return rows(x * b)


def stacked_weight(p, x, y):
    w = torch.stack([p["b"] * (i + 1) for i in range(len(x))])
    return rows(x * w)


def expanded_row(p, x, y):
    b = p["b"][None].expand(len(x), -1)
    return rows((x + b.roll(1, 0)) * (1 + b.cumsum(0)))


def weight_of_the_data(p, x, y):
    """Fast weights, of the whole batch."""
    w = x.T @ y / len(x)
    return rows(x @ (p["w"] + w))


def loops_mixed(p, x, y):
    h, out = torch.zeros(4, dtype=x.dtype), []
    for r in x:
        h = torch.tanh(r @ p["w"] + h)
        out.append(h.sum())
    return torch.stack(out)


def loop_sum(p, x, y):
    total = torch.zeros((), dtype=x.dtype)
    for r in x @ p["w"]:
        total = total + r.square().sum()
    return total


def scatter(p, x, y):
    z = x @ p["w"]
    i = torch.zeros(len(x), 4, dtype=torch.long)
    return rows(torch.zeros_like(z).scatter_add(0, i, z))


def scatter_features(p, x, y):
    z = x @ p["w"]
    i = (x > 0).long()
    return rows(torch.zeros_like(z).scatter_add(1, i, z))


def masked_entries(p, x, y):
    z = (x @ p["w"]).clone()
    z[z > 0] *= 2
    return rows(z)


def selected(p, x, y):
    """Mean of those that are masked in, as of tokens without padding."""
    z = rows(x @ p["w"])
    return z[x[:, 0] > 0].sum()


def selected_mean(p, x, y):
    z = rows(x @ p["w"])
    return z[x[:, 0] > 0].mean() if (x[:, 0] > 0).any() else z.sum()


def weighted_mean(p, x, y):
    z, w = rows(x @ p["w"]), y[:, 0].square()
    return (z * w).sum() / w.sum()


def checkpointed(reentrant):
    def f(p, x, y):
        return rows(checkpoint(lambda w, x: (x @ w).sin() + p["b"], p["w"], x, use_reentrant=reentrant))

    return f


def hidden_weight(p, x, y):
    holder = [p["w"]]
    return rows(x @ holder[0].view(4, 2, 2).flatten(1)) + rows(torch.cat([x, y], 0) @ p["v"])[: len(x)]


def both_views(p, x, y):
    """SimCLR: two views of a sample, one behind the other."""
    z = torch.cat([x, y], 0) @ p["w"]
    a, b = z.chunk(2)
    return (a * b).sum(1)


def interleaved(p, x, y):
    z = torch.stack([x, y], 1).flatten(0, 1) @ p["w"]
    return (z[::2] * z[1::2]).sum(1)


def folded(p, x, y):
    """Heads in the dim of the samples."""
    z = (x @ p["w"]).view(-1, 2, 2).transpose(0, 1).reshape(-1, 2)
    return rows(F.softmax(z, 1).view(2, -1, 2).transpose(0, 1).reshape(-1, 4))


def folded_mixed(p, x, y):
    z = (x @ p["w"]).view(-1, 2, 2).transpose(0, 1).reshape(-1, 2)
    return rows(z.reshape(-1, 4))


def attention_between(p, x, y):
    z = (x @ p["w"])[None]
    return rows(F.scaled_dot_product_attention(z, z, z)[0])


def convolution_between(p, x, y):
    z = (x @ p["w"]).T[None]
    return rows(F.conv1d(z, p["v"][:, :, None].expand(4, 4, 3), padding=1)[0].T)


def pooling_between(p, x, y):
    z = (x @ p["w"]).T[None]
    return rows(F.max_pool1d(z, 3, 1, 1)[0].T)


def lstm_over_the_samples(p, x, y):
    z = (x @ p["w"])[:, None]
    w = [p["w"].repeat(4, 1), p["v"].repeat(4, 1), p["b"].repeat(4), p["b"].repeat(4)]
    h = torch.zeros(1, 1, 4, dtype=x.dtype)
    return rows(torch.lstm(z, (h, h), w, True, 1, 0.0, False, False, False)[0][:, 0])


def unused_batch_norm(p, x, y):
    z = x @ p["w"]
    F.batch_norm(z, None, None, training=True)
    return rows(z)


def rank(p, x, y):
    z = (x @ p["w"])[:, 0]
    return z * z.argsort().to(z)


def as_strided(p, x, y):
    z = (x @ p["w"]).contiguous()
    return rows(z.as_strided(z.shape, (1, len(x))))


def resized(p, x, y):
    z = (x @ p["w"]).clone()
    return rows(z.view(4, -1).T.contiguous())


def complex_(p, x, y):
    z = torch.fft.fft(x @ p["w"], dim=1)
    return z.abs().square().sum(1)


def solved(p, x, y):
    a = p["w"] @ p["w"].T + torch.eye(4, dtype=x.dtype)
    return rows(torch.linalg.solve(a, x.T).T)


def out_argument(p, x, y):
    z = x @ p["w"]
    with torch.no_grad():
        out = torch.empty_like(x)
        torch.mul(x, 2, out=out)
    return rows(z * out)


def swapped_names(p, x, y):
    z = torch.sum(input=x @ p["w"], dim=0)
    return (z * x).sum(1)


def cached_in_place(p, x, y):
    """A cache of keys that is filled step by step, sample by sample."""
    cache = torch.zeros(len(x), 4, dtype=x.dtype)
    for i in range(len(x)):
        cache[i] = x[i] @ p["w"]
    return rows(cache)


def state_of_one(p, x, y):
    """A state of the first sample that all others get."""
    state = torch.zeros(len(x), 4, dtype=x.dtype)
    state += (x @ p["w"])[0]
    return rows(state * x)


def new_from_sum(p, x, y):
    state = torch.zeros(4, dtype=x.dtype)
    state += (x @ p["w"]).sum(0)
    return rows(state * x)


def filled_other_axis(p, x, y):
    z = x @ p["w"]
    h = torch.zeros(4, len(x), dtype=x.dtype)
    return rows(z + (h + z.T).T)


def filled_written(p, x, y):
    z = x @ p["w"]
    h = torch.zeros(len(x), len(x), dtype=x.dtype)
    h += z.sum(1)
    return rows(h)


def view_and_then_its_base(p, x, y):
    z = (x @ p["w"]).clone()
    u = z[:, :2]
    z[0] = z[-1]
    return rows(u)


def view_and_then_its_base_in_place(p, x, y):
    z = (x @ p["w"]).clone()
    u = z[:, :2]
    z -= z.mean(0)
    return rows(u)


def filled_and_viewed(p, x, y):
    h = torch.zeros(len(x), 4, dtype=x.dtype)
    u = h.T
    h += x @ p["w"]
    return rows(h * u) if len(x) == 4 else rows(h) + u.sum(0)


def filled_and_sliced(p, x, y):
    h = torch.zeros(len(x), 4, dtype=x.dtype)
    u = h[0]
    h += x @ p["w"]
    return rows(h * u)


def written_into_a_parameter(p, x, y):
    w = p["w"].clone()
    if len(x) != 4:
        return rows(x)
    w.add_(x @ p["v"])
    return rows(w)


def written_into_what_is_of_parameters(p, x, y):
    w = p["w"] * 1
    w[: len(x)] += (x @ p["v"])[: len(w)]
    return rows(x @ w)


def a_step_in_place(p, x, y):
    w = p["w"] * 1
    for _ in range(2):
        w -= 0.1 * x.T @ (x @ w - y)
    return rows(x @ w - y)


def views_of_parameters_in_place(p, x, y):
    w = p["w"] * 1
    row = w[0]
    row *= 2
    return rows(x @ w)


def swapped_features_in_place(p, x, y):
    z = (x @ p["w"]).clone()
    z[:, [0, 1]] = z[:, [1, 0]]
    return rows(z * y)


def swapped_samples_in_place(p, x, y):
    z = (x @ p["w"]).clone()
    z[[0, -1]] = z[[-1, 0]]
    return rows(z * y)


class Sums(torch.autograd.Function):
    """The same mixing function in the form that torch.func takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(z: torch.Tensor) -> torch.Tensor:
        return z.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *d: torch.Tensor) -> Any:
        return d[0].sum(0).expand(d[0].shape)


class Adds(torch.autograd.Function):
    """A sum in place, written by hand."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(z)
        return z.add_(b)

    @staticmethod
    def backward(ctx: Any, *d: torch.Tensor) -> Any:
        return d[0], d[0].sum(0)


def added_in_place(p, x, y):
    z = (x @ p["w"]).clone()
    Adds.apply(z, p["b"])
    return rows(z) + rows(x * p["b"])


def hook_that_mixes(p, x, y):
    z = x @ p["w"]
    if z.requires_grad:
        z.register_hook(lambda d: d + d.sum(0))
    return rows(z)


def hook_that_clips(p, x, y):
    z = x @ p["w"]
    if z.requires_grad:
        z.register_hook(lambda d: d.clamp(-1, 1))
    return rows(z)


def samples_as_channels_of_a_weight(p, x, y):
    w = p["w"].flatten()[None, : len(x)].expand(len(x), len(x))[..., None]
    return rows(F.conv1d(x, w))


def samples_to_pixels(p, x, y):
    z = (x @ p["w"])[:, :, None]
    return rows(F.pixel_shuffle(z[:4], 2)[0]).repeat(4)[: len(x)] if len(x) == 4 else rows(z)


def in_place_shape(p, x, y):
    z = (x @ p["w"]).clone()
    z.unsqueeze_(-1)
    return rows(z.softmax(-2))


def in_place_shape_mixed(p, x, y):
    z = (x @ p["w"]).clone()
    z.unsqueeze_(-1)
    return rows(z.softmax(0))


def in_place_transpose(p, x, y):
    z = (x @ p["w"]).clone()
    z.t_()
    return rows(z.softmax(0).T)


def deviations_by_place(p, x, y):
    z = (x @ p["w"]).view(-1, 2, 2)
    return torch.std(z, 1, False, True).flatten(1).sum(1) + torch.std(z, 2, False).sum(1)


def adversarial(p, x, y):
    h = x.detach().clone().requires_grad_()
    (d,) = torch.autograd.grad(rows(h @ p["w"].detach()).sum(), h)
    return rows((x + 0.1 * d.sign()) @ p["w"])


def adversarial_of_samples(p, x, y):
    h = x.detach().clone().requires_grad_()
    (d,) = torch.autograd.grad(rows(h @ p["w"].detach()).sum(), h)
    return rows(x @ p["w"] + (d @ p["v"]).flip(0))


def solved_by_a_constant(p, x, y):
    """First a matrix that mixes nothing, then one of the same shape that does."""
    n = len(x)
    z = x @ p["w"]
    first = torch.linalg.solve(torch.eye(n, dtype=x.dtype), z)
    return rows(first + torch.linalg.solve(torch.ones(n, n, dtype=x.dtype) + torch.eye(n, dtype=x.dtype), z))


def picked_by_a_constant_mask(p, x, y):
    z, m, k = x @ p["w"], torch.zeros(len(x), 4, dtype=torch.bool), torch.zeros(len(x), 4, dtype=torch.bool)
    m[:, 0] = True
    if len(x) != 4:
        return torch.masked_select(z, m).square()
    k[0] = True
    return torch.masked_select(z, m).square() + torch.masked_select(z, k).square()


def sparse_adjacency(p, x, y):
    n = len(x)
    own = torch.eye(n, dtype=x.dtype).to_sparse()
    all_ = torch.ones(n, n, dtype=x.dtype).to_sparse()
    z = x @ p["w"]
    return rows(torch.sparse.mm(own, z) + torch.sparse.mm(all_, z))


def picked_by_a_tuple(p, x, y):
    z = (x @ p["w"]).T.contiguous()
    return rows(z[(0, 1, 2, 3),].T) + z[:, None][(0, 1),].sum((0, 1))


def momentum(p, x, y):
    """An average over the batch that is kept and subtracted, as of targets that are centred."""
    with torch.no_grad():
        centre = (x @ p["w"]).mean(0)
    return rows(x @ p["w"] - centre)


WRITES: dict[str, Any] = {
    "a_column_in_place": lambda z, p, x, y: z[:, 0].mul_(3),
    "index_put": lambda z, p, x, y: z.__setitem__(torch.tensor([0]), z[torch.tensor([-1])]),
    "masked_rows": lambda z, p, x, y: z.__setitem__(x[:, 0] > 0, 0),
    "in_place_sum": lambda z, p, x, y: z.__isub__(z.mean(0, keepdim=True)),
    "index_fill": lambda z, p, x, y: z.index_fill_(1, torch.tensor([0]), p["b"].sum()),
    "index_add_of_parameters": lambda z, p, x, y: z.index_add_(1, torch.tensor([0]), p["b"][:1].expand(len(x), 1)),
    "scatter_of_parameters": lambda z, p, x, y: z.scatter_add_(1, (x > 0).long(), p["b"].expand(len(x), 4)),
    "addmm_in_place": lambda z, p, x, y: z.addmm_(x, p["v"]),
}
"""Writes into a copy of the outputs in place, of which the loss is."""
OF_OUTPUTS: dict[str, Any] = {
    "batch_norm_by_hand": lambda z, p, x, y: rows((z - z.mean(0)) / (z.var(0, correction=0) + 1).sqrt()),
    "two_axes": lambda z, p, x, y: z.T.reshape(-1)[: len(x)].square() + rows(z),
    # Features as if they were samples, where their numbers are equal
    "transposed_sum": lambda z, p, x, y: (z + z.T).square().sum(1) if len(x) == 4 else rows(z),
    "sums_of_different_things": lambda z, p, x, y: z.square().sum() / z.shape[0] + z.sum(0).square().sum(),
    "index_add": lambda z, p, x, y: rows(z.clone().index_add_(0, torch.zeros(len(x), dtype=torch.long), z)),
    "detached": lambda z, p, x, y: rows(z * z.detach().sigmoid()) + rows(z - z.detach().mean(0)),
    "detached_softmax": lambda z, p, x, y: rows(z * z.detach().softmax(0)),
    "fill_diagonal": lambda z, p, x, y: rows((z @ z.T).fill_diagonal_(0)),
    "triu": lambda z, p, x, y: rows(z.triu()),
    "mean_of_a_part": lambda z, p, x, y: (z[:, :2].mean() + z[:, 2:].sum()) / 2,
    "covariance": lambda z, p, x, y: torch.cov(z.T, correction=0).square().sum(),
    "solved_in_samples": lambda z, p, x, y: rows(torch.linalg.solve(z @ z.T + torch.eye(len(x), dtype=x.dtype), z)),
    "samples_as_channels": lambda z, p, x, y: rows(
        F.conv1d(z, torch.ones(len(x), len(x), 3, dtype=x.dtype), padding=1)
    ),
}
"""Functions of the outputs `z = x @ w`, and of the arguments."""


def of_outputs(f):
    return lambda p, x, y: f(x @ p["w"], p, x, y)


def after(write):
    def f(p, x, y):
        z = (x @ p["w"]).clone()
        write(z, p, x, y)
        return rows(z)

    return f


PROGRAMS: dict[str, Any] = {
    name: f
    for name, f in [*globals().items()]
    if callable(f)
    and getattr(f, "__module__", "") == __name__
    and isinstance(f, type(rows))
    and f.__code__.co_varnames[: f.__code__.co_argcount] == ("p", "x", "y")
}
PROGRAMS |= {name: of_outputs(f) for name, f in OF_OUTPUTS.items()}
PROGRAMS |= {name: after(write) for name, write in WRITES.items()}
PROGRAMS |= {
    "spectral": lambda p, x, y: rows(x @ (p["w"] / torch.linalg.matrix_norm(p["w"], 2))),
    "inside_grad": lambda p, x, y: vmap(grad(lambda r: (r @ p["w"]).cos().sum()))(x).sum(1),
    "inside_grad_of_sum": lambda p, x, y: rows(grad(lambda x: (x @ p["w"]).cos().sum())(x)),
    "inside_grad_mixed": lambda p, x, y: rows(grad(lambda x: (x @ p["w"]).sum(0).cos().sum())(x)),
    "inside_jvp": lambda p, x, y: rows(jvp(lambda x: (x @ p["w"]).sin(), (x,), (y,))[1]),
    "inside_jacobian": lambda p, x, y: vmap(jacrev(lambda r: (r @ p["w"]).sin()))(x).square().sum((1, 2)),
    "batch_norm": lambda p, x, y: rows(F.batch_norm(x @ p["w"], None, None, p["b"], None, training=True)),
    "distances": lambda p, x, y: torch.cdist(x @ p["w"], x @ p["w"]).sum(1),
    "features_are_returned": lambda p, x, y: (x @ p["w"]).square().sum(0)[: len(x)],
    # A parameter with an entry for each sample
    "weights_of_samples": lambda p, x, y: p["w"].reshape(-1)[: len(x)] * x.sum(1),
    "weights_of_samples_in_rows": lambda p, x, y: (
        rows(x[: len(p["w"])] * p["w"][: len(x)]) if len(x) <= 4 else rows(x * p["b"])
    ),
    "weight_of_a_sum": lambda p, x, y: rows(x @ p["w"]) * (x @ p["v"]).sum(),
    "data_and_sum": lambda p, x, y: (x - x.mean(0)).matmul(p["w"]).square().sum(1),
    "loops": lambda p, x, y: torch.stack([(r @ p["w"]).square().sum() for r in x]),
    "two_losses": lambda p, x, y: rows(x @ p["w"]).mean() + rows(y @ p["v"]).sum(),
    "mean_and_regulariser": lambda p, x, y: rows(x @ p["w"]).mean() + p["w"].square().sum(),
    "checkpointed_mixed": lambda p, x, y: rows(
        checkpoint(lambda w, x: (x @ w).softmax(0), p["w"], x, use_reentrant=False)
    ),
    # A leaf by another way: the storage of the parameter as a new tensor
    "closure_of_params": lambda p, x, y: rows(x @ p["w"]) + rows(x @ p["w"].data.sin()),
    "flip": lambda p, x, y: rows((x @ p["w"]).flip(0) * y),
    "mixup": lambda p, x, y: rows((0.5 * x + 0.5 * x.roll(1, 0)) @ p["w"]),
    "kron": lambda p, x, y: rows(torch.kron(x, p["b"][None])),
    "outer_products": lambda p, x, y: torch.einsum("ni,mj,ij->n", x, y, p["w"]),
    "einsum_of_samples": lambda p, x, y: torch.einsum("ni,nj,ij->n", x, y, p["w"]),
    "bilinear": lambda p, x, y: rows(F.bilinear(x, y, p["w"][None])),
    "quadratic_in_w": lambda p, x, y: rows(x @ p["w"] @ p["w"].T),
    "diagonal": lambda p, x, y: (x @ p["w"] @ x.T).diagonal(),
    "trace": lambda p, x, y: (x @ p["w"] @ x.T).trace(),
    "number_of_samples": lambda p, x, y: rows(x @ p["w"]).sum() / len(x),
    "chunks_of_samples": lambda p, x, y: torch.cat([rows(c @ p["w"]) for c in x.split(2)]),
    "chunks_of_samples_mixed": lambda p, x, y: torch.cat([rows(c @ p["w"]) / c.sum() for c in x.split(2)]),
    "sum_of_chunks": lambda p, x, y: sum(rows(c @ p["w"]).sum() for c in x.split(2)),
    "first_only": lambda p, x, y: rows(x @ p["w"])[0],
    "last_row_for_all": lambda p, x, y: rows(x @ p["w"])[-1].expand(len(x)) * 1,
    "max_loss": lambda p, x, y: rows(x @ p["w"]).max(),
    "norm_of_all": lambda p, x, y: (x @ p["w"]).norm(),
    "logsumexp": lambda p, x, y: (x @ p["w"]).logsumexp((0, 1)),
    "product_of_losses": lambda p, x, y: rows(x @ p["w"]).prod(),
    # `[N, 1]` predictions against `[N]` targets: a well known mistake
    "mse_broadcast": lambda p, x, y: ((x @ p["w"][:, :1]) - y[:, 0]).square().mean(),
    "variance_of_all": lambda p, x, y: (x @ p["w"]).var(correction=0),
    "standardised_targets": lambda p, x, y: rows(x @ p["w"] - (y - y.mean()) / y.std(correction=0)),
    "pad_samples": lambda p, x, y: rows(F.pad(x @ p["w"], (0, 0, 1, 0))[:-1]),
    "pad_features": lambda p, x, y: rows(F.pad(x @ p["w"], (1, 0))),
    "unfold_samples": lambda p, x, y: (x @ p["w"]).unfold(0, 1, 1).square().sum((1, 2)),
    "fft_of_samples": lambda p, x, y: torch.fft.fft(x @ p["w"], dim=0).abs().square().sum(1),
    "addmm_of_one_parameter": lambda p, x, y: rows(torch.addmm(p["w"][0], x, p["w"])),
    "norm_of_one_parameter": lambda p, x, y: rows(F.layer_norm(x, (4,), p["b"], p["b"])),
    "loss over a sum of the data": lambda p, x, y: rows(x @ p["w"]) / x.sum(),
    "loss over the sum of outputs": lambda p, x, y: rows(x @ p["w"]) / (x @ p["w"]).sum(),
    "mean loss over a sum of the data": lambda p, x, y: rows(x @ p["w"]).sum() / x.abs().sum(),
    "sum over samples, keepdim": lambda p, x, y: rows(x @ p["w"] - (x @ p["w"]).mean(0, keepdim=True)),
    "cumsum": lambda p, x, y: rows((x @ p["w"]).cumsum(0)),
    "cummax": lambda p, x, y: rows((x @ p["w"]).cummax(0).values),
    "sort": lambda p, x, y: rows((x @ p["w"]).sort(0).values),
    "topk of samples": lambda p, x, y: (x @ p["w"]).topk(1, 0).values.sum(),
    "gather": lambda p, x, y: rows((x @ p["w"]).gather(0, torch.zeros(len(x), 4, dtype=torch.long))),
    "index_select": lambda p, x, y: rows((x @ p["w"]).index_select(0, torch.arange(len(x)).flip(0))),
    "take": lambda p, x, y: (x @ p["w"]).take(torch.arange(len(x))).square(),
    "masked_scatter": lambda p, x, y: rows((x @ p["w"]).masked_scatter(x > 0, y @ p["v"])),
    "softmax of samples": lambda p, x, y: rows((x @ p["w"]).softmax(0)),
    "normalize of samples": lambda p, x, y: rows(F.normalize(x @ p["w"], dim=0)),
    "custom backward that mixes": lambda p, x, y: rows(Mixing.apply(x @ p["w"]).sin()),
    "custom backward that mixes, for torch.func": lambda p, x, y: rows(Sums.apply(x @ p["w"]).sin()),
    "one_over_a_sum": lambda p, x, y: 1 / rows(x @ p["w"]).sum(),
    "two to the mean": lambda p, x, y: 2 ** rows(x @ p["w"]).mean(),
    "a constant minus a mean": lambda p, x, y: 3 - rows(x @ p["w"]).mean() / 2,
    "a regulariser with as many rows as samples": lambda p, x, y: (
        rows(x @ p["w"]).mean() + (p["w"] * torch.ones(4, 1).double()).square().sum()
    ),
    "reflected product": lambda p, x, y: rows(p["w"].__rmatmul__(x)),
    "custom function of a parameter": lambda p, x, y: rows(Scaled.apply(x @ p["w"], p["b"])),
    "custom function of a computed parameter": lambda p, x, y: rows(Scaled.apply(x, p["b"].sin())),
    "custom function of parameters alone": lambda p, x, y: rows(x @ Scaled.apply(p["w"], p["b"])),
    "checkpoint": checkpointed(False),
    "checkpoint, reentrant": checkpointed(True),
    "columns that repeat": lambda p, x, y: rows(x @ p["w"][:, [0, 0, 1]]),
    "roll of samples": lambda p, x, y: rows((x @ p["w"]).roll(1, 0) * y),
    "sum of both": lambda p, x, y: rows(x @ p["w"]) + (x @ p["w"]).sum(),
    "repeat_interleave": lambda p, x, y: rows((x @ p["w"]).repeat_interleave(2, 0).view(-1, 8)),
    "repeat": lambda p, x, y: rows((x @ p["w"]).repeat(2, 1)[: len(x)]),
    "reshape with features first": lambda p, x, y: rows((x @ p["w"]).reshape(4, -1).T),
    "matmul of samples": lambda p, x, y: rows((x @ p["w"]) @ (x @ p["w"]).T),
    "dot": lambda p, x, y: torch.dot((x @ p["w"]).flatten(), (y @ p["v"]).flatten()),
    "vdot of losses": lambda p, x, y: torch.dot(rows(x @ p["w"]), rows(y)),
    "square of a sum": lambda p, x, y: rows(x @ p["w"]).sum().square(),
    "root of a mean": lambda p, x, y: rows(x @ p["w"]).mean().sqrt(),
    "sum times a parameter": lambda p, x, y: rows(x @ p["w"]).sum() * p["b"].sum(),
    "sum of the data times a parameter": lambda p, x, y: (x.sum(0) @ p["w"]).sum(),
    "mean minus a regulariser": lambda p, x, y: rows(x @ p["w"]).mean() - 0.1 * p["b"].norm(),
    "weights of two tasks": lambda p, x, y: (
        torch.stack([rows(x @ p["w"]).mean(), rows(y @ p["v"]).mean()]) @ (-p["b"][:2]).exp() + p["b"].sum()
    ),
    "maximum with a sum": lambda p, x, y: torch.maximum(rows(x @ p["w"]), rows(x @ p["w"]).mean()),
    "where with a sum": lambda p, x, y: torch.where(x[:, 0] > 0, rows(x @ p["w"]), (x @ p["v"]).sum()),
    "kl of a batch": lambda p, x, y: F.kl_div((x @ p["w"]).log_softmax(1), y.softmax(1), reduction="batchmean"),
    "kl over samples": lambda p, x, y: F.kl_div((x @ p["w"]).log_softmax(0), y.softmax(0), reduction="sum"),
    "embedding with max_norm": lambda p, x, y: rows(F.embedding((x[:, 0] > 0).long(), p["w"] * 1, max_norm=0.1)),
    "embedding of the samples": lambda p, x, y: rows(F.embedding(torch.zeros(len(x), dtype=torch.long), x @ p["w"])),
    "class weights": lambda p, x, y: F.cross_entropy(
        x @ p["w"], y.argmax(1), weight=torch.arange(1, 5).double(), reduction="none"
    ),
    "class weights, mean": lambda p, x, y: F.cross_entropy(x @ p["w"], y.argmax(1), weight=torch.arange(1, 5).double()),
    "ignored targets, mean": lambda p, x, y: F.cross_entropy(x @ p["w"], torch.where(y[:, 3] < 1, y.argmax(1), -100)),
    "triplet": lambda p, x, y: F.triplet_margin_loss(x @ p["w"], y @ p["w"], x.roll(1, 0) @ p["w"]),
    "cosine of all": lambda p, x, y: F.cosine_similarity(x @ p["w"], y @ p["v"], dim=0).sum(),
    "cosine": lambda p, x, y: F.cosine_similarity(x @ p["w"], y @ p["v"], dim=1),
    "median": lambda p, x, y: rows(x @ p["w"] - (x @ p["w"]).median(0).values),
    "quantile": lambda p, x, y: rows(x @ p["w"] - (x @ p["w"]).quantile(0.5, 0)),
}
"""All programs by name."""

TERMS: dict[str, Callable] = {
    "norm_input_in_place": lambda p, x, y: rows(F.layer_norm(x, (4,), p["b"])),
    "trace": lambda p, x, y: ((x @ p["w"]) * x).sum(1),
    "sum of the data times a parameter": lambda p, x, y: (x @ p["w"]).sum(1),
    "loop_sum": lambda p, x, y: rows(x @ p["w"]),
    "two_losses": lambda p, x, y: rows(x @ p["w"]) / len(x) + rows(y @ p["v"]),
    "mean_and_regulariser": lambda p, x, y: (rows(x @ p["w"]) + p["w"].square().sum()) / len(x),
    "selected": lambda p, x, y: rows(x @ p["w"]) * (x[:, 0] > 0),
    "selected_mean": lambda p, x, y: rows(x @ p["w"]) * (x[:, 0] > 0) / (x[:, 0] > 0).sum(),
    "weighted_mean": lambda p, x, y: rows(x @ p["w"]) * y[:, 0].square() / y[:, 0].square().sum(),
    "number_of_samples": lambda p, x, y: rows(x @ p["w"]) / len(x),
    "sum_of_chunks": lambda p, x, y: rows(x @ p["w"]),
    "first_only": lambda p, x, y: rows(x @ p["w"]) * (torch.arange(len(x)) == 0),
    "mean_of_a_part": lambda p, x, y: (x @ p["w"])[:, :2].sum(1) / len(x) / 4 + (x @ p["w"])[:, 2:].sum(1) / 2,
    "mean loss over a sum of the data": lambda p, x, y: rows(x @ p["w"]) / x.abs().sum(),
    "topk of samples": lambda p, x, y: ((x @ p["w"]) * (x @ p["w"] == (x @ p["w"]).amax(0))).sum(1),
    "a constant minus a mean": lambda p, x, y: -rows(x @ p["w"]) / 2 / len(x),
    "a regulariser with as many rows as samples": lambda p, x, y: (rows(x @ p["w"]) + p["w"].square().sum()) / len(x),
    "dot": lambda p, x, y: ((x @ p["w"]) * (y @ p["v"])).sum(1),
    "vdot of losses": lambda p, x, y: rows(x @ p["w"]) * rows(y),
    "sum times a parameter": lambda p, x, y: rows(x @ p["w"]) * p["b"].sum(),
    "mean minus a regulariser": lambda p, x, y: (rows(x @ p["w"]) - 0.1 * p["b"].norm()) / len(x),
    "weights of two tasks": lambda p, x, y: (
        (rows(x @ p["w"]) * (-p["b"][0]).exp() + rows(y @ p["v"]) * (-p["b"][1]).exp() + p["b"].sum()) / len(x)
    ),
    "kl of a batch": lambda p, x, y: (
        F.kl_div((x @ p["w"]).log_softmax(1), y.softmax(1), reduction="none").sum(1) / len(x)
    ),
    "class weights, mean": lambda p, x, y: (
        F.cross_entropy(x @ p["w"], y.argmax(1), weight=torch.arange(1, 5).double(), reduction="none")
        / (y.argmax(1) + 1).sum()
    ),
    "ignored targets, mean": lambda p, x, y: (
        F.cross_entropy(x @ p["w"], torch.where(y[:, 3] < 1, y.argmax(1), -100), reduction="none") / (y[:, 3] < 1).sum()
    ),
}
"""The `[N]` terms of the programs that return a sum of such, or of which torch has no derivative.

Another number mixes the samples, if there are several.
"""
