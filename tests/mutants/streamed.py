"""Faults in how the batches of a data set are joined."""

from tests.mutants.fault import Fault

BATCHES = "test_streamed.py::test_batches_give_what_all_samples_at_once_do test_streamed.py"
PRODUCTS = "test_streamed_products.py::test_batches_give_what_all_samples_at_once_do test_streamed_products.py"

STREAMED = [
    Fault(
        "the batches of a mean count alike",
        "evaluation/weights.py",
        "return part.n if self.mean else 1",
        "return 1",
        "test_streamed.py::TestScale " + BATCHES,
    ),
    Fault(
        "columns of a square root grow as the loss does",
        "reductions/quantity.py",
        "return by if self.kind.first_order else by**0.5",
        "return by",
        "test_streamed.py::TestScale " + BATCHES,
    ),
    Fault(
        "the basis is that of the last batch",
        "evaluation/sweep.py",
        "strict=True) if self.n else ():",
        "strict=True) if self.n and self.phase >= engine.quantities[0].reduction.sweeps - 1 else ():",
        BATCHES,
    ),
    Fault(
        "eigenvalues are those of the sum where the loss is a mean",
        "reductions/eigenbasis.py",
        "return basis, None if values is None else values * by**2",
        "return basis, values",
        BATCHES,
    ),
    Fault(
        "a second sweep may be of other samples",
        "evaluation/sweep.py",
        "if self.expected not in (None, self.n):",
        "if False:",
        "test_streamed.py::TestTwoSweeps",
    ),
    Fault(
        "parameters without factors are forgotten in the second sweep",
        "evaluation/sweep.py",
        "            fold.found = replace(fold.found, refused=self.refused)\n",
        "",
        "test_streamed.py::TestTwoSweeps",
    ),
    Fault(
        "each batch draws what the first one drew",
        "loss/drawn.py",
        "for i in range(first, first + n)]",
        "for i in range(n)]",
        "test_streamed.py::TestDrawn",
    ),
    Fault(
        "the generator gives the same key again",
        "loss/drawn.py",
        "return int(torch.randint(2**31, (), generator=generator, device=generator.device))",
        "return generator.initial_seed() % 2**31",
        "test_streamed.py::TestDrawn",
    ),
    Fault(
        "the mean of a loss is once in an empirical Fisher matrix",
        "products/streamed.py",
        "** self.of.product.degree",
        "** 1",
        PRODUCTS,
    ),
    Fault(
        "samples that products mix are joined",
        "products/streamed.py",
        "            given.check_apart()\n",
        "",
        "test_streamed_products.py::TestWhatIsRefused",
    ),
    Fault(
        "products are added in the precision of the parameters",
        "products/streamed.py",
        "torch.promote_types(x.dtype, torch.float32)",
        "x.dtype",
        "test_streamed_products.py::test_sums_are_kept_in_more_digits_than_halves_have",
    ),
    Fault(
        "each vector has columns of its own",
        "products/streamed.py",
        "key=self.keys[0],",
        "key=key_of(drawing.generator),",
        "test_streamed_products.py",
    ),
    Fault(
        "a checkpoint names a batch that is not in it",
        "evaluation/course.py",
        "self._prints[: max(self._known, self.record.done)]",
        "self._prints",
        "test_streamed_checkpoint.py::TestBrokenOff",
    ),
    Fault(
        "batches are told apart by their shapes",
        "evaluation/fingerprint.py",
        "if isinstance(leaf, torch.Tensor) and leaf.numel() and not leaf.is_meta:",
        "if False:",
        "test_streamed_checkpoint.py::TestFingerprint test_streamed_checkpoint.py",
    ),
    Fault(
        "a checkpoint forgets which loss it has seen to be a mean",
        "visits.py",
        "            self.sweep.weights = first.weights",
        "            pass",
        "test_streamed_checkpoint.py::test_every_statistic_goes_on_as_if_nothing_had_happened",
    ),
    Fault(
        "eigenvectors are forgotten that a checkpoint has",
        "reductions/quantity.py",
        'if saved["known"] is not None:',
        "if False:",
        "test_streamed_checkpoint.py::test_every_statistic_goes_on_as_if_nothing_had_happened",
    ),
    Fault(
        "a second sweep of other batches goes on",
        "evaluation/course.py",
        "before, self._known = self.record if self.several else None, len(self._prints)",
        "before, self._known, self._prints = self.record if self.several else None, 0, []",
        "test_streamed_checkpoint.py::TestTwoSweeps",
    ),
    Fault(
        "what comes behind a checkpoint draws as the first batch does",
        "evaluation/course.py",
        "self._note(done=number + 1, n=self._n)",
        "self._note(done=number + 1, n=0)",
        "test_streamed_checkpoint.py::test_every_statistic_goes_on_as_if_nothing_had_happened",
    ),
    Fault(
        "a checkpoint is of any vector",
        "products/streamed.py",
        ", **named(product.vector, v)}",
        "}",
        "test_streamed_checkpoint.py::TestProducts",
    ),
    Fault(
        "rows of a mean keep the scale of the sum",
        "visits.py",
        "if self.sweep.weights.mean:",
        "if False:",
        "test_streamed_out.py::test_it_is_the_result",
    ),
]
