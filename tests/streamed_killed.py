"""A process that is killed while it goes through a data set: `python -m tests.streamed_killed FOLDER`."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import invfunc
from invfunc import tree
from invfunc.kronecker import Origin

BATCHES = 12
SECONDS = 1e-3
"""For which a batch is waited."""


def linear(params, x):
    return x @ params["w"]


def one_sweep():
    generator = torch.Generator().manual_seed(5)
    return invfunc.together(
        invfunc.variance(losses),
        invfunc.batch_l2_grad(losses),
        invfunc.diag_ggn(losses, mc_samples=2, generator=generator),
    )


def two_sweeps():
    return invfunc.together(
        invfunc.batch_l2_grad(losses), invfunc.ekfac(losses, generator=torch.Generator().manual_seed(5))
    )


def product():
    """Of a mean, which is found out at the first batch."""
    return invfunc.ggnvp(linear, F.cross_entropy)


CASES = {"one_sweep": (one_sweep, 30), "two_sweeps": (two_sweeps, 12), "product": (product, 8)}
"""With how often each is killed."""


def losses(params, x, y):
    return F.cross_entropy(linear(params, x), y, reduction="none")


def data(seconds=0.0):
    generator = torch.Generator().manual_seed(3)
    params = {"w": torch.randn(4, 3, generator=generator, dtype=torch.float64)}

    def loader():
        g = torch.Generator().manual_seed(4)
        for size in [1 + k % 3 for k in range(BATCHES)]:
            time.sleep(seconds)
            yield torch.randn(size, 4, generator=g, dtype=torch.float64), torch.randint(3, (size,), generator=g)

    return params, loader


def computed(case: str, seconds: float = 0.0, **options):
    params, loader = data(seconds)
    v = [params] if case == "product" else []
    return invfunc.streamed(CASES[case][0](), **options)(params, *v, loader)


def run(case: str, where: Path) -> None:
    """Go on with the checkpoint in a folder, and write the result beside it."""
    found = computed(case, SECONDS, checkpoint=where / "state", every=0)
    torch.save(found, where / "result.part")
    (where / "result.part").replace(where / "result")


def main(case: str, where: Path) -> None:
    """Kill a process so many times at random moments, begin it anew, and compare each result that it brings."""
    torch.set_num_threads(1)
    wanted, rng, kills, done = computed(case), random.Random(0), CASES[case][1], 0
    start = time.monotonic()
    run(case, where)
    whole = most = time.monotonic() - start
    (where / "result").unlink()
    while kills:
        child = os.fork()  # torch is imported once
        if not child:
            run(case, where)
            os._exit(0)
        end, over = time.monotonic() + rng.uniform(0, most), 0
        while not over and time.monotonic() < end:
            time.sleep(SECONDS)
            over = os.waitpid(child, os.WNOHANG)[0]
        if not over:
            kills, most = kills - 1, 1.2 * most  # a machine that became slower needs longer
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        if (where / "result").exists():
            with torch.serialization.safe_globals([invfunc.kronecker.Kronecker, Origin]):
                found = torch.load(where / "result")
            pairs = zip(tree.tensors(found), tree.tensors(wanted), strict=True)
            assert all(torch.equal(x, y) for x, y in pairs) and not (where / "state").exists()
            (where / "result").unlink()
            done, most = done + 1, whole
    sys.stdout.write(f"{done}\n")


if __name__ == "__main__":
    for called in CASES:
        folder = Path(sys.argv[1], called)
        folder.mkdir()
        main(called, folder)
