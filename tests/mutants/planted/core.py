"""Faults in the core of the statistics."""

from tests.mutants.fault import Fault

FOLLOWED, AXES, SILENT = (f"core/test_{name}.py" for name in ("followed", "axes", "never_silently_wrong"))
RULES = f"{AXES}::test_rules_give_what_the_probe_sees"
LOOP = f"{SILENT}::test_a_result_is_that_of_the_loop"
RESORT = "core/test_resort.py"
FIRST = f"{FOLLOWED}::test_first_order_statistics_are_those_of_the_loop"

FAULTS = [
    Fault(
        "a softmax along the samples keeps them apart",
        "core/axes.py",
        "if len(data) > 1 or not isinstance(dim, int) or dim % x.ndim - x.ndim == axis[0]:",
        "if len(data) > 1 or not isinstance(dim, int):",
        f"{RULES} {SILENT}",
    ),
    Fault(
        "a reduction with keepdim moves the samples",
        "core/axes.py",
        "return (at if keep else at + sum(d > at for d in dims), outer, inner)",
        "return (at + sum(d > at for d in dims), outer, inner)",
        f"{RULES} {AXES}",
    ),
    Fault(
        "a dim of size one is not counted in an index",
        "core/axes.py",
        "        if i is None:\n            kept += 1\n",
        "        if i is None:\n            kept += 0\n",
        RULES,
    ),
    Fault(
        "a batch norm in train mode keeps samples apart",
        "core/axes.py",
        'if option(args, kwargs, 5, "training", False):',
        'if option(args, kwargs, 6, "training", False) is True:',
        f"{RULES} {SILENT}",
    ),
    Fault(
        "channels of one image are taken for samples",
        "core/axes.py",
        'if args[0].ndim != option(args, kwargs, 1, "weight").ndim:',
        "if False:",
        f"{LOOP}[samples_as_channels-plain]",
    ),
    Fault(
        "the probe looks at the constants of one call",
        "core/probe.py",
        'if not isinstance(x, torch.Tensor) or (drawing == "floats" and not followed):',
        "if not isinstance(x, torch.Tensor) or not followed:",
        f"{LOOP}[solved_by_a_constant-plain]",
    ),
    Fault(
        "what a parameter met may be written later",
        "core/uses.py",
        "        if version(self.a) != self.version:\n",
        "        if False:\n",
        f"{LOOP}[input_in_place-plain]",
    ),
    Fault(
        "an index may be written later",
        "core/uses.py",
        "        if version(self.index) != self.version:\n",
        "        if False:\n",
        f"{LOOP}[index_in_place-plain]",
    ),
    Fault(
        "a written view is not looked at",
        "core/run.py",
        "            if type(before) is Node or before.axis != axis or",
        "            if type(before) is Node or",
        f"{LOOP}[view_and_then_its_base-plain]",
    ),
    Fault(
        "a graph that comes by an unseen way is let pass",
        "core/run.py",
        "elif type(known) is not Node and x.requires_grad and not known.graph:",
        "elif type(known) is Node and x.requires_grad and not known.kind:",
        f"{LOOP}[filled_and_viewed-plain]",
    ),
    Fault(
        "the leaves may get a gradient",
        "core/run.py",
        "if any([g is not None for g in of_leaves]):",
        "if all([g is not None for g in of_leaves]) and not of_leaves:",
        f"{LOOP}[added_in_place-plain]",
    ),
    Fault(
        "a bias is not noted beside its weight",
        "core/run.py",
        "        self.uses += uses\n",
        "        self.uses += uses[:1]\n",
        f"{FIRST}[MLP-float64]",
    ),
    Fault(
        "a regulariser counts whole for each sample",
        "core/uses.py",
        "run.taken((self.d / run.n).unsqueeze(1)",
        "run.taken(self.d.unsqueeze(1)",
        f"{LOOP}[mean_and_regulariser-plain]",
    ),
    Fault(
        "samples are summed without their weights",
        "core/uses.py",
        "d = d if weights is None else d * weights.to(d.dtype)[:, None, None, None]",
        "d = d",
        f"{FIRST}[MLP-float64]",
    ),
    Fault(
        "a variance is not centred",
        "core/shares.py",
        "total, total, value=-1 / n)",
        "total, total, value=-1 / (n + 1))",
        f"{FIRST}[MLP-float32]",
    ),
    Fault(
        "rows of a table that no sample visits have no spread",
        "core/shares.py",
        "apart + (n - visits) * mean.square()",
        "apart",
        FIRST,
    ),
    Fault(
        "sums that cancel stay in float32",
        "core/shares.py",
        "factors[1].double(), factors[2][0].double()",
        "factors[1], factors[2][0]",
        f"{FOLLOWED}::test_a_variance_beside_a_large_mean_keeps_its_digits",
    ),
    Fault(
        "a mean of criteria has columns of a sum",
        "core/columns.py",
        "k = self.slope / x.numel() if mean else self.slope",
        "k = self.slope",
        f"{FOLLOWED}::test_the_diagonal_of_the_ggn_is_the_dense_one",
    ),
    Fault(
        "an output may be written before its loss",
        "core/columns.py",
        "            return version(z) == self.version\n",
        "            return True\n",
        f"{SILENT}::test_the_diagonal_of_the_ggn_is_the_dense_one",
    ),
    Fault(
        "the reciprocal of a mean is a mean",
        "core/tables.py",
        " - {T.__rdiv__, T.__rtruediv__}",
        "",
        f"{LOOP}[one_over_a_sum-plain]",
    ),
    Fault(
        "single samples are taken by their values alone",
        "core/resort.py",
        "if _same(each := _slopes(x, copies), slopes, dtype)]",
        "if (each := _slopes(x, copies))]",
        f"{RESORT}::test_samples_that_mix_are_refused",
    ),
    Fault(
        "a loss of zero is the mean of its samples",
        "core/resort.py",
        "        if len(found) > 1:  #",
        "        if len(found) > 2:  #",
        f"{RESORT}::test_zeros_do_not_say_whether_they_are_a_mean_or_a_sum",
    ),
    Fault(
        "single samples draw other numbers than the batch",
        "core/resort.py",
        "        set_states(before)\n        try:",
        "        try:",
        f"{RESORT}::test_single_samples_are_those_of_the_loop",
    ),
    Fault(
        "rows are taken of samples that meet unseen",
        "core/resort.py",
        "            if id(node) in self.marked:\n",
        "            if False:\n",
        f"{RESORT}::test_rows_of_samples_that_mix_are_refused",
    ),
    Fault(
        "a tensor that f closes over is a constant",
        "core/resort.py",
        "    return out, aux, _closed_over(out, [*leaves, *given.leaves])",
        "    return out, aux, False",
        f"{RESORT}::test_a_tensor_that_is_closed_over_has_a_derivative",
    ),
]
