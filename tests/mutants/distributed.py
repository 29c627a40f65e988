"""Faults in how processes join what they have kept."""

from tests.mutants.fault import Fault

ALL = "test_distributed.py::test_all_processes_give_what_all_samples_at_once_do[2]"
MODULES = "test_sharded_modules.py::TestFunctional"
FAULTS = "test_distributed.py::TestFaults"
RESUMED = "test_distributed_checkpoint.py::test_processes_go_on_as_if_nothing_had_happened"

DISTRIBUTED = [
    Fault(
        "the means of the processes are taken for the same",
        "reductions/gradients.py",
        "Sums([centred + apart.square() * n])",
        "Sums([centred])",
        ALL,
    ),
    Fault(
        "a process does not know how many samples come before its own",
        "distributed.py",
        "work.draw_by(course.record.keys, begun.before)",
        "work.draw_by(course.record.keys)",
        ALL,
    ),
    Fault(
        "a process without samples does not know that the loss is a mean",
        "evaluation/across.py",
        "    known.mean = bool(each[first])\n",
        "",
        ALL,
    ),
    Fault(
        "the upper triangle of a factor is forgotten",
        "reductions/exchange.py",
        "return found + found.tril(-1).mT",
        "return found",
        ALL,
    ),
    Fault(
        "each process has eigenvectors of the parameters that were dealt to it only",
        "evaluation/across.py",
        "    for part, refused in each:\n",
        "    for part, refused in each[processes.rank : processes.rank + 1]:\n",
        ALL,
    ),
    Fault(
        "weighted means of single batches are taken for means",
        "evaluation/across.py",
        '    processes.told("scale", looked)\n',
        "",
        FAULTS,
    ),
    Fault(
        "each process puts the batches of others where its own are",
        "tiles.py",
        "                start += len(sizes)\n",
        "",
        ALL,
    ),
    Fault(
        "parameters may differ",
        "part.py",
        "        same([alike for alike, _, _ in each])\n",
        "",
        FAULTS,
    ),
    Fault(
        "the processes do not say at which step they are",
        "evaluation/processes.py",
        "            if step != at\n",
        "            if False\n",
        FAULTS,
    ),
    Fault(
        "a process goes on in the second sweep where others are in the first",
        "evaluation/checkpoint.py",
        "while found is not None and found.phase > phase:",
        "while False:",
        RESUMED,
    ),
    Fault(
        "processes go on with eigenvectors of their own",
        "evaluation/checkpoint.py",
        "            phase -= 1\n",
        "            pass\n",
        RESUMED,
    ),
    Fault(
        "the files of two calls are taken for one",
        "evaluation/checkpoint.py",
        "if any(head.mark != written[0].mark for head in written):",
        "if False:",
        RESUMED,
    ),
    Fault(
        "a process that has lost its file draws other columns",
        "evaluation/checkpoint.py",
        "mark, keys = written[0].mark, written[0].keys",
        "mark, keys = written[0].mark, self.keys",
        RESUMED,
    ),
    Fault(
        "a file is removed before all have the result",
        "part.py",
        "if not self.course.keeps:",
        "if True:",
        RESUMED,
    ),
    Fault(
        "rows of a mean are divided by the samples of one process",
        "visits.py",
        "self.rows.scaled(self.n, 1 / self.of_all)",
        "self.rows.scaled(self.n, 1 / max(1, self.n))",
        RESUMED,
    ),
    Fault(
        "a result that has parameters' entries is not laid out as they are",
        "reductions/gradients.py",
        "several, trees = True, 2",
        "several, trees = True, 1",
        ALL,
    ),
    Fault(
        "the placements of a block product do not know that vectors come in front",
        "evaluation/layout.py",
        "return type(placement)(placement.dim + lead, **options)",
        "return placement",
        ALL,
    ),
    Fault(
        "a part of a result keeps the whole alive",
        "evaluation/layout.py",
        "own.to_local().clone()",
        "own.to_local()",
        ALL,
    ),
    Fault(
        "replicas of a parameter may differ",
        "evaluation/layout.py",
        "    same(said)  # replicas may differ\n",
        "",
        FAULTS,
    ),
    Fault(
        "a mesh may have other processes than the group",
        "evaluation/layout.py",
        "    _check_meshes(processes, each)\n",
        "",
        FAULTS,
    ),
    Fault(
        "parameters may come in another order",
        "evaluation/processes.py",
        "            if own != first:\n",
        "            if False:\n",
        FAULTS,
    ),
    Fault(
        "a vector is looked at by the process that has it, not by all",
        "products/along.py",
        "found, each = self.processes.told(name, looked)",
        "found, each = ALONE.told(name, looked)",
        FAULTS,
    ),
    Fault(
        "the hooks of fully_shard stay",
        "_sharded.py",
        "if not _of_state(hook)",
        "if True",
        MODULES,
    ),
    Fault(
        "methods stay as fully_shard has made them",
        "_sharded.py",
        "return x.__wrapped__ if made_by",
        "return x if made_by",
        MODULES,
    ),
]
