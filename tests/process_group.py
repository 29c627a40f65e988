"""A process group of one process."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


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
