"""Faults in which outputs share a pass, in the core."""

from tests.mutants.fault import Fault

DRAWN, TAKEN = "structure/test_columns.py::test_it_is_that_of_all_columns_drawn", "structure/test_taken.py"

FAULTS = [
    Fault(
        "labels begin again at each site",
        "structure/look.py",
        "if rows is None or not bool((core(rows) > NONE).any()):",
        "if True:",
        f"{TAKEN}::test_sites_beside_and_behind_each_other structure",
    ),
    Fault(
        "centres of labels lie between whole numbers",
        "structure/look.py",
        "((base[1] - base[0]) / 2).floor()",
        "(base[1] - base[0]) / 2",
        f"{TAKEN}::test_sites_beside_and_behind_each_other structure",
    ),
    Fault(
        "positions are told apart by one of their channels",
        "structure/look.py",
        "                rows = _over_outs(rows, entries)\n",
        "                pass\n",
        f"{DRAWN} structure",
    ),
    Fault(
        "cells that are filled up send a position back again",
        "structure/look.py",
        "turned[:, :-1].copy_(d.unflatten(0, (classes, v)).permute(2, 4, 0, 1, 3, 5))",
        "turned.copy_(torch.cat([x := d.unflatten(0, (classes, v)).permute(2, 4, 0, 1, 3, 5), x[:, :1]], 1))",
        f"{DRAWN} structure",
    ),
    Fault(
        "all samples send back what the first one does, cell by cell",
        "structure/look.py",
        "turned[i].flatten(0, 1)",
        "turned[0].flatten(0, 1)",
        f"{DRAWN} structure",
    ),
    Fault(
        "rows of a table that a cell picks twice are squared one by one",
        "structure/look.py",
        "(number * use.shape[0] + i).flatten().unique(return_inverse=True)",
        "(number * use.shape[0] + i).flatten(), torch.arange(i.numel())",
        f"{TAKEN}::test_a_table_is_told_apart_by_the_rows_that_are_read {DRAWN} structure",
    ),
    Fault(
        "samples share a triangle though their columns differ",
        "structure/narrow.py",
        "count = 1 if runs == 1 and self.source.alike else n",
        "count = runs",
        f"{DRAWN} structure",
    ),
    Fault(
        "a wrong derivative above a narrow layer is taken",
        "structure/narrow.py",
        "return joined(found, 1) if check.right else None",
        "return joined(found, 1)",
        "structure/test_columns.py::test_a_wrong_derivative_is_noticed_in_every_block structure",
    ),
    Fault(
        "a bottleneck is one though another path goes around it",
        "structure/narrow.py",
        "if own == open_edges and len(own) == 1 and",
        "if len(own) == 1 and",
        f"{DRAWN} structure",
    ),
    Fault(
        "one sample stands for a batch in which f runs other operations",
        "structure/plan.py",
        "        if operations(z) != operations(self.x):\n            return False\n",
        "",
        "structure/test_alone.py::test_of_branches_that_one_sample_alone_would_not_take structure",
    ),
    Fault(
        "columns of Kronecker factors share a position",
        "structure/plan.py",
        'one=self.shortcuts == "positions"',
        "one=False",
        f"{TAKEN}::test_factors_of_a_vector_with_an_entry_for_each_place structure",
    ),
    Fault(
        "factors of a last layer are those of a Hessian that couples other groups",
        "structure/plan.py",
        "bool(((met >= 0) & (met != met.amax(0))).any())",
        "False",
        "structure/test_kfac.py::test_heads_of_tokens structure",
    ),
    Fault(
        "the diagonal of a sure softmax cancels",
        "structure/groups.py",
        "others = torch.where(largest > 0, (p * (1 - largest)).sum(1, keepdim=True), 1 - p)",
        "others = 1 - p",
        "structure/test_columns.py::test_saturated_pixels_in_closed_form_and_single_precision structure",
    ),
    Fault(
        "samples are alike whose losses are not",
        "structure/groups.py",
        "bool((h == h[:1]).all())",
        "True",
        f"{DRAWN} structure",
    ),
    Fault(
        "groups with equal boxes are one",
        "structure/plan.py",
        "(klass == k) & (copy == c) for k in some for c in range(copies)",
        "(klass == k) & (copy <= c) for k in some for c in range(copies)",
        f"{DRAWN} structure",
    ),
    Fault(
        "columns whose boxes touch share a pass",
        "structure/groups.py",
        "if end < start)",
        "if end <= start)",
        "structure/test_columns.py::test_it_is_that_of_all_columns structure",
    ),
]
