"""Faults in pairs, in layers, and in what is computed again."""

from tests.mutants.fault import Fault

PAIRS = "pairs layers invertible/test_check_inverse.py"
LAYERS = "layers"
AGAIN = "recomputation invertible"
TRAINING = "pairs/test_reversible_training.py"

BLOCKS = [
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
        "going back adds the log-determinant",
        "pairs/log_det.py",
        "return x, s - log_det(",
        "return x, s + log_det(",
        "invertible/test_chain.py::TestLogDeterminants::test_of_a_chain_add_up " + PAIRS,
    ),
    Fault(
        "the log-determinant of a normalisation leaves its weight out",
        "layers/batch_norm.py",
        "(logs if weight is None else logs + weight.abs().log())",
        "logs",
        "layers/test_invertible_layers.py::TestLogDeterminant::test_is_that_of_the_jacobian_of_each_sample " + LAYERS,
    ),
    Fault(
        "going back through a normalisation takes the root of the variance alone",
        "layers/batch_norm.py",
        "return (x * (var + eps).sqrt() + mean).to(y.dtype)",
        "return (x * var.sqrt() + mean).to(y.dtype)",
        "layers/test_invertible_layers.py::TestInverse::test_restores_x " + LAYERS,
    ),
    Fault(
        "the log-determinant of a leaky ReLU counts zeros as above",
        "layers/leaky_relu.py",
        "wide(x).le(0)",
        "wide(x).lt(0)",
        "layers/test_invertible_layers_details.py::TestAgreement::test_those_without_parameters " + LAYERS,
    ),
    Fault(
        "a wavelet swaps two of its channels",
        "layers/haar.py",
        "p, q, r, s = a + b, c + d,",
        "p, q, r, s = c + d, a + b,",
        "layers/test_invertible_layers_details.py::TestAgreement::test_haar " + LAYERS,
    ),
    Fault(
        "patches count twice in a log-determinant",
        "layers/patch_conv.py",
        "patches * log_abs_det(weight.flatten(1))",
        "2 * patches * log_abs_det(weight.flatten(1))",
        "layers/test_invertible_layers.py::TestLogDeterminant::test_is_that_of_the_jacobian_of_each_sample " + LAYERS,
    ),
    Fault(
        "a rotation is a reflection",
        "layers/weights.py",
        "return -torch.linalg.householder_product(",
        "return torch.linalg.householder_product(",
        "layers/test_invertible_layers_details.py::TestRotation::test_is_the_product_of_the_reflections " + LAYERS,
    ),
    Fault(
        "a log-determinant of half precision stays there",
        "layers/common.py",
        "dtype=torch.promote_types(first.dtype, torch.float32))",
        "dtype=first.dtype)",
        "layers/test_invertible_layers_details.py::TestHalfPrecision::test_log_determinants_are_float32 " + LAYERS,
    ),
    Fault(
        "autocast rounds what a layer computes",
        "layers/common.py",
        "with torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext():",
        "with nullcontext():",
        "recomputation/test_precision.py::TestUnderAutocast::test_layers_compute_in_full_precision " + LAYERS,
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
        "_divided(part * n + taken, d)",
        "_divided(part * n, d)",
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
    # What is held and given back
    Fault(
        "a tensor that was written to is taken as it was",
        "recomputation/slots.py",
        "if users is not None and version(users) == self._version:",
        "if users is not None:",
        "invertible/test_errors.py::TestChanges::test_texts invertible/test_errors.py " + AGAIN,
    ),
    Fault(
        "what is held may be written to",
        "recomputation/slots.py",
        "if self._version is not None and version(self._tensor) != self._version:",
        "if False:",
        "recomputation/test_written_since.py::TestWrittenSince " + AGAIN,
    ),
    Fault(
        "a block keeps what it can give back",
        "recomputation/slots.py",
        "self.block, self._held = block, None",
        "self.block = block",
        "invertible/test_memory.py::test_memory_does_not_grow_with_depth invertible/test_memory.py " + AGAIN,
    ),
    Fault(
        "blocks are inverted from the first one on",
        "recomputation/slots.py",
        "blocks.pop().invert()",
        "blocks.pop(0).invert()",
        "invertible/test_checkpoint.py::TestManyBlocks::test_do_not_run_into_the_limit_of_recursion "
        "invertible/test_checkpoint.py " + AGAIN,
    ),
    Fault(
        "a tensor that was given back has no error",
        "recomputation/slots.py",
        "slot.fill(xs[i], error)",
        "slot.fill(xs[i], 0.0)",
        "recomputation/test_probe.py::TestWrong::test_drift_is_told_as_such " + AGAIN,
    ),
    Fault(
        "arguments do not need the gradients that they needed",
        "recomputation/hooks.py",
        "return [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]",
        "return [t.detach().requires_grad_(True) for t, need in zip(tensors, needs, strict=True)]",
        "recomputation/test_tensors.py::TestStates::test_of_any_tensors_in_any_tree " + AGAIN,
    ),
    Fault(
        "what was computed again may be written before autograd asks for it",
        "recomputation/recording.py",
        "if version(self.tensor) != self.version:",
        "if False:",
        "recomputation/test_written_since.py::TestWrittenSince " + AGAIN,
    ),
    Fault(
        "an evaluation that saves less is not told",
        "recomputation/hooks.py",
        "        if recorded.misses():\n            raise",
        "        if False:\n            raise",
        "invertible/test_errors.py::TestChanges::test_an_f_that_does_something_else_when_evaluated_again " + AGAIN,
    ),
    # What is around an evaluation
    Fault(
        "random numbers are not drawn again",
        "recomputation/replay.py",
        "        self._set(self._states)\n        self._attributes",
        "        self._attributes",
        "recomputation/test_replay.py::TestRandomNumbers::test_are_drawn_once " + AGAIN,
    ),
    Fault(
        "the caller's random numbers go on from those of the block",
        "recomputation/replay.py",
        "                self._set(before)\n",
        "",
        "recomputation/test_replay.py::TestRandomNumbers::test_are_drawn_once " + AGAIN,
    ),
    Fault(
        "autocast is not what it was",
        "recomputation/replay.py",
        "others = [(kind, then) for kind, then in self._autocast if then != _autocast(kind)]",
        "others = []",
        "recomputation/test_precision.py::TestUnderAutocast::test_flows_have_the_gradients_of_plain_ones " + AGAIN,
    ),
    Fault(
        "attributes are not put back",
        "recomputation/replay.py",
        "                self._attributes.restore(everything)\n",
        "",
        "recomputation/test_attributes.py::TestState::test_goes_on_as_without_blocks " + AGAIN,
    ),
    Fault(
        "a state is not written as the first time",
        "recomputation/recall.py",
        "return tensor.clone() if self.written else tensor",
        "return tensor",
        "recomputation/test_state.py::TestState::test_running_statistics_are_updated_once " + AGAIN,
    ),
    Fault(
        "another module in the same place is taken for the first one",
        "recomputation/call.py",
        "if fn is not moment.fn or [t.shape for t in tensors] != [like.shape for like in moment.like]:",
        "if False:",
        "pairs/test_pair.py::TestShared " + AGAIN,
    ),
    Fault(
        "the inverse takes the moments of forward in their order",
        "recomputation/call.py",
        "            moment = self.moments[number - 1 - index]\n            tensors, form",
        "            moment = self.moments[index]\n            tensors, form",
        "invertible/test_checkpoint.py::TestFunctions::test_that_use_torch_func_themselves " + AGAIN,
    ),
    Fault(
        "an inverse that writes into y is not told",
        "recomputation/call.py",
        "if [version(t) for t in (*sources, *rest)] != before:",
        "if False:",
        "recomputation/test_state.py::TestState::test_an_inverse_that_writes_is_refused " + AGAIN,
    ),
    Fault(
        "the numbers that a known result drew are drawn by the next one",
        "recomputation/call.py",
        "            moment.after.rewind()  # whether it drew its random numbers or its result was known\n",
        "",
        "recomputation/test_replay.py::TestRandomNumbers::test_are_drawn_once " + AGAIN,
    ),
    # What is compared
    Fault(
        "an inverse that is none is not told",
        "recomputation/probe.py",
        "    return distance / (max(size, faint * whole) or whole or 1.0)\n",
        "    return 0.0\n",
        "recomputation/test_probe.py::test_numbers_that_change_while_the_caller_holds_x " + AGAIN,
    ),
    Fault(
        "sums of all entries are not compared",
        "recomputation/probe.py",
        "if was.sum is None or came.sum is None:",
        "if True:",
        "recomputation/test_drift.py::TestHidden::test_one_sample_of_many_is_not_missed " + AGAIN,
    ),
    # Inside of torch.func
    Fault(
        "gradients of shared functions are pulled in the order of forward",
        "recomputation/maps.py",
        "for index in sorted(self._graphs, reverse=True):",
        "for index in sorted(self._graphs):",
        "invertible/test_checkpoint.py::TestFunctions::test_that_use_torch_func_themselves " + AGAIN,
    ),
    Fault(
        "what has no influence has a gradient of zeros",
        "recomputation/maps.py",
        "idle.update(i for i, g in zip(wanted, found, strict=True) if g is None)",
        "",
        "invertible/test_modules.py::test_what_has_no_influence_has_no_gradient invertible/test_modules.py " + AGAIN,
    ),
    Fault(
        "each entry of a batch draws the same numbers",
        "recomputation/maps.py",
        "in_dims=(list(dims), self._rest), randomness=self._randomness)",
        'in_dims=(list(dims), self._rest), randomness="same")',
        "recomputation/test_replay.py::TestRandomNumbers::test_inside_of_torch_func " + AGAIN,
    ),
]
