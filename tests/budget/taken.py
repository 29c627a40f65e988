"""What operations take beside what is counted, each in a process of its own.

python -m tests.budget.taken
"""

import gc
import json
import os
from collections.abc import Callable

import torch

from invfunc.budget.footprint import footprint, warmed
from invfunc.testing import peak_memory, return_freed_memory

CONVOLUTIONS = [
    *((2, 16, 32, 3, 64, 1, 1, 1, False), (1, 3, 32, 3, 128, 1, 1, 1, False), (4, 32, 10, 3, 60, 1, 1, 1, False)),
    *((1, 16, 32, 5, 64, 1, 2, 1, False), (2, 128, 4, 3, 64, 1, 1, 2, False), (8, 48, 3, 3, 128, 2, 1, 1, False)),
    *((8, 3, 16, 3, 64, 1, 1, 1, False), (8, 3, 10, 5, 48, 1, 0, 1, False), (8, 1, 32, 7, 48, 1, 3, 1, False)),
    *((16, 32, 16, 1, 60, 1, 0, 1, False), (2, 10, 24, 1, 128, 1, 0, 1, False), (5, 10, 3, 3, 64, 1, 0, 1, True)),
]
"""Samples, channels, those of the result, size, side of the image, stride, padding, dilation, and if transposed."""
ORDERS = [(False, False), (False, True), (True, False), (True, True)]
"""Whether the image and the slope of a convolution of sequences have their channels side by side."""
OLDER = {"AVX2": "avx2", "SSE41": "default"}
"""CPUs whose kernels this one has, too, as oneDNN and as torch call them."""
ON_OLDER = [CONVOLUTIONS[3], CONVOLUTIONS[4], (32, 1, 32, 7, 48, 1, 3, 1, False)]
PRODUCTS = ((512, 512, 512), (64, 512, 8192), (4096, 256, 256), (4096, 512, 64), (8, 256, 64, 256))
OF_MATRICES = {name: getattr(torch.linalg, name) for name in ("svd", "pinv", "matrix_exp", "eigh")}
OF_MATRICES["kthvalue"] = lambda x: x.kthvalue(3)


def apart(work: Callable[[], None]) -> None:
    """Do it in a process of its own: what a library keeps of one shape is not there for the next."""
    if os.fork() == 0:
        work()
        os._exit(0)
    os.wait()


def told(kind: str, of: object, call: Callable, given: tuple, before: tuple = ()) -> None:
    """Print what a call takes after one with what was given before, or with the same, and what is counted."""
    counted = footprint(call, given, {}, []).counted

    def run() -> None:
        call(*(before or given))
        print(json.dumps([kind, of, peak_memory(lambda: call(*given))[1], counted]), flush=True)

    apart(run)


def of_convolutions(kind: str, cases: list) -> None:
    forward, backward = torch.convolution, torch.ops.aten.convolution_backward
    for case in cases:
        n, c, o, k, side, stride, padding, dilation, transposed = case
        options = None, [stride] * 2, [padding] * 2, [dilation] * 2, transposed, [0, 0], 1
        x, weight = torch.ones(n, c, side, side), torch.ones(*((c, o) if transposed else (o, c)), k, k)
        told(kind, case, lambda *t, o=options: forward(*t, *o), (x, weight))
        slope = torch.ones(forward(x.to("meta"), weight.to("meta"), *options).shape)
        for wanted in ([True, False, False], [False, True, False]):
            of = (*case, *wanted[:2])
            told(kind, of, lambda *t, o=options, w=wanted: backward(*t, *o, w), (slope, x, weight))


def of_orders() -> None:
    options = None, [1], [0], [1], False, [0], 1, [False, True, False]
    for of in ORDERS:
        x, slope = (torch.ones(16, 256, 64).mT if turned else torch.ones(16, 64, 256) for turned in of)
        weight = torch.ones(1).expand(64, 64, 1)
        told("order", of, lambda *t: torch.ops.aten.convolution_backward(*t, *options), (slope, x, weight))


def on_older(kernels: str) -> None:
    os.environ.update(ONEDNN_MAX_CPU_ISA=kernels, ATEN_CPU_CAPABILITY=OLDER[kernels])  # before the first operation
    of_convolutions("older", ON_OLDER)


def main() -> None:
    return_freed_memory()
    torch.set_num_threads(1)
    gc.freeze()  # what a look at garbage touches is copied in each process
    for kernels in OLDER:
        apart(lambda k=kernels: on_older(k))
    warmed()
    of_convolutions("convolution", CONVOLUTIONS)
    of_orders()
    for sizes in PRODUCTS:
        for dtype in (torch.float32, torch.float64):
            *batch, m, k, n = sizes
            x, y = torch.ones(*batch, m, k, dtype=dtype), torch.ones(*batch, k, n, dtype=dtype)
            told("product", (str(dtype), *sizes), torch.matmul, (x, y), before=(x[..., :64, :64], y[..., :64, :64]))
    for name, f in OF_MATRICES.items():
        for shape in ((512, 16, 16), (1, 384, 384)):
            x = torch.randn(*shape)
            told("matrix", (name, *shape), f, ((x + x.mT) / 50,))


if __name__ == "__main__":
    main()
