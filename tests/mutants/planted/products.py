"""Faults in products with vectors."""

from tests.mutants.fault import Fault

EIGENPAIRS = "products/test_eigenpairs.py"
ILL_CONDITIONED = "linear_algebra/test_ill_conditioned.py"

FAULTS = [
    # Eigenpairs, and covariances of low rank
    Fault(
        "an inverse takes its rounded vectors for orthogonal",
        "products/eigenpairs.py",
        "torch.linalg.eigh(gram(rows, self._all.new_zeros(count, count)))",
        "(self._all[:count], torch.eye(count).to(self._all))",
        ILL_CONDITIONED + "::TestEigenpairs",
    ),
    Fault(
        "what is lost in a first product is not solved for again",
        "products/eigenpairs.py",
        "found = [x + y for x, y in zip(found, self._solved(rest, lead, shift), strict=True)]",
        "assert rest",
        ILL_CONDITIONED + "::TestEigenpairs",
    ),
    Fault(
        "eigenvalues that are rounding have eigenvectors",
        "products/eigenpairs.py",
        "16 * self._eps * noise",
        "0 * self._eps * noise",
        EIGENPAIRS + "::TestPairs",
    ),
    Fault(
        "what lies outside of the samples is not damped",
        "products/eigenpairs.py",
        "others * self._damping(damping).log()",
        "others * 0",
        EIGENPAIRS + "::TestPairs",
    ),
    # Products, chunks, sparsity
    Fault(
        "products of what no parameter reaches are zeros",
        "products/curvature.py",
        "        if x is not None:\n            return",
        "        return",
        "statistics/test_unreached.py::TestProducts::test_are_refused_with_their_linearisation",
    ),
    Fault(
        "an estimate tells the spread in place of the error of its mean",
        "products/estimate.py",
        "safe_root(s / (count * (count - 1)))",
        "safe_root(s / (count - 1))",
        "products/test_estimators.py::TestValues::test_are_the_mean_over_the_vectors_and_its_error "
        "products/test_estimators.py",
    ),
    Fault(
        "forward mode goes through what has no gradient",
        "products/given.py",
        "if func is set_graph:",
        "if func is None:",
        "products/test_forward_mode.py::test_products_are_those_of_the_matrices",
    ),
    Fault(
        "tangents of one run are taken for those of another",
        "products/given.py",
        "z.shape != y.shape or (y.numel() and not near(z, y, y.detach().abs().amax()))",
        "z.shape != y.shape",
        "products/test_forward_mode.py::test_one_that_draws_from_its_own_generator_is_of_one_run",
    ),
    Fault(
        "samples of a loss that mixes them are taken for apart",
        "products/given.py",
        "not near(signed(x, d), y.detach(), x.detach().abs().amax())",
        "signs is None",
        "products/test_product_splits.py::TestSamples",
    ),
    # Products
    Fault(
        "the leaves of a vector come in its own order",
        "products/product.py",
        "return [given[path] for path in own]",
        "return list(given.values())",
        "products/test_products.py::TestVectors::test_trees_may_have_another_order "
        "products/test_product_errors.py products",
    ),
    Fault(
        "a map within vmap takes its vectors along the first axis",
        "products/maps.py",
        "x.movedim(dim, 0)",
        "x",
        "products/test_product_compositions.py::test_a_linearisation_may_be_composed_later "
        "products/test_product_compositions.py products",
    ),
    Fault(
        "the derivative of a map is the map",
        "products/maps.py",
        "_Applied.apply(ctx.linear.transposed, ctx.lead, *cotangents)",
        "_Applied.apply(ctx.linear, ctx.lead, *cotangents)",
        "products/test_product_compositions.py::test_a_linearisation_may_be_composed_later "
        "products/test_operators.py products",
    ),
    Fault(
        "the tangent of a map is that of its transpose",
        "products/maps.py",
        "return _Applied.apply(ctx.linear, ctx.lead, *tangents)",
        "return _Applied.apply(ctx.linear.transposed, ctx.lead, *tangents)",
        "products/test_product_compositions.py::test_a_linearisation_may_be_composed_later "
        "products/test_product_compositions.py products",
    ),
    Fault(
        "a Fisher product takes one of several outputs",
        "products/curvature.py",
        "torch.stack(met).sum(0)",
        "met[0]",
        "products/test_fisher_products.py::test_terms_in_two_orders products/test_fisher_products.py",
    ),
    Fault(
        "second derivatives are clipped where their size was asked for",
        "products/curvature.py",
        'h.abs() if modify == "abs" else h.clamp(min=0)',
        'h.abs() if modify == "clip" else h.clamp(min=0)',
        "products/test_pch.py::test_is_the_sum_of_its_parts products/test_pch.py",
    ),
    Fault(
        "an operator takes the conjugate of a complex vector",
        "products/linear_operator.py",
        "self._matvec(x.real) + 1j * self._matvec(x.imag)",
        "self._matvec(x.real) - 1j * self._matvec(x.imag)",
        "products/test_operators.py::TestOperator::test_takes_complex_and_integer_vectors products/test_operators.py",
    ),
    Fault(
        "an operator of torch has its columns in front",
        "products/linear_operator.py",
        "y.detach().movedim(0, -1) for y",
        "y.detach() for y",
        "products/test_operators_of_torch.py::TestOperator::test_is_the_matrix products/test_operators_of_torch.py",
    ),
    Fault(
        "a product of the user of several vectors is that of the first",
        "products/product.py",
        "zip(*map(of_one, zip(*v, strict=True)), strict=True)",
        "zip(*[of_one([y[0] for y in v])] * len(v[0]), strict=True)",
        "products/test_operators_of_torch.py::TestOperator::test_of_a_product_of_the_user "
        "products/test_operators_of_torch.py",
    ),
    Fault(
        "an estimate adds in half precision",
        "products/estimate.py",
        "wide(x) * wide(y)",
        "x * y",
        "products/test_estimators.py::TestValues::test_are_averaged_in_float32 products/test_estimators.py",
    ),
]
