"""Faults in what is around the numbers: arguments, orders, memory, modules, and what passes between transforms."""

from tests.mutants.fault import Fault

KRONECKER = "kronecker"
LAPLACE = "test_laplace.py"
FUNCTIONAL = "functional"

TRANSFORMS = [
    # Arguments and results
    Fault(
        "a result that another one shares memory with is not copied",
        "transform.py",
        "if expanded or memory in taken:",
        "if expanded:",
        "evaluation/test_memory_of_results.py::test_of_statistics "
        "evaluation/test_memory_of_results.py evaluation products",
    ),
    Fault(
        "samples come in the inverse of the order in which they were chosen",
        "evaluation/fold.py",
        "torch.tensor(sorted(order, key=order.__getitem__), device",
        "torch.tensor(order, device",
        "per_sample/test_samples.py::TestEveryStatistic::test_is_that_of_the_shares_that_were_chosen "
        "per_sample/test_samples.py",
    ),
    Fault(
        "samples that were chosen are counted from the start of each block",
        "evaluation/fold.py",
        "sorted(i - run.start for i in chosen if run.start <= i < run.start + n)",
        "sorted(i for i in chosen if i < n)",
        "per_sample/test_samples.py::TestEveryStatistic::test_does_not_depend_on_chunks "
        "per_sample/test_samples.py test_chunked.py statistics",
    ),
    Fault(
        "chunks of a function are of its first axis",
        "chunked.py",
        "lambda x: x.narrow(dim, start, stop - start)",
        "lambda x: x.narrow(0, start, stop - start)",
        "test_chunked.py::TestPlainFunctions::test_samples_along_other_axes test_chunked.py",
    ),
    Fault(
        "chunks of a size begin at 0 within another chunk",
        "plan.py",
        "edges = [*range(start, stop, self.size), stop]",
        "edges = [start, *range(self.size, length, self.size), stop]",
        "test_chunked.py::TestPasses::test_of_a_size_divide_each_chunk test_chunked.py",
    ),
    Fault(
        "a run without numbers goes on above the budget as if it were within it",
        "budget/search.py",
        "if known is None or known.over or (limit is not None and known.peak > limit):",
        "if known is None:",
        "budget/test_budget.py::TestSearch budget/test_budget.py test_chunked_memory.py",
    ),
    Fault(
        "what was chosen is kept whatever the backward pass of f does",
        "budget/fingerprint.py",
        "if results and wanted:",
        "if False:",
        "budget/test_budget.py::TestFingerprint budget/test_budget.py",
    ),
    Fault(
        "parts are counted as the first one, which finds nothing to add to",
        "_alike.py",
        "        if k:\n",
        "        if True:\n",
        "budget/test_alike.py::TestCounts::test_of_what_parts_do_are_never_below budget/test_alike.py",
    ),
    Fault(
        "what parts that are counted again leave is forgotten",
        "_alike.py",
        "counter.live = max(counter.live, start + left)",
        "pass",
        "budget/test_alike.py::TestCounts::test_of_what_parts_do_are_never_below budget/test_alike.py",
    ),
    Fault(
        "adding to more takes no more where parts are counted again",
        "_alike.py",
        "counter.use(start + spent.most + most + more)",
        "counter.use(start + spent.most)",
        "budget/test_alike.py::TestCounts::test_of_what_parts_do_are_never_below budget/test_alike.py",
    ),
    Fault(
        "the last part is not run where more is done in it",
        "_alike.py",
        "if same in known and (k + 1 < len(parts) or not last):",
        "if same in known:",
        "budget/test_alike.py::TestCounts::test_of_plain_functions_are_those_of_all_parts budget/test_alike.py",
    ),
    Fault(
        "the first chunks that fit are taken, however long a call takes with them",
        "budget/search.py",
        "return min(found, key=lambda t: t.work, default=None)",
        "return found[0] if found else None",
        "budget/test_budget.py::TestSearch budget/test_budget.py",
    ),
    Fault(
        "a transposed convolution multiplies its results, not what it reads",
        "budget/scratch.py",
        "(self.x if self.transposed else self.out).numel()",
        "self.out.numel()",
        "budget/test_budget.py::TestDuration budget/test_budget.py",
    ),
    Fault(
        "the derivative in a dilated weight takes no columns",
        "budget/scratch.py",
        "max(c.dilation) > 1 or c.transposed",
        "c.transposed",
        "budget/test_budget.py::TestScratch budget/test_budget.py",
    ),
    Fault(
        "what Python keeps of a search does not count in its call",
        "budgeted.py",
        "if later is not None and _promised(later) + taken > budget:",
        "if later is not None and _promised(later) > budget:",
        "test_chunked_memory.py::TestPromises test_chunked_memory.py",
    ),
    Fault(
        "what was chosen is kept for a smaller budget",
        "budgeted.py",
        "_promised(chosen) <= budget <= CLOSE * of",
        "budget <= CLOSE * of",
        "test_chunked_memory.py::TestChoices test_chunked_memory.py",
    ),
    Fault(
        "where memory is shared by arguments is not seen",
        "budget/fingerprint.py",
        "return known[1], x.dtype",
        "return 0, x.dtype",
        "budget/test_budget.py::TestFingerprint budget/test_budget.py",
    ),
    Fault(
        "a part of the batch is of its first axis",
        "recording/problem.py",
        "x = x[(slice(None),) * d + (part,)]",
        "x = x[part]",
        "test_chunked.py::TestStatistics::test_options_stay_with_the_statistic test_chunked.py statistics evaluation",
    ),
    Fault(
        "a negative sample counts from one place behind the last",
        "recording/problem.py",
        "return [i % n for i in places]",
        "return [i % (n + 1) for i in places]",
        "per_sample/test_samples.py::TestEveryStatistic::test_is_that_of_the_shares_that_were_chosen "
        "per_sample/test_samples.py",
    ),
    Fault(
        "what an outer transform differentiates is detached",
        "recording/scope.py",
        "return x if self.wanted else x.detach()",
        "return x.detach()",
        "evaluation/test_differentiable.py::TestRandomNumbers::test_are_those_of_one_call "
        "evaluation testing/test_laws_hold.py",
    ),
    Fault(
        "a constant that requires grad does not make the result require it",
        "recording/scope.py",
        "            self.wanted = True\n",
        "            pass\n",
        "evaluation/test_composition.py::TestWhatIsDifferentiated::test_closed_over_module_parameters "
        "evaluation testing/test_laws_hold.py",
    ),
    Fault(
        "what is missing in one column is taken for another's",
        "recording/scope.py",
        "return [None if none else next(found) for none in missing]",
        "return [*found, *[None] * sum(missing)]",
        "evaluation/test_composition.py::test_layers_that_the_outputs_do_not_read "
        "evaluation/test_composition.py evaluation",
    ),
    Fault(
        "columns of several outputs are split at their samples",
        "reductions/squares.py",
        "state[0].movedim(0, 1).split(sizes, 1)",
        "state[0].movedim(0, 1).split(sizes[::-1], 1)",
        "reductions/test_gram_jacobian.py::TestJacobian::test_of_a_tree_of_outputs_is_a_tree_of_these "
        "reductions/test_gram_jacobian.py evaluation",
    ),
    Fault(
        "samples of a square root are joined along its columns",
        "reductions/squares.py",
        'torch.cat([a[0], b[0]], 1 if over == "samples" else 0)',
        "torch.cat([a[0], b[0]], 0 if b[0].shape[1] == a[0].shape[1] else 1)",
        "reductions/test_gram_jacobian.py::TestOfModels::test_does_not_depend_on_chunks "
        "statistics/test_diag_ggn.py reductions test_chunked.py",
    ),
    Fault(
        "blocks of samples are merged in the wrong order",
        "reductions/gradients.py",
        'return (*a, *b) if over == "samples" else (joined(list(a)) + joined(list(b)),)',
        'return (*b, *a) if over == "samples" else (joined(list(a)) + joined(list(b)),)',
        "test_chunked.py::TestStatistics::test_first_order_statistics_do_not_depend_on_n "
        "statistics/test_first_order.py test_chunked.py",
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
        "products/rows.py",
        "torch.stack(met).sum(0)",
        "met[0]",
        "products/test_fisher_products.py::test_terms_in_two_orders products/test_fisher_products.py",
    ),
    Fault(
        "the target of a product has its samples in front",
        "products/given.py",
        "trace.samples(x, Axis(dim % x.ndim if x.ndim else None))",
        "trace.samples(x, Axis(0 if x.ndim else None))",
        "products/test_product_splits.py::TestSamples::test_may_lie_along_other_axes "
        "products/test_product_splits.py products",
    ),
    Fault(
        "second derivatives are clipped where their size was asked for",
        "products/positive.py",
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
        "products/along.py",
        "zip(*map(of_one, zip(*v, strict=True)), strict=True)",
        "zip(*[of_one([y[0] for y in v])] * len(v[0]), strict=True)",
        "products/test_operators_of_torch.py::TestOperator::test_of_a_product_of_the_user "
        "products/test_operators_of_torch.py",
    ),
    Fault(
        "an estimate adds in half precision",
        "products/estimate.py",
        "return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x",
        "return x",
        "products/test_estimators.py::TestValues::test_are_averaged_in_float32 products/test_estimators.py",
    ),
    # Sparsity
    Fault(
        "samples share a triangle though their columns differ",
        "sparsity/narrowed.py",
        "count = 1 if same and all(s.alike for s in self.sources) else n",
        "count = 1 if same else n",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity statistics/test_diag_ggn.py",
    ),
    Fault(
        "a block of samples has the triangles of the first ones",
        "sparsity/narrowed.py",
        "own = self._known[part.start - self._start : part.stop - self._start, some]",
        "own = self._known[: part.stop - part.start, some]",
        "operations/test_thresholds.py::TestStatistics::test_equal_the_loop "
        "operations/test_thresholds.py::TestStatistics sparsity",
    ),
    Fault(
        "outputs that are moved are not scaled",
        "sparsity/moved.py",
        "u = moved[self.root] * self.scale[part].flatten(1)[:, taken]",
        "u = moved[self.root]",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "blocks of a narrow layer have the columns of others",
        "sparsity/narrowed.py",
        "entries = place[entries]",
        "entries = place[entries].flip(0)",
        "sparsity/test_structure_blocks.py::test_a_head_of_tokens_in_blocks_of_positions sparsity",
    ),
    Fault(
        "a wrong derivative above a narrow layer is taken",
        "sparsity/narrowed.py",
        "return joined(found, 1) if check.right else None",
        "return joined(found, 1)",
        "sparsity/test_structure_blocks.py::test_a_wrong_derivative_is_noticed_in_every_block sparsity",
    ),
    Fault(
        "columns of Kronecker factors share a position",
        "sparsity/planner.py",
        'one=self.shortcuts == "positions"',
        "one=False",
        "sparsity/test_structure_kflr.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "columns of a Hessian that are subtracted are added",
        "sparsity/execute.py",
        "signs = source.signs(self.run.part)",
        "signs = None",
        "sparsity/test_structure_hessian.py::test_columns_share_passes sparsity",
    ),
    Fault(
        "groups with equal boxes have the sign of the first",
        "sparsity/execute.py",
        "groups = colouring.members[boxes.clamp(min=0), : colouring.copies_in(each.classes)]",
        "groups = colouring.members[boxes.clamp(min=0), :1].expand(*boxes.shape, colouring.copies_in(each.classes))",
        "sparsity/test_structure_hessian.py::test_columns_share_passes sparsity",
    ),
    Fault(
        "the diagonal of a Hessian at the last layer is taken for positive",
        "sparsity/execute.py",
        "beside = source.signed(diagonal, part) if self.squares else source.coupling(part)",
        "beside = None if self.squares else source.coupling(part)",
        "sparsity/test_structure_hessian.py::test_columns_share_passes sparsity",
    ),
    Fault(
        "another block of samples bends in the calls of the first",
        "evaluation/decisions.py",
        "if self._steps[key] != [c.step for c in second_order]:",
        "if False:",
        "sparsity/test_structure_hessian.py::test_a_loss_whose_samples_bend_in_other_calls sparsity",
    ),
    Fault(
        "factors of a last layer are those of a Hessian that couples other groups",
        "sparsity/closed.py",
        "bool(((met < 0) | (met == met.amax(0))).all())",
        "True",
        "sparsity/test_structure_kflr.py::test_heads_of_tokens sparsity",
    ),
    Fault(
        "the factor of a last layer has the diagonal of what is beside it",
        "reductions/kronecker_factors.py",
        "    b.diagonal().copy_(diagonal)\n",
        "",
        "sparsity/test_structure_kflr.py::test_heads_of_tokens sparsity",
    ),
    Fault(
        "Kronecker factors share passes though positions are summed first",
        "reductions/kronecker_factors.py",
        '"positions" if sharing == "expand" else "narrow"',
        '"positions"',
        "sparsity/test_structure_kflr.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "labels outlive their memory",
        "operations/receptive_fields/regions.py",
        "if key in self and self[key].memory is reference:",
        "if False:",
        "sparsity/test_structure_memory.py::test_labels_of_dead_memory_are_dropped sparsity operations/test_labels.py",
    ),
    Fault(
        "labels are the same along a dimension that is not expanded",
        "operations/receptive_fields/regions.py",
        "if dim and size > 1 and stride == 0:",
        "if dim and size > 1:",
        "operations/test_labels.py::test_what_an_entry_depends_on_lies_in_its_box operations/test_labels.py sparsity",
    ),
    Fault(
        "samples are alike whose losses are not",
        "sparsity/groups.py",
        "return bool((h == h[:1]).all())",
        "return True",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "the diagonal of a sure softmax cancels",
        "sparsity/groups.py",
        "others = torch.where(largest > 0, (p * (1 - largest)).sum(1, keepdim=True), 1 - p)",
        "others = 1 - p",
        "loss/test_diag_ggn_extremes.py::TestExtremes::test_of_sure_predictions_has_the_digits_of_float32 "
        "loss/test_diag_ggn_extremes.py sparsity",
    ),
    Fault(
        "groups with equal boxes are one",
        "sparsity/execute.py",
        "masks = [(klass == k) & (copy == c) for k in some for c in range(copies)]",
        "masks = [(klass == k) & (copy <= c) for k in some for c in range(copies)]",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "a bottleneck is one though another path goes around it",
        "sparsity/bottleneck.py",
        "if own == open_edges and len(own) == 1 and",
        "if len(own) == 1 and",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
    ),
    # Kronecker factors
    Fault(
        "groups of dims come back in the order of the groups",
        "kronecker/matrix.py",
        "return x.permute(sorted(range(v.ndim), key=order.__getitem__)).to(dtype)",
        "return x.permute(order).to(dtype)",
        "kronecker/test_matrix.py::TestMatrix::test_is_the_product_of_its_factors " + KRONECKER,
    ),
    Fault(
        "damping is split by traces, not by mean eigenvalues",
        "kronecker/matrix.py",
        "_diagonal(f).mean(dtype=",
        "_diagonal(f).sum(dtype=",
        "kronecker/test_matrix.py::TestInverse::test_with_a_split_is_that_of_damped_factors " + KRONECKER,
    ),
    Fault(
        "the trace of blocks is that of the mean block",
        "kronecker/matrix.py",
        "return torch.vmap(Kronecker.trace)(each).sum()",
        "return torch.vmap(Kronecker.trace)(each).mean()",
        "kronecker/test_matrix.py::TestMatrix::test_of_blocks_that_differ " + KRONECKER,
    ),
    Fault(
        "eigenvectors of a flipped layer are taken the other way round",
        "reductions/eigenbasis.py",
        'output = "z" if len(factors) == 1 else "yz" if layer.flipped else "zy"',
        'output = "z" if len(factors) == 1 else "zy"',
        "reductions/test_kfac_exact.py::test_any_layer_has_the_trace_of_its_block_or_no_factors reductions",
    ),
    Fault(
        "the nearest product weighs its terms alike",
        "reductions/nearest.py",
        "zip(cs, fs, strict=True)]) for cs, fs in ((x, first), (y, last))]",
        "zip(cs, fs, strict=True)]) for cs, fs in ((x, first), (y.mean().expand(len(y)), last))]",
        "reductions/test_kfac_models.py::TestRoles::test_have_the_product_that_is_nearest_to_the_sum reductions",
    ),
    Fault(
        "merged factors of a mean loss weigh alike",
        "kronecker/batches.py",
        "weights = [(k / (n or 1)) ** degree for k in known]",
        "weights = [1 / len(known)] * len(known)",
        "kronecker/test_batches.py::TestMerge::test_does_not_depend_on_the_order_or_on_steps " + KRONECKER,
    ),
    Fault(
        "merged inputs are counted as samples",
        "kronecker/batches.py",
        "inputs = sum(known), [part.origin.inputs for part in parts]",
        "inputs = sum(known), known",
        "kronecker/test_batches.py::TestMerge::test_counts_positions " + KRONECKER,
    ),
    Fault(
        "a bias comes before the inputs of its weight",
        "kronecker/origin.py",
        "torch.cat([w, b.unsqueeze(-1)], -1)",
        "torch.cat([b.unsqueeze(-1), w], -1)",
        "kronecker/test_trees.py::TestSolve::test_of_one_position_is_that_of_the_gradient " + KRONECKER,
    ),
    Fault(
        "an inverse still counts as a sum over samples",
        "kronecker/origin.py",
        "return replace(self, n=None)",
        "return self",
        "kronecker/test_batches.py::test_errors_name_the_place " + KRONECKER,
    ),
    # Modules as functions
    Fault(
        "a tied parameter is replaced in its first place alone",
        "functional/functional.py",
        "return {**given, **{place: given[first] for place, first in self._places.items() if first in given}}",
        "return given",
        "functional/test_functional_strays.py::TestTiedParameters " + FUNCTIONAL,
    ),
    Fault(
        "buffers of the module are written",
        "functional/functional.py",
        "replaced = {id(b): b.clone() for",
        "replaced = {id(b): b for",
        "functional/test_functional.py::TestIsTheModuleAtOtherParameters::test_gradient " + FUNCTIONAL,
    ),
    Fault(
        "layers that the first call puts into a list stay copies",
        "functional/functional.py",
        "        put_back(module_copy, repr(self))\n",
        "",
        "functional/test_functional_filled.py::test_each_call_has_its_own_parameters " + FUNCTIONAL,
    ),
    Fault(
        "what was computed from parameters is read by the next call",
        "functional/functional.py",
        "kept=kept(parts, self._computed.get(mode))",
        "kept=kept(parts, None)",
        "functional/test_functional_cached.py::TestWhatIsKeptByHand::test_by_a_call_of_f "
        + FUNCTIONAL
        + " functional/test_functional_cached.py",
    ),
    # Backends for Laplace
    Fault(
        "of Laplace's factors always the second one is weighed by the batch",
        "laplace.py",
        "if i == K.origin.read else",
        "if i == 1 else",
        LAPLACE + "::TestBackends::test_factors_of_batches_add_up_to_those_of_all " + LAPLACE,
    ),
    Fault(
        "curvature for Laplace is of the loss without its half",
        "laplace.py",
        "self.factor * curvature",
        "curvature",
        LAPLACE + "::TestBackends::test_have_the_dense_matrix_and_its_diagonal " + LAPLACE,
    ),
    Fault(
        "Jacobians for Laplace are always of detached parameters",
        "laplace.py",
        "p if enable_backprop else p.detach()",
        "p.detach()",
        LAPLACE + "::TestBackends::test_are_differentiable_if_asked " + LAPLACE,
    ),
    Fault(
        "every draw for Laplace has the same seed",
        "laplace.py",
        "seed = int(torch.randint(2**62, ()))",
        "seed = 0",
        LAPLACE + "::TestBackends::test_draw_as_torchs_generator_says " + LAPLACE,
    ),
]
