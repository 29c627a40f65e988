"""Faults in how processes join what they have kept."""

from tests.mutants.fault import Fault

ALL = "test_distributed.py::test_all_processes_give_what_all_samples_at_once_do[2]"
FAULTS = "test_distributed.py::TestFaults"

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
        "work.visit(args, begun.before + n)",
        "work.visit(args, n)",
        ALL,
    ),
    Fault(
        "a process without samples does not know that the loss is a mean",
        "evaluation/across.py",
        "        sweep.weights.mean = bool(like.mean)\n",
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
        "    if like.mean is not None:\n",
        "    if False:\n",
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
        "distributed.py",
        "        same([said for said, _, _ in each])\n",
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
]
