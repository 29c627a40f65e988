"""Faults in losses: roots of their Hessians, outputs, drawn targets."""

from tests.mutants.fault import Fault

PEELED = "loss/test_peeled.py"
DRAWN = "loss/test_monte_carlo.py"

FAULTS = [
    Fault(
        "a mean over the classes' weights divides by their number",
        "loss/hessian.py",
        "        size = drawn.sum()\n",
        "        size = valid.sum()\n",
        "loss/test_losses.py::test_a_mean_over_weighted_classes_is_that_of_its_formula "
        "loss/test_losses.py statistics/test_diag_ggn.py",
    ),
    Fault(
        "label smoothing forgets the classes' weights",
        "loss/hessian.py",
        "torch.where(valid, w.sum() * smoothing / classes, 0)",
        "torch.where(valid, smoothing, 0)",
        "statistics/test_diag_ggn.py::TestKnownLosses::test_cross_entropy "
        "loss/test_losses.py statistics/test_diag_ggn.py",
    ),
    Fault(
        "targets that are ignored count",
        "loss/hessian.py",
        "valid = target != ignore",
        "valid = target == target",
        "statistics/test_diag_ggn.py::TestKnownLosses::test_cross_entropy "
        "loss/test_losses.py statistics/test_diag_ggn.py",
    ),
    Fault(
        "what bends an nll_loss is not seen",
        "loss/hessian.py",
        "[node.next_functions[0][0]] for node in nodes_of([slope])",
        "[] for node in nodes_of([slope])",
        "statistics/test_diag_ggn.py::TestWrittenByHand statistics/test_diag_ggn.py",
    ),
    Fault(
        "a loss that is not convex is not told",
        "loss/hessian.py",
        "check(raw < -16 * torch.finfo(raw.dtype).eps * largest, lambda: ConvexityError(text))",
        "pass",
        "statistics/test_diag_ggn.py::TestRefusals::test_a_loss_that_is_not_convex loss statistics",
    ),
    Fault(
        "the last column of the softmax points elsewhere",
        "loss/square_root.py",
        "q * (q + unit[-1]) / (1 + q[:, -1:])",
        "q * (q + unit[-1]) / (1 + q[:, :1])",
        "statistics/test_diag_ggn.py::TestKnownLosses::test_cross_entropy "
        "loss/test_losses.py statistics/test_diag_ggn.py",
    ),
    Fault(
        "roots of eigenvalues are multiplied to the rows of the eigenvectors",
        "loss/square_root.py",
        "values).sqrt().unsqueeze(1)",
        "values).sqrt().unsqueeze(2)",
        "statistics/test_diag_ggn.py::test_the_products_of_a_root_are_the_matrix "
        "statistics/test_diag_ggn.py testing/test_laws_hold.py loss statistics reductions",
    ),
    Fault(
        "eigenvalues that round below zero have a root",
        "loss/square_root.py",
        "torch.where(values <= least, 0 * values, values).sqrt()",
        "values.sqrt()",
        "statistics/test_diag_ggn.py::test_the_products_of_a_root_are_the_matrix "
        "statistics/test_diag_ggn.py testing/test_laws_hold.py loss statistics reductions",
    ),
    Fault(
        "a root has half of its derivative",
        "loss/square_root.py",
        "(slope - t @ (s.mT @ slope) / 2) @ t.mT",
        "slope @ t.mT / 2",
        "loss/test_roots.py",
    ),
    Fault(
        "a mean of a criterion has columns of a sum",
        "loss/hessian.py",
        'k = slope / x.numel() if reduction(call) == "mean" else slope',
        "k = slope",
        "statistics/test_diag_ggn.py::TestKnownLosses::test_elementwise",
    ),
    Fault(
        "targets are drawn with too few columns in the scale",
        "loss/drawn.py",
        "safe_root(columns.diagonal) * count**-0.5",
        "safe_root(columns.diagonal)",
        "loss/test_monte_carlo.py::test_columns_average_to_the_hessian " + DRAWN,
    ),
    Fault(
        "a class takes its own sign twice",
        "loss/peeled.py",
        "p * (each.cumsum(2) - each)",
        "p * each.cumsum(2)",
        PEELED,
    ),
    Fault(
        "columns that are exact count as drawn ones",
        "loss/peeled.py",
        "share = (count - exact).clamp(min=1)",
        "share = (count - 0 * exact).clamp(min=1)",
        PEELED,
    ),
    Fault(
        "classes are drawn from the first of them alone",
        "loss/drawn.py",
        "target = block * size + (inside <= rest)",
        "target = 0 * block + 0 * (inside <= rest)",
        "loss/test_monte_carlo.py::test_columns_average_to_the_hessian " + DRAWN,
    ),
    Fault(
        "a sure prediction has noise",
        "loss/drawn.py",
        "none = variance <= 0\n    noise",
        "none = variance < 0\n    noise",
        "loss/test_roots.py::TestExtremes::test_what_is_drawn_of_a_sure_prediction_is_what_there_is_of_it "
        + DRAWN
        + " statistics/test_nan.py loss",
    ),
]
