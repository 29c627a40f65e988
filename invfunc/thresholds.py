"""The numbers that choose between two ways to one result: what is on either side, and what was measured of it.

The values come from an earlier machine; "here" below tells from which size on the second way was faster on one core of
a Xeon (Sapphire Rapids, 260 MiB of shared cache, torch 2.13), in float32 where nothing else is told.
Each is read when it is used, so that `tests/crossed.py` can set all of them: laws hold on both sides.

Not here are tolerances of rounding, and that half precision is added up in float32, which is always done.
"""

import torch

# Products of matrices (contract.py)

ORDERS = 6
"""Tensors from which on opt_einsum finds a good order of contraction in place of the best one, which takes it longer
with each of them."""

FORMED = 16
"""Multiplications that forming an entry of a per-sample gradient costs: it goes through memory four times. Beside them
stand those of summing its squares without forming it. Of a matrix 128 x 128 in float64 this crosses at 96 positions,
and so do the times here."""

CANCELS = (torch.float32,)
"""Dtypes of which products of positions with positions are added up in float64, since they cancel, but for norms of
which it is seen that they do not (GHOST_CANCELS): a limit of rounding.
Wider ones have digits to spare; narrower ones are float32 already."""

DOUBLE = 4
"""Factor by which that is slower than in float32, with the copies. Here 2.6 to 9 near where the ways cross, for
matrices from 64 x 64 to 1024 x 256; with 2, norms took up to 1.7 times as long."""

GHOST_CANCELS, GHOST_ON = 4, ("cpu",)
"""Most times as much as the square of a per-sample gradient that those of its factors may be, multiplied, for each
position, where norms come from products of positions in float32: beyond it in float64, or from what is formed. A limit
of rounding: below it the largest relative error was 1e-6, of 1500 factors made to cancel; those of a GPT and a ResNet
have 0.2 to 2.2, and errors of 2e-7. Nobody waits for what is looked at on a CPU."""

GHOST_PRODUCTS = 3
"""Tensors of such products that are there at once; no more memory than a per-sample gradient takes."""

AT_ONCE = 2**23
"""Multiplications that form all per-sample gradients below which their norms come of these: a few operations, where the
choice of another way takes as long as 10 to 20 do. Here 0.18 ms against 0.42 at 2^21, and 0.6 against 0.5 at 2^23.5."""

HALVED = 64
"""Positions from which on such norms leave out the products of the first half with the last one, which are those of the
last with the first: a quarter of all. Here 0.86 of the time at 64 positions, 0.75 to 0.85 from 96 to 256."""

ADDED_POSITIONS, ADDED_NUMBERS = 256, 2**20
"""Positions r and numbers in x from which on the products of the samples are added up one by one, without a copy:
2.5 times as fast here at 2^23 numbers. It is from 2^16 numbers and 16 positions on with 64 rows, but not with 576."""

ADDED_ROWS = 2**14
"""Entries of a per-sample gradient from which on the squares of many are added up one by one: in a tenth of the time of
their sum at 2^17 entries, as long as it at 2^14."""

MIRRORED = 256
"""Rows of the blocks of a Gram matrix, of two blocks or more, that are computed up to its diagonal and mirrored: 0.8 to
0.85 of the time here with 768 to 1024 columns of 1024 positions."""

ADDED_ON = ("cpu",)
"""Devices on which they are. On an H200 that takes 2 to 14 times as long as a product of the copy, from 2^20 numbers
on."""

HUGE_PAGES, HUGE_ON = 32 * 2**20, ("cpu",)
"""Bytes of a result from which on it is written to fresh memory in huge pages (`_torch.values.room`): malloc takes so
much from the system each time. Here a third of the time at 32 MiB, and as fast below."""

# Columns that are pulled back (core/evaluate.py, structure/plan.py)

APART, APART_ON = 2**16, ("cpu",)
"""Numbers of a column at the largest site from which on columns are pulled back one by one, not under vmap: oneDNN's
convolutions want one batch dimension, and there is nothing to gain from more at once. Here it takes 1.03 to 1.1 times
as long as vmap from 2^12 to 2^20. Statistics that add up columns take no more than one at a time then, on every
device, which saves memory."""


GROUPED = 2**24
"""Numbers of the cotangents of all columns that are there at once; more columns come in groups. A limit of memory."""
HOOKED = 2**20
"""Numbers of the cotangents of one column from which on that is done for it, too. Below, hooks take up to a tenth of
the call here."""

CACHE, ELSEWHERE = {"cpu": 6 * 2**20}, 2**26
"""Most numbers that an intermediate tensor may have, the budget of a block: what a CPU keeps in its cache, what keeps
another device busy. Here, with a larger cache, 2^24 is 2 % faster, 2^20 takes 1.4 times as long."""


SHARES = 4
"""Number of times that the per-sample gradients of a block fit the budget: they are written, squared and added up in
it. So are the operands of a block whose squares are taken cell by cell."""

KEPT_SHARES = 16
"""Factor by which a per-sample gradient that is kept is smaller than its cotangent, where a weighted sum may follow the
norms: so little memory, and of a GPT's biases and norm layers half of the time."""


# Sums of per-sample gradients of convolutions (core/uses.py)

TOTAL_DTYPES, TOTAL_ON = (torch.float32, torch.float64), ("cpu",)
"""Devices on which they are the convolution's own weight gradient, of cotangents times weights: others may round to
fewer bits than a matrix product, and narrower numbers are added up in float32."""

TOTAL_POSITIONS = 1
"""Positions of all samples, for each row of the weight, from which on they are. It takes a fifth to two thirds of the
time of patches and a product here, but 1.3 times as long with 512 rows and 256 positions."""
ALONE = 2**22
"""Multiplications of one sample from which on its gradient is the weight gradient of the convolution, too, where the
positions of a sample allow it: 0.5 to 0.95 of the time of patches and products. From 2^21 here, except those of
few channels within a network."""

# Gram matrices of patches (linear_algebra/contract.py)

DISPLACED_DTYPES, DISPLACED_ON = (torch.float32, torch.float64), ("cpu",)
"""Devices on which they may come from displacements: others may round convolutions to fewer bits than products."""

UNFOLD, ASSEMBLE, CALL, SLICES = 60, 150, 4_000_000, 10_000_000
"""Costs of an entry of the patches, one of the result, a product, and reading slices, in multiplications; the cheaper
way is taken. With 32 samples of 16 x 16 pixels and a kernel 3 x 3 it is displacements from 8 channels on, as the times
are here: 3 times as fast at 32 channels."""

EXACT = 4096
"""Positions that are summed at once: a weight gradient adds them one by one, which in float32 rounds 1e-5 off at 50000
(here 5e-7 at 4096). A limit of rounding."""

# Shortcuts by the structure of a function (sparsity)

FEW = 16
"""Columns below which no structure is looked for. Here a small auto-encoder gains from 144 columns on."""

PAYS = 0.8
"""The estimated part of the work of all columns below which a shortcut is taken: estimates are rough."""

LOOK, LOOK_ENTRY, LOOKS = 2.0**24.5, 2.0**9, 16
"""Costs to follow a site, and an entry there, in multiplications; what must be at stake, in such costs, so that
to find nothing costs little."""

LOOK_ON = {"cuda": 16}
"""Factor by which that grows on a device, which multiplies faster than Python looks. On an H200 all columns of a
U-Net at 16 pixels take 0.9 of the time of its structure, and those of a dense auto-encoder a fifth."""

CLASS, COLUMN, SHARED = 2.0**22, 2.0**18, 1.3
"""Costs of the work around the products, in multiplications: to take out a class at a site, to pull a column back;
and how many times as much as by itself a column costs that shares its pass."""

FACTORED_COST = 3.0
"""Multiplications for each number of a triangle and column of it. Here 1 to 3: 64 matrices 200 x 64 take 8 ms."""

NARROWER, NARROWEST = 0.7, 3
"""A narrow layer has to have so much less entries than what comes before; so many of the narrowest are tried, and all
their combinations."""

TOGETHER = 2**19
"""Numbers that the columns of one shared pass have at the largest site, if one column has not more; the budget, if that
is less. Here the fastest, up to 2^22."""

FACTORED = 2**28
"""Numbers that are factored at a narrow layer at most, else it is left out: a limit of memory."""

MOVED = 2**24
"""Numbers that are kept at once of what is moved forwards from a narrow layer: those to some of its blocks, for which
all are computed. A limit of memory."""


# Heads of language models (operations/forms.py, core/columns.py, products)

LOGITS = 2**22
"""Numbers of a tensor from which on it is not to be there several times: a cross entropy is taken for some rows at a
time, and a linear layer has a derivative of its own. A limit of memory."""


# Losses without known structure (loss/hessian.py, products/curvature.py)

HESSIAN = 2**28
"""Numbers of a joint Hessian above which it is refused, instead of filling the memory."""

CHECKED = 2**24
"""Numbers of a Hessian up to which a product looks whether it is convex, which takes all of it."""

# Eigenvectors of a curvature matrix (products/sample_space.py)

DIRECTIONS = 16
"""Number of those that are pulled back at once, each in the memory of a gradient."""

WIDENED = 2**24
"""Numbers of vectors that are there in float64 at once, if these are not fewer than so many directions: a limit of
memory."""


# Budgets of memory (chunks.py)

TRIED_PASSES = 256
"""Chunks into which columns are divided at most: of those that are not drawn nobody knows the number beforehand."""

# Plans (plans/recorder.py, plans/calls.py)

FOLDED = 2**16
"""Numbers of a tensor that depends on no argument up to which a plan keeps it, and does not compute it again."""

COMPARED_NUMBERS = 2**12
"""Numbers of a list that is read (`.tolist()`) up to which a plan compares them in each call."""

OPERATIONS = 20_000
"""Operations of a plan; a call that takes more is not kept. A limit of memory."""

PLANS, SHAPES = 32, 8
"""Plans that a function keeps, the latest ones; for how many shapes it warns."""

MISSES = 4
"""Calls that were not as the plan has them, after which there is none, unless more have been."""
