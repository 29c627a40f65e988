"""Faults in which outputs share a pass."""

from tests.mutants.fault import Fault

REPEATED = "sparsity/test_structure_repeated.py"

FAULTS = [
    # Parameters that are repeated for the samples
    Fault(
        "all repeated entries have one label",
        "sparsity/pattern.py",
        "(out, *(x for x in beside if x.shape == out.shape))",
        "(out,)",
        REPEATED,
    ),
    # Products, chunks, sparsity
    Fault(
        "columns whose boxes touch share a pass",
        "sparsity/colouring.py",
        "if end < start)",
        "if end <= start)",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "cells that are filled up send a position back again, where nothing is read",
        "sparsity/cells.py",
        "turned[-1] = 0",
        "turned[-1] = turned[0]",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "cells that are filled up read a position again",
        "sparsity/cells.py",
        "        numbers = torch.where(positions == many, last, numbers)\n",
        "",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
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
        "what a recurrent layer gives depends on its states alone, and not on the gates",
        "sparsity/pattern.py",
        "if (elsewhere := seen.function.entry.elsewhere) is not None:",
        "if (elsewhere := None) is not None:",
        "sparsity/test_structure_recurrent.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "cells of a parameter near the outputs are those of the others",
        "sparsity/execute.py",
        '"frame": reach.frame}',
        '"frame": stage.reaches[0].frame}',
        "sparsity/test_structure_near.py::test_it_is_that_of_all_columns sparsity",
    ),
    Fault(
        "all samples send back what the first one does, cell by cell",
        "sparsity/cells.py",
        "* n + sample[:, None, None]",
        "* n",
        "sparsity/test_structure_near.py::test_it_is_that_of_all_columns sparsity",
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
        "factors of a last layer are those of a Hessian that couples other groups",
        "sparsity/closed.py",
        "bool(((met < 0) | (met == met.amax(0))).all())",
        "True",
        "sparsity/test_structure_kflr.py::test_heads_of_tokens sparsity",
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
]
