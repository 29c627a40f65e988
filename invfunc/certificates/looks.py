"""What is looked at of each statistic: some of its numbers, and the same ones by another path."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from invfunc.certificates import of_columns, of_shares
from invfunc.certificates.look import Look, Member
from invfunc.reductions.gradients import CentredSquares, ClippedSum, EachSample, SquaredNorms, SumAndCentredSquares
from invfunc.reductions.noise import SumAndNoise
from invfunc.reductions.predictive import PredictiveCovariance
from invfunc.reductions.sketches import Sketches
from invfunc.reductions.squares import (
    InnerProducts,
    JacobianRows,
    MatrixTrace,
    ProductsWithOthers,
    SquareRoot,
    SquaresOfEach,
    SumOfSquares,
)
from invfunc.statistic import Statistic

_LOOKS: dict[type, Callable[[Member], Iterator[Look]]] = {
    EachSample: of_shares.each_sample,
    CentredSquares: of_shares.centred_squares,
    SumAndCentredSquares: of_shares.sum_and_centred_squares,
    SquaredNorms: of_shares.squared_norms,
    SumAndNoise: of_columns.sum_and_noise,
    Sketches: of_shares.sketches,
    PredictiveCovariance: of_shares.covariances,
    ClippedSum: of_shares.clipped_sum,
    InnerProducts: of_shares.inner_products,
    ProductsWithOthers: of_shares.inner_products,
    SumOfSquares: of_columns.sum_of_squares,
    SquaresOfEach: of_columns.squares_of_each,
    MatrixTrace: of_columns.matrix_trace,
    SquareRoot: of_columns.square_root,
    JacobianRows: of_columns.jacobian_rows,
}


def looks(m: Member) -> Iterator[Look]:
    """What there is to look at of a statistic."""
    return _LOOKS[type(m.t.reduction)](m)


def unknown(t: Statistic) -> str:
    """Why there is nothing to compare a statistic with; empty if there is."""
    if type(t.reduction) in _LOOKS:
        return ""
    return (
        f"the entries of {t.name} are no derivatives of f along an entry of its parameters, so that there is nothing "
        "to compare them with. Certify `diag_ggn` or `batch_grad` of the same function, which go through the same "
        "operations."
    )
