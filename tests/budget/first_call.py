"""What calls within a budget take in a process that has imported nothing else.

python -m tests.budget.first_call STATISTIC MEMORY
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
    """Print the peaks of three calls, what was predicted of the later ones, and how they are divided."""
    return_freed_memory()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    t, args = STATISTICS[name]()
    within = invfunc.chunked(t, memory=memory)
    peaks = [peak_memory(lambda: within(*args) and None)[1] for _ in range(3)]
    found = within.fitting(args, {}, within.names(3))
    print(json.dumps([*peaks, found.promised, invfunc.explain(within)(*args).why]))


if __name__ == "__main__":
    main(*sys.argv[1:])
