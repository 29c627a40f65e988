"""Laplace, curvlinops and scipy with our curvature, against their own or against dense matrices."""

import warnings

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import invfunc
from invfunc import InvFuncError
from tests import matrices
from tests.clients.client import Outcome, assert_near


def classifier():
    """A network, the digits of a problem, and their loader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()
    x, y = torch.randn(6, 1, 4, 4).double(), torch.tensor([0, 1, 2, 2, 1, 0])
    return model, (x, y), DataLoader(TensorDataset(x, y), batch_size=4)


class Patches(nn.Module):
    """A token for each row of an image, with a learned place."""

    def __init__(self):
        super().__init__()
        self.embed, self.places, self.head = nn.Linear(4, 4), nn.Parameter(torch.randn(1, 4, 4)), nn.Linear(16, 3)

    def forward(self, x):
        return self.head((self.embed(x.flatten(1, 2)) + self.places).tanh().flatten(1))


def laplace() -> Outcome:
    """The curvature that a posterior is made of, by our backends and by its own."""
    from laplace import Laplace
    from laplace.curvature import CurvlinopsEF, CurvlinopsGGN, CurvlinopsHessian

    from invfunc.laplace import InvFuncEF, InvFuncGGN, InvFuncHessian

    pairs = {
        "full": [(InvFuncGGN, CurvlinopsGGN), (InvFuncEF, CurvlinopsEF), (InvFuncHessian, CurvlinopsHessian)],
        "diag": [(InvFuncGGN, CurvlinopsGGN), (InvFuncEF, CurvlinopsEF)],
        "kron": [(InvFuncGGN, CurvlinopsGGN)],
    }

    def fitted(model, loader, structure, backend):
        posterior = Laplace(model, "classification", "all", structure, backend=backend)
        posterior.fit(loader)
        return posterior

    outcome = Outcome()
    for structure, backends in pairs.items():
        for ours, theirs in backends:
            model, (x, _), loader = classifier()
            a, b = (fitted(model, loader, structure, backend) for backend in (ours, theirs))
            if isinstance(a.H, torch.Tensor):
                assert_near({"H": a.H}, {"H": b.H}, 1e-6)  # its own full matrices have the digits of float32
            if ours is not InvFuncHessian:  # which need not be positive
                assert_near({"evidence": a.log_marginal_likelihood()}, {"evidence": b.log_marginal_likelihood()}, 1e-6)
                assert_near({"predictions": a(x)}, {"predictions": b(x)}, 1e-5)
        outcome.works.append(f"{structure}: " + ", ".join(ours.__name__ for ours, _ in backends))
    try:
        fitted(Patches().double(), classifier()[2], "kron", InvFuncGGN)
    except InvFuncError as error:
        outcome.refuse("kron of learned places [1, T, D]", error)
    return outcome


def curvlinops() -> Outcome:
    """Its matrices, estimators and solvers on our products."""
    import curvlinops as theirs
    from curvlinops.examples import IdentityLinearOperator

    model, (x, y), _ = classifier()
    f, params = invfunc.functional(model)
    data, leaves = [(x, y)], list(model.parameters())
    loss = nn.CrossEntropyLoss()
    made = {
        "GGN": (invfunc.ggnvp(f, loss), theirs.GGNLinearOperator),
        "Hessian": (invfunc.hvp(f, loss), theirs.HessianLinearOperator),
    }
    outcome, eye = Outcome(), torch.eye(sum(p.numel() for p in leaves)).double()
    for name, (product, kind) in made.items():
        ours = invfunc.linear_operator(product, kind="torch")(params, x, y)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            own = kind(model, loss, leaves, data) @ eye
        assert_near({name: ours @ eye}, {name: own})
        outcome.works.append(f"{name}: the same matrix")
    for estimate in ("hutchinson_trace", "hutchpp_trace", "xtrace", "xdiag", "hutchinson_squared_fro"):
        found = []
        for matrix in (ours, own):
            torch.manual_seed(0)
            found.append(torch.as_tensor(getattr(theirs, estimate)(matrix, 12)))
        assert_near({estimate: found[0]}, {estimate: found[1]})
        outcome.works.append(estimate)
    ggn = invfunc.linear_operator(made["GGN"][0], kind="torch")(params, x, y)
    damped = ggn + 0.1 * IdentityLinearOperator([p.shape for p in leaves], ggn.device, ggn.dtype)
    inverse = theirs.CGInverseLinearOperator(damped, eps=0, tolerance=1e-8, max_iter=200)
    wanted = torch.linalg.solve(ggn @ eye + 0.1 * eye, eye[:, 0])
    assert_near({"solution": inverse @ eye[:, 0]}, {"solution": wanted}, 1e-6)
    outcome.works.append("CGInverseLinearOperator")
    return outcome


def scipy() -> Outcome:
    """Its eigenvalues and solutions of our products, against dense matrices."""
    from scipy.sparse.linalg import aslinearoperator, cg, eigsh, lobpcg

    model, (x, y), _ = classifier()
    f, params = invfunc.functional(model)
    outcome = Outcome()
    for name, product in {"ggnvp": invfunc.ggnvp(f, F.cross_entropy), "hvp": invfunc.hvp(f, F.cross_entropy)}.items():
        matrix, dense = invfunc.linear_operator(product)(params, x, y), matrices.of(product, params, x, y).numpy()
        start = np.ones(len(dense))
        values = eigsh(matrix, k=3, which="LA", v0=start, return_eigenvectors=False)
        assert np.allclose(np.sort(values), np.linalg.eigvalsh(dense)[-3:], rtol=1e-8)
        outcome.works.append(f"eigsh({name})")
    damped, dense = matrix + 5 * aslinearoperator(np.eye(len(dense))), dense + 5 * np.eye(len(dense))
    found, failed = cg(damped, start, rtol=1e-10)
    assert not failed and np.allclose(found, np.linalg.solve(dense, start), rtol=1e-6)
    values, _ = lobpcg(damped, np.random.default_rng(0).standard_normal((len(dense), 2)), tol=1e-8, maxiter=200)
    assert np.allclose(np.sort(values), np.linalg.eigvalsh(dense)[-2:], rtol=1e-6)
    outcome.works += ["cg", "lobpcg"]
    return outcome
