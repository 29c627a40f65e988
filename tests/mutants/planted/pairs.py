"""Faults in pairs of a function and its inverse."""

from tests.mutants.fault import Fault

PAIRS = "pairs layers invertible/test_check_inverse.py"
AGAIN = "recomputation invertible"
TRAINING = "pairs/test_reversible_training.py"
SPAN = "invertible/test_span.py"
FOUND = "pairs/test_automatic.py::"

FAULTS = [
    # Pairs and layers
    Fault(
        "an additive coupling goes back in the order of forward",
        "pairs/couplings.py",
        """        b = b - fitting(G(a, *q, *args, **kwargs), b, self.call, "G", "b")
        a = a - fitting(F(b, *p, *args, **kwargs), a, self.call, "F", "a")
""",
        """        a = a - fitting(F(b, *p, *args, **kwargs), a, self.call, "F", "a")
        b = b - fitting(G(a, *q, *args, **kwargs), b, self.call, "G", "b")
""",
        "pairs/test_couplings.py::TestFormula::test_is_that_of_the_docstring_in_both_directions " + PAIRS,
    ),
    Fault(
        "the log-determinant of an affine coupling leaves its second half out",
        "pairs/couplings.py",
        "return first + per_sample(s)",
        "return first",
        "pairs/test_couplings.py::TestLogDeterminant::test_is_that_of_the_jacobian_of_each_sample " + PAIRS,
    ),
    Fault(
        "a grid does not round",
        "pairs/exact.py",
        "scaled.round_().mul_",
        "scaled.mul_",
        "pairs/test_exact.py::TestGrid::test_enter_gives_the_nearest_number " + PAIRS + " " + AGAIN,
    ),
    Fault(
        "the range of a grid is twice as long",
        "pairs/exact.py",
        "return 2.0 ** (_MANTISSA[self.dtype] - self.fraction_bits)",
        "return 2.0 ** (_MANTISSA[self.dtype] - self.fraction_bits + 1)",
        "pairs/test_exact.py::TestGrid::test_takes_the_dtype_that_the_range_asks_for " + PAIRS,
    ),
    Fault(
        "a step back takes the force of the step",
        "pairs/integrators.py",
        "return self._moved(-self.step, force",
        "return self._moved(self.step, force",
        "pairs/test_couplings.py::TestFormula::test_is_that_of_the_docstring_in_both_directions " + PAIRS,
    ),
    Fault(
        "momentum has the log-determinant of its inverse",
        "pairs/integrators.py",
        "math.log(self.gamma)",
        "-math.log(self.gamma)",
        "pairs/test_couplings.py::TestLogDeterminant::test_is_that_of_the_jacobian_of_each_sample " + PAIRS,
    ),
    Fault(
        "a step of a solver back goes from its start to its end",
        "pairs/reversible_step.py",
        "return (start, end, *own), (end, start, *own)",
        "return (start, end, *own), (start, end, *own)",
        "pairs/test_reversible_step.py::TestOrder " + PAIRS,
    ),
    Fault(
        "the way back of a solver does not divide by the coupling",
        "pairs/reversible_step.py",
        "(y - (1 - c) * z - by) / c",
        "(y - (1 - c) * z - by)",
        "pairs/test_couplings.py::TestFormula::test_inverse_restores_the_state " + PAIRS,
    ),
    Fault(
        "two copies have the log-determinant of each entry of one",
        "pairs/copies.py",
        "for t in tree.tensors(y)]).sum(0)",
        "for t in tree.tensors(y)]).mean(0)",
        "pairs/test_couplings.py::TestLogDeterminant::test_is_that_of_the_jacobian_of_each_sample " + PAIRS,
    ),
    Fault(
        "a Runge-Kutta scheme takes all slopes at the time of its start",
        "pairs/runge_kutta.py",
        "self.field(stage, start + h * sum(row),",
        "self.field(stage, start,",
        "pairs/test_reversible_step.py::TestOrder " + PAIRS,
    ),
    Fault(
        "the slopes at both ends weigh most in a Runge-Kutta scheme",
        "pairs/runge_kutta.py",
        "[1 / 6, 1 / 3, 1 / 3, 1 / 6]",
        "[1 / 3, 1 / 6, 1 / 6, 1 / 3]",
        "pairs/test_reversible_step.py::TestOrder " + PAIRS,
    ),
    Fault(
        "a step back towards a fixed point asks the copy that has not come back yet",
        "pairs/fixed_point.py",
        "return combined(self._back, y, self.of(f, z, *given, **kwargs)), z",
        "return combined(self._back, y, self.of(f, combined(self._towards, z, y), *given, **kwargs)), z",
        "pairs/test_couplings.py::TestFormula::test_inverse_restores_the_state " + PAIRS,
    ),
    Fault(
        "the step towards a fixed point has the log-determinant of one copy",
        "pairs/fixed_point.py",
        "2 * math.log(1 - beta)",
        "math.log(1 - beta)",
        "pairs/test_couplings.py::TestLogDeterminant::test_is_that_of_the_jacobian_of_each_sample " + PAIRS,
    ),
    Fault(
        "the bit that half of a state loses is not given back",
        "pairs/bdia.py",
        "- unpacked(bits, y) * 2.0**-self.grid.fraction_bits, x",
        ", x",
        "pairs/test_bdia.py::TestBits " + PAIRS,
    ),
    Fault(
        "half of the signs are drawn for all samples",
        "pairs/bdia.py",
        "plus = plus.view(-1, *[1] * (x.dim() - 1)) if plus.dim() else plus",
        "plus = plus.flatten()[:1].view([1] * x.dim()) if plus.dim() else plus",
        "pairs/test_bdia.py::TestMean " + PAIRS,
    ),
    Fault(
        "what a residual block says counts the same for either sign",
        "pairs/bdia.py",
        "(1 + gamma) * said",
        "said",
        "pairs/test_bdia.py::TestMean " + PAIRS,
    ),
    Fault(
        "bits are kept a byte each",
        "pairs/bdia.py",
        "rows = F.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)",
        "rows = F.pad(flat[:, None], (0, 7)).view(-1, 8)",
        "pairs/test_bdia.py::TestBits " + PAIRS,
    ),
    Fault(
        "going back adds the log-determinant",
        "pairs/log_det.py",
        "return x, s - log_det(",
        "return x, s + log_det(",
        "invertible/test_chain.py::TestLogDeterminants::test_of_a_chain_add_up " + PAIRS,
    ),
    Fault(
        "a module's log-determinant is summed over its samples",
        "pairs/from_module.py",
        "found.flatten(1).sum(1)",
        "found.sum().expand(len(like))",
        "pairs/test_from_module.py::TestInterface " + PAIRS,
    ),
    Fault(
        "going back through a module adds the log-determinant of the way there",
        "pairs/from_module.py",
        "self.law.run(self.backwards, x, params, *args, **kwargs)",
        "(self.law.run(self.backwards, x, params, *args, **kwargs)[0], self.law.run(False, x, params)[1])",
        "pairs/test_from_module.py::TestLibraries::test_carry_their_log_determinants " + PAIRS,
    ),
    Fault(
        "a rounded number of the grid may be minus zero",
        "pairs/exact.py",
        "return scaled.round_().mul_(2.0**-bits).add_(0.0)",
        "return scaled.round_().mul_(2.0**-bits)",
        "pairs/test_exact.py::TestGrid::test_enter_gives_the_nearest_number " + PAIRS + " " + AGAIN,
    ),
    # Training run backwards
    Fault(
        "a product on the grid takes no digits",
        "pairs/decay.py",
        ".mul_(n) + torch.sub(digits, fewer, alpha=n)",
        ".mul_(n) + torch.sub(digits, digits)",
        f"{TRAINING}::TestDecay::test_is_undone_to_the_last_bit_and_off_by_less_than_a_unit {TRAINING}",
    ),
    Fault(
        "a word of digits takes one step more than it holds",
        "pairs/decay.py",
        "        return steps\n",
        "        return steps + 1\n",
        f"{TRAINING}::TestDecay::test_words_never_overflow_and_are_nearly_full {TRAINING}",
    ),
    Fault(
        "digits that are not used up are not told",
        "pairs/decay.py",
        "if not used_up:",
        "if False:",
        f"{TRAINING}::TestWayBack::test_other_gradients_are_found {TRAINING}",
    ),
    Fault(
        "the way back is differentiated as the way forth",
        "pairs/decay.py",
        "return found, None, -found, None, None",
        "return found, None, found, None, None",
        f"{TRAINING}::TestComposes::test_with_invert_whose_derivative_is_the_inverse {TRAINING}",
    ),
    Fault(
        "the root of a second moment of zero is differentiated",
        "pairs/reversible_adam.py",
        "(square.clamp(min=self._unit) / second)",
        "(square / second)",
        f"{TRAINING}::TestGradient::test_where_a_weight_has_no_gradient_at_all {TRAINING}",
    ),
    Fault(
        "the gradient of a learning rate that Adam divides by is left out",
        "pairs/training.py",
        "((rate, g) for g in by_move[len(moments) :] if g is not None)",
        "((rate, g) for g in by_move[len(moments) :] if False)",
        f"{SPAN}::TestOneNode::test_gives_what_a_block_a_step_gives {SPAN}",
    ),
    # Inverses that are found
    Fault(
        "a scaled part is undone by what may be 0",
        "pairs/automatic/rules.py",
        'get(other), "{y} / {0}") if nonzero(other) else None',
        'get(other), "{y} / {0}")',
        "pairs/test_automatic_refusals.py::TestRefusals",
    ),
    Fault(
        "a difference is undone as a sum where its second operand is wanted",
        "pairs/automatic/rules.py",
        "return lambda y, get: _over(get(a) - y, alpha)",
        "return lambda y, get: _over(y - get(a), alpha)",
        FOUND + "TestStructures",
    ),
    Fault(
        "the factor of what was added is left out",
        "pairs/automatic/rules.py",
        "torch.sub(y, get(b), alpha=alpha)",
        "torch.sub(y, get(b))",
        FOUND + "TestStructures",
    ),
    Fault(
        "what lacks entries is put together",
        "pairs/automatic/rules.py",
        "return found if count == size == int(seen.sum()) else []",
        "return found",
        "pairs/test_automatic_refusals.py::TestRefusals",
    ),
    Fault(
        "a call that draws goes on from where the last one was",
        "pairs/automatic/values.py",
        "set_states((generator, before) for generator, before, _ in call.drawn)",
        "pass",
        FOUND + "TestStructures",
    ),
    Fault(
        "the inverse writes in place into what others read",
        "pairs/automatic/values.py",
        "leaves[place] = leaves[place].clone()",
        "pass",
        FOUND + "TestCouplings",
    ),
    Fault(
        "a part lies in memory as the inverse happens to give it",
        "pairs/automatic/values.py",
        "laid = overlaps or torch.is_grad_enabled() or number.stride() == node.stride",
        "laid = True",
        FOUND + "TestCouplings",
    ),
    Fault(
        "a found inverse keeps its tensors until they are collected",
        "pairs/automatic/found.py",
        "            run.forget()",
        "            pass",
        "pairs/test_automatic_modules.py::TestMemory",
    ),
    Fault(
        "numbers of x may be read",
        "pairs/automatic/graph.py",
        "if not tensors and not call.writes:",
        "if False:",
        "pairs/test_automatic_refusals.py::TestRefusals",
    ),
    Fault(
        "what was written by another view is read as it was",
        "pairs/automatic/graph.py",
        "            other.stale = str(call)",
        "            pass",
        "pairs/test_automatic_refusals.py::TestRefusals",
    ),
    Fault(
        "a coupling does not look whether F writes",
        "pairs/part.py",
        "written = version(state) != before",
        "written = False",
        "pairs/test_couplings.py::test_functions_that_write_the_state_are_errors",
    ),
    # Calls that are not watched
    Fault(
        "a tensor that f makes of none is kept with the steps of a found inverse",
        "pairs/automatic/derived.py",
        " or any(isinstance(leaf, Constant) for leaf in call.leaves)",
        "",
        "recomputation/test_straight_found.py",
    ),
    Fault(
        "tied weights are taken for those of later calls, which may not be tied",
        "pairs/automatic/derived.py",
        "        if len({*map(id, closed)}) < len(closed):",
        "        if False:",
        "recomputation/test_straight_found.py",
    ),
    Fault(
        "a stand-in says of no tensor that a gradient is needed",
        "pairs/automatic/derived.py",
        ".requires_grad_(t.requires_grad)",
        "",
        "recomputation/test_straight_found.py",
    ),
    Fault(
        "a constant that was written since is taken as it is",
        "pairs/automatic/graph.py",
        "    if written:\n        refuse(",
        "    if False:\n        refuse(",
        "pairs/test_automatic_refusals.py::TestNumbers",
    ),
]
