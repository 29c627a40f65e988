"""Cases of layers with parameters: every option drawn, and what hypothesis draws first has most of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn

from tests.modules import of_module
from tests.strategies import Case, Numbers

BATCH, STEPS, WIDTH = (st.sampled_from(sizes) for sizes in ([3, 1, 2], [2, 3, 1], [2, 1, 3]))
YES = st.sampled_from([True, False])
DIMENSIONS = st.sampled_from([2, 1, 3])


class Called(nn.Module):
    """`call(module, *inputs, **constants)`: what is done with a module that is not just called."""

    def __init__(self, module: nn.Module, call: Callable, **constants: torch.Tensor | None):
        super().__init__()
        self.module, self.call, self.names = module, call, list(constants)
        for name, constant in constants.items():
            self.register_buffer(name, constant)

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        return self.call(self.module, *xs, **{name: getattr(self, name) for name in self.names})


def case(module: nn.Module, *inputs: torch.Tensor, dims: int | tuple[int | None, ...] = 0, at: int = 0) -> Case:
    """A module with samples along axis `at` of its output and `dims` of its inputs."""
    found = of_module(str(module), module, *inputs, at=at)
    return replace(found, in_dims=(dims,) * len(inputs) if isinstance(dims, int) else dims)


@st.composite
def values(draw, rand: Numbers, *shape: int) -> torch.Tensor:
    """Numbers, with or without exact zeros and repeated entries."""
    return draw(st.sampled_from([torch.round, F.relu, torch.clone]))(rand(*shape))


def sides(draw, count: int | None = None) -> list[int]:
    """The sizes of further dimensions, of any number of them or of `count`."""
    if count is None:
        return draw(st.sampled_from([[3], [2, 2], [], [1]]))
    return draw(st.lists(STEPS, min_size=count, max_size=count))


def _placed(n: int, others: list[int], at: int) -> list[int]:
    return [*others[:at], n, *others[at:]]


# Layers that are linear in their parameters


@st.composite
def linears(draw) -> Case:
    rand, more, width = Numbers(), sides(draw), draw(WIDTH)
    at = draw(st.integers(0, len(more)))
    x = draw(values(rand, *_placed(draw(BATCH), more, at), width))
    return case(nn.Linear(width, draw(WIDTH), bias=draw(YES)), x, dims=at, at=at)


@st.composite
def bilinears(draw) -> Case:
    rand, more, left, right = Numbers(), sides(draw), draw(WIDTH), draw(WIDTH)
    at = draw(st.integers(0, len(more)))
    shape = _placed(draw(BATCH), more, at)
    xs = draw(values(rand, *shape, left)), draw(values(rand, *shape, right))
    return case(nn.Bilinear(left, right, draw(WIDTH), bias=draw(YES)), *xs, dims=at, at=at)


@st.composite
def embeddings(draw) -> Case:
    rand, vocabulary, more = Numbers(), draw(st.integers(2, 4)), sides(draw)
    at = draw(st.integers(0, len(more)))
    tokens = rand.below(vocabulary, *_placed(draw(BATCH), more, at))
    padding = draw(st.sampled_from([-1, None, 0, 1]))
    return case(nn.Embedding(vocabulary, draw(WIDTH), padding_idx=padding), tokens, dims=at, at=at)


@st.composite
def bags(draw) -> Case:
    """Bags of tokens, also with weights that are data or are learned."""
    rand, vocabulary, shape = Numbers(), draw(st.integers(2, 4)), (draw(BATCH), draw(st.sampled_from([4, 2, 1])))
    mode, padding = draw(st.sampled_from(["sum", "mean", "max"])), draw(st.sampled_from([-1, None, 0]))
    bag = nn.EmbeddingBag(vocabulary, draw(WIDTH), mode=mode, padding_idx=padding)
    tokens, weights = rand.below(vocabulary, *shape), draw(values(rand, *shape))
    weighted = draw(st.sampled_from(["data", "learned", ""])) if mode == "sum" else ""
    if weighted == "learned":
        both = nn.ModuleList([bag, nn.Linear(shape[1], shape[1])])
        return case(Called(both, lambda m, i, x: m[0](i, per_sample_weights=m[1](x))), tokens, weights)
    if weighted:
        return case(Called(bag, lambda m, i, x: m(i, per_sample_weights=x)), tokens, weights)
    return case(bag, tokens)


# Norms and slopes


def _alive(norm: nn.Module, first: nn.Module) -> nn.Module:
    """With a layer before a norm that has no parameters."""
    return norm if list(norm.parameters()) else nn.Sequential(first, norm)


def _mixing(channels: int, d: int) -> nn.Module:
    """A layer that mixes channels, without a bias, which a norm may take away."""
    if not d:
        return nn.Linear(channels, channels, bias=False)
    return getattr(nn, f"Conv{d}d")(channels, channels, 1, bias=False)


@st.composite
def layer_norms(draw, kind: type[nn.Module]) -> Case:
    rand, more, shape = Numbers(), sides(draw), draw(st.sampled_from([[3], [2, 2], [1, 2]]))
    at = draw(st.integers(0, len(more)))
    options: dict[str, Any] = {"elementwise_affine": draw(YES), "eps": 0.1}
    if kind is nn.LayerNorm:
        options["bias"] = draw(YES)
    x = draw(values(rand, *_placed(draw(BATCH), more, at), *shape))
    return case(_alive(kind(shape, **options), nn.Linear(shape[-1], shape[-1])), x, dims=at, at=at)


@st.composite
def group_norms(draw) -> Case:
    rand, groups, per = Numbers(), draw(WIDTH), draw(st.integers(2, 3))
    spatial = draw(st.sampled_from([[2, 1], [3], []]))
    norm = nn.GroupNorm(groups, groups * per, eps=0.1, affine=draw(YES))
    first = _mixing(groups * per, len(spatial))
    return case(_alive(norm, first), draw(values(rand, draw(BATCH), groups * per, *spatial)))


@st.composite
def channel_norms(draw, called: str) -> Case:
    """InstanceNorm in both modes, BatchNorm in eval mode."""
    rand, d, channels, affine = Numbers(), draw(DIMENSIONS), draw(WIDTH), draw(YES)
    instance = called == "InstanceNorm"
    statistics = draw(YES) if instance else True
    spatial = [] if d == 1 and not instance and draw(YES) else [2, *sides(draw, d - 1)]
    norm = getattr(nn, f"{called}{d}d")(channels, affine=affine, track_running_stats=statistics, eps=0.1)
    norm = norm.train(not statistics and draw(YES))
    first = _mixing(channels, len(spatial))
    return case(_alive(norm, first), draw(values(rand, draw(BATCH), channels, *spatial)))


@st.composite
def prelus(draw) -> Case:
    rand, channels = Numbers(), draw(WIDTH)
    x = draw(values(rand, draw(BATCH), channels, *sides(draw)))
    return case(nn.PReLU(channels if draw(YES) else 1), x)


# Attention


def _padding(draw, rand: Numbers, n: int, steps: int) -> list[torch.Tensor]:
    """A mask of padded steps, or none; the first step stays."""
    return [(rand(n, steps) > 0.5) & (torch.arange(steps) > 0)] if draw(YES) else []


def _attended(draw, rand: Numbers, target: int, source: int) -> torch.Tensor | None:
    """A mask for all samples: causal, numbers to add, or none."""
    causal = torch.ones(target, source, dtype=torch.bool).triu(1)
    return draw(st.sampled_from([causal, rand(target, source), None]))


@st.composite
def attentions(draw) -> Case:
    rand, n, target, source = Numbers(), draw(BATCH), draw(STEPS), draw(STEPS)
    heads, first, itself = draw(st.sampled_from([2, 1])), draw(YES), draw(YES)
    width, at = 2 * heads, 1 - first
    sizes = {} if itself else {"kdim": draw(st.sampled_from([None, 1, 3])), "vdim": draw(st.sampled_from([None, 3, 1]))}
    options = {name: draw(YES) for name in ("bias", "add_bias_kv", "add_zero_attn")}
    module = nn.MultiheadAttention(width, heads, batch_first=first, **sizes, **options)
    source = target if itself else source
    given = [draw(values(rand, *_placed(n, [target], at), width))]
    if not itself:
        given += [draw(values(rand, *_placed(n, [source], at), size or width)) for size in sizes.values()]
    padding, count = _padding(draw, rand, n, source), len(given)
    weights, average, returned = draw(YES), draw(YES), draw(st.integers(0, 1))

    def call(module: nn.Module, *xs: torch.Tensor, attn_mask: torch.Tensor | None) -> torch.Tensor:
        options = {"attn_mask": attn_mask, "need_weights": weights, "average_attn_weights": average}
        data = xs[:1] * 3 if itself else xs[:count]
        found = module(*data, key_padding_mask=xs[count] if padding else None, **options)
        return found[returned] if returned and weights else found[0].movedim(at, 0)

    whole = Called(module, call, attn_mask=_attended(draw, rand, target, source))
    return case(whole, *given, *padding, dims=(at,) * count + (0,) * len(padding))


@st.composite
def transformer_layers(draw, kind: type[nn.Module]) -> Case:
    """An encoder layer, or a decoder layer with its memory."""
    rand, n, target, source, first = Numbers(), draw(BATCH), draw(STEPS), draw(STEPS), draw(YES)
    options = {"batch_first": first, "norm_first": draw(YES), "bias": draw(YES), "layer_norm_eps": 0.1}
    options |= {"activation": draw(st.sampled_from(["gelu", "relu", F.silu])), "dropout": 0.0}
    layer, at = kind(2, draw(st.sampled_from([2, 1])), draw(WIDTH), **options).train(draw(YES)), 1 - first
    given = [draw(values(rand, *_placed(n, [target], at), 2))]
    masks = {"src_mask" if kind is nn.TransformerEncoderLayer else "tgt_mask": _attended(draw, rand, target, target)}
    if kind is nn.TransformerDecoderLayer:
        given.append(draw(values(rand, *_placed(n, [source], at), 2)))
        masks["memory_mask"] = _attended(draw, rand, target, source)
    name = {"src_mask": "src_key_padding_mask", "tgt_mask": "memory_key_padding_mask"}[next(iter(masks))]
    padding, count = _padding(draw, rand, n, given[-1].shape[first]), len(given)

    def call(layer: nn.Module, *xs: torch.Tensor, **masks: torch.Tensor | None) -> torch.Tensor:
        return layer(*xs[:count], **masks, **({name: xs[count]} if padding else {}))

    return case(Called(layer, call, **masks), *given, *padding, dims=(at,) * count + (0,) * len(padding), at=at)


# Recurrences


@st.composite
def recurrences(draw, kind: type[nn.RNNBase]) -> Case:
    """Layers in one direction or both, from given states or zeros, to the outputs, the last states, or both."""
    rand, n, steps, width, hidden = Numbers(), draw(BATCH), draw(STEPS), draw(WIDTH), draw(st.integers(2, 3))
    layers, first = draw(st.sampled_from([2, 1])), draw(YES)
    options: dict[str, Any] = {"batch_first": first, "bias": draw(YES), "bidirectional": draw(YES)}
    if kind is nn.RNN:
        options["nonlinearity"] = draw(st.sampled_from(["tanh", "relu"]))
    if kind is nn.LSTM:
        options["proj_size"] = draw(st.sampled_from([0, 1]))
    module, at, count = kind(width, hidden, layers, **options), 1 - first, layers * (1 + options["bidirectional"])
    sizes = [options.get("proj_size") or hidden] + [hidden] * (kind is nn.LSTM)
    states = [draw(values(rand, count, n, size)) for size in sizes] if draw(YES) else []
    wanted = draw(st.sampled_from([(0, 1), (0,), (1,)]))

    def call(module: nn.Module, x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        output, last = module(x, states if len(states) > 1 else next(iter(states), None))
        parts = [[output.movedim(at, 0)], [h.transpose(0, 1) for h in (last if isinstance(last, tuple) else [last])]]
        return torch.cat([part.flatten(1) for i in wanted for part in parts[i]], 1)

    x = draw(values(rand, *_placed(n, [steps], at), width))
    return case(Called(module, call), x, *states, dims=(at,) + (1,) * len(states))


@st.composite
def cells(draw, kind: type[nn.RNNCellBase]) -> Case:
    """A cell that is called at each step."""
    rand, n, steps, width, hidden = Numbers(), draw(BATCH), draw(STEPS), draw(WIDTH), draw(WIDTH)
    options = {"nonlinearity": draw(st.sampled_from(["tanh", "relu"]))} if kind is nn.RNNCell else {}
    module = kind(width, hidden, bias=draw(YES), **options)
    states = [draw(values(rand, n, hidden)) for _ in range(1 + (kind is nn.LSTMCell))] if draw(YES) else []

    def call(module: nn.Module, x: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        state: Any = states if len(states) > 1 else next(iter(states), None)
        for step in x.unbind(1):
            state = module(step, state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    return case(Called(module, call), draw(values(rand, n, steps, width)), *states)
