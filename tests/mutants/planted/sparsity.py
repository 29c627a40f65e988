"""Faults in which outputs share a pass."""

from tests.mutants.fault import Fault

FAULTS = [
    Fault(
        "columns whose boxes touch share a pass",
        "sparsity/colouring.py",
        "if end < start)",
        "if end <= start)",
        "sparsity/test_structure.py::test_it_is_that_of_all_columns sparsity",
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
]
