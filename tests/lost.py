"""Ways in which samples go where torch's function modes do not see them: each takes a batch `[N, 3]` to another."""

import copy
import io
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils.data import DataLoader, TensorDataset, default_collate

from tests.strategies import Numbers

LAYER = nn.Linear(3, 3).double().requires_grad_(False)
NET = nn.Sequential(LAYER, nn.Tanh())


class Subclass(torch.Tensor):
    pass


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.square()

    @staticmethod
    def backward(ctx, g):
        return g


@torch.library.custom_op("invfunc_tests::lost", mutates_args=())
def own_op(x: torch.Tensor) -> torch.Tensor:
    return x.square()


def saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def put(x):
    o = torch.empty(0, dtype=x.dtype)
    return o.set_(x)


def made_data(x):
    o = torch.zeros_like(x)
    o.data = x
    return o


@lru_cache
def remembered(rows):
    return torch.tensor(rows, dtype=torch.float64)


def differentiated(x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(x.pow(3).sum(), x)[0]


def backward(x):
    x = x.detach().clone().requires_grad_()
    x.pow(3).sum().backward()
    return x.grad


def in_a_thread(x):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.sin, x).result()


def rows_in_threads(x):
    with ThreadPoolExecutor(2) as pool:
        return torch.stack(list(pool.map(torch.sin, x)))


def numbers(read):
    return lambda x: torch.tensor([[float(read(v)) for v in row] for row in x], dtype=torch.float64)


def strange(x):
    return torch.vmap(torch.sin)(x)


with warnings.catch_warnings():  # TorchScript is deprecated
    warnings.simplefilter("ignore")
    SCRIPTED, TRACED = torch.jit.script(NET), torch.jit.trace(NET, Numbers()(2, 3))


FOUND = {
    "script": SCRIPTED,
    "trace": TRACED,
    "fork": lambda x: torch.jit.wait(torch.jit.fork(torch.sin, x)),
    "vmap": vmap(torch.sin),
    "vmap of a layer": vmap(lambda row: LAYER(row).tanh()),
    "vmap, samples last": lambda x: vmap(torch.sin, 0, -1)(x).T,
    "vmap over features": vmap(torch.sin, 1, 1),
    "grad": grad(lambda x: x.pow(3).sum()),
    "vmap of grad": vmap(grad(lambda x: x.pow(3).sum())),
    "jvp": lambda x: jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda x: jacrev(lambda x: x.sin().sum(0))(x).sum(0),
    "subclass": lambda x: x.as_subclass(Subclass),
    "parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "buffer": nn.Buffer,
    "Tensor": torch.DoubleTensor,
    "Variable": torch.autograd.Variable,
    "numpy": lambda x: torch.from_numpy(np.sin(x.numpy())),
    "np.asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "dlpack": torch.from_dlpack,
    "dlpack, capsule": lambda x: torch.from_dlpack(x.__dlpack__()),
    "thread": in_a_thread,
    "autograd.Function": Squares.apply,
    "functional_call": lambda x: functional_call(LAYER, dict(LAYER.named_parameters()), (x,)),
    "deepcopy": copy.deepcopy,
    "data": lambda x: x.data.clone(),
    "shared memory": lambda x: x.clone().share_memory_(),
}
"""What is found again, and followed."""

WAYS = {
    **FOUND,
    "vmap in chunks": lambda x: vmap(torch.sin, chunk_size=2)(x),
    "vjp": lambda x: vjp(torch.sin, x)[1](torch.ones_like(x))[0],
    "jacfwd": lambda x: jacfwd(lambda x: x.sin().sum(0))(x).sum(0),
    "linearize": lambda x: linearize(torch.sin, x)[1](torch.ones_like(x)),
    "autograd.grad": differentiated,
    "backward": backward,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": saved,
    "item": numbers(lambda v: v.item()),
    "float": numbers(float),
    "int": numbers(lambda v: int(10 * v)),
    "bool": numbers(lambda v: bool(v > 0)),
    "format": numbers(lambda v: f"{v:.6f}"),
    "index": numbers(lambda v: range(100)[(10 * v.abs()).long()]),
    "branch": lambda x: torch.stack([torch.ones_like(r) if r[0] > 0 else torch.zeros_like(r) for r in x.detach()]),
    "tolist": lambda x: torch.tensor(x.tolist(), dtype=x.dtype),
    "tolist of rows": lambda x: torch.tensor([row.tolist() for row in x], dtype=x.dtype),
    "numpy of rows": lambda x: torch.stack([torch.from_numpy(row.numpy()) for row in x]),
    "np.array of rows": lambda x: torch.tensor(np.stack([np.array(row) for row in x])),
    "memoryview": lambda x: torch.frombuffer(memoryview(x.numpy()), dtype=x.dtype).view(x.shape),
    "bytes": lambda x: torch.frombuffer(bytearray(x.numpy().tobytes()), dtype=x.dtype).view(x.shape),
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "set_": put,
    "data of another": made_data,
    "storage": lambda x: torch.tensor([], dtype=x.dtype).set_(x.untyped_storage(), 0, x.shape, x.stride()),
    "values of the storage": lambda x: torch.tensor(list(x.clone().storage()), dtype=x.dtype).view(x.shape),
    "nested": lambda x: torch.nested.to_padded_tensor(torch.nested.nested_tensor(list(x)), 0.0),
    "jagged": lambda x: torch.nested.as_nested_tensor(list(x), layout=torch.jagged).values().view(x.shape),
    "sparse": lambda x: x.to_sparse().to_dense(),
    "custom op": own_op,
    "collate": lambda x: default_collate(list(x)),
    "loader": lambda x: next(iter(DataLoader(TensorDataset(x), batch_size=len(x))))[0],
    "threads": rows_in_threads,
    "cache": lambda x: remembered(tuple(map(tuple, x.tolist()))),
    "apply_": lambda x: x.detach().clone().apply_(lambda v: v * v),
    "mean": lambda x: strange(x).mean(0).expand(x.shape),
    "roll": lambda x: strange(x.roll(1, 0)),
    "next": lambda x: strange(torch.cat([x[1:], x[-1:]])),
}
