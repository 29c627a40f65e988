"""Memory of calls within a budget, in a process that has imported nothing else.

python -m tests.budget.first_call STATISTIC MEMORY

Without a statistic: the memory of chunks of samples without a budget.
"""

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

import invfunc
from invfunc.testing import peak_memory, return_freed_memory


def of_images():
    """A diagonal with arguments of which it takes some ten MiB."""
    net = nn.Sequential(nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(1152, 10))
    f, params = invfunc.functional(net)
    return invfunc.diag_ggn(f, F.cross_entropy), (params, torch.rand(24, 3, 28, 28), torch.randint(10, (24,)))


def of_sentences():
    """Drawn Kronecker factors with arguments of which they take some ten MiB."""
    encoder = nn.TransformerEncoderLayer(64, 2, dim_feedforward=256, dropout=0.0, batch_first=True)
    words, params = invfunc.functional(nn.Sequential(encoder, nn.Linear(64, 5)))
    t = invfunc.kfac(lambda p, x: words(p, x).mean(1), F.cross_entropy, generator=torch.Generator())
    return t, (params, torch.randn(16, 32, 64), torch.randint(5, (16,)))


STATISTICS = {"diag_ggn of images": of_images, "kfac of sentences": of_sentences}


def main(name: str, memory: str) -> None:
    """Print the peaks of two calls that come after the first, what they need, and how they are divided."""
    return_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    t, args = STATISTICS[name]()
    within = invfunc.chunked(t, memory=memory)
    within(*args)
    peaks = [peak_memory(lambda: within(*args) and None)[1] for _ in range(2)]
    (found,) = within.choices.values()
    print(json.dumps([*peaks, found.need, invfunc.explain(within)(*args).why]))


N = 128
PHYSICAL = {
    "squares": invfunc.sum_grad_squared,
    "norms": invfunc.batch_l2_grad,
    "clipping": lambda f: invfunc.clipped_grad(f, 0.1),
    "variance": invfunc.variance,
    "rows": invfunc.batch_grad,
}


def of_chunks() -> None:
    """Print the peaks of a small CNN with 128 images in 16 chunks, in MiB; "whole" is that of no chunks."""
    return_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 48, 3, padding=1), nn.Conv2d(48, 64, 3, padding=1)
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    f, params = invfunc.functional(
        nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), *pooled, nn.Linear(64, 10))
    )
    x, y = torch.rand(N, 3, 28, 28), torch.randint(10, (N,))
    found = {"result of rows": N * sum(p.nbytes for p in params.values()) / 2**20}

    def losses(params, x, y):
        return F.cross_entropy(f(params, x), y, reduction="none")

    def measured(name, t, *args):
        t(*args)
        found[name] = peak_memory(lambda: t(*args))[1] / 2**20

    measured("whole", invfunc.variance(losses), params, x, y)
    for name, make in PHYSICAL.items():
        measured(name, invfunc.chunked(make(losses), 16), params, x, y)
    measured("mean", invfunc.chunked(invfunc.variance(lambda *args: losses(*args).mean()), 16), params, x, y)
    loader = [(x[:64], y[:64]), (x[64:], y[64:])]
    measured("streamed", invfunc.streamed(invfunc.chunked(invfunc.variance(losses), 8)), params, loader)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else of_chunks()
