"""The numbers that choose between two ways to one result, and what is on either side.

Each is read when it is used, so that tests can set it.

Not here are tolerances of rounding, and that half precision is added up in float32, which is always done.
"""

import torch

# Products of matrices (jacobian/contract.py)

NARROW = 128
"""Columns of a matrix product below which the transpose of the other order is computed."""

ORDERS = 6
"""Tensors from which on opt_einsum takes a good order of contraction in place of the best one: they are 945 for 6."""

FORMED = 16
"""Multiplications that forming an entry of a per-sample gradient costs: it goes through memory four times. Beside them
stand those of summing its squares without forming it."""

CANCELS = (torch.float32,)
"""Dtypes of which products of positions with positions are added up in float64, since they cancel: a limit of rounding.
Wider ones have digits to spare; narrower ones are float32 already."""

DOUBLE = 2
"""How many times slower than in float32 that is."""

GRADIENT_DTYPES, GRADIENT_ON = (torch.float32,), ("cpu",)
"""Where `sum_br x[b, k, r] x[b, l, r]` is the weight gradient of a convolution of x with itself: oneDNN's product needs
no copy with the samples beside the positions. Elsewhere MKL's product of a copy."""

GRADIENT_SAMPLES = 16
"""Samples b from which on it is."""

GRADIENT_NUMBERS = 3 * 2**20
"""Numbers in x below which it is; oneDNN's product of more is the slower one."""

GRADIENT_ROWS, GRADIENT_BLOCKS = 256, 3
"""Rows k from which on only the lower half of it is computed, in so many blocks."""

MIRRORED_POSITIONS = 256
"""Samples times positions, b r, below which a Gram matrix is one plain product."""

MIRRORED_ROWS, MIRRORED_BLOCKS = 96, 6
"""Otherwise its lower half is computed in blocks of at least so many rows, at most so many, and mirrored."""

ADDED_POSITIONS, ADDED_NUMBERS = 256, 2**20
"""Positions r and numbers in x from which on the products of the samples are added up one by one, without a copy."""

HUGE_PAGES, HUGE_ON = 32 * 2**20, ("cpu",)
"""Bytes of a result from which on it is written to fresh memory in huge pages (`_pages.py`): malloc takes so much from
the system each time."""

# Columns that are pulled back (jacobian/pullback.py, jacobian/engine.py, jacobian/runs.py)

APART, APART_ON = 2**16, ("cpu",)
"""Numbers of a column at the largest site from which on columns are pulled back one by one, not under vmap: oneDNN's
convolutions want one batch dimension, and there is nothing to gain from more at once. (Statistics that add up columns
take no more than one at a time then, on every device.)"""

CACHE, ELSEWHERE = {"cpu": 6 * 2**20}, 2**26
"""How many numbers an intermediate tensor may have, the budget of a block: what a CPU keeps in its cache, what keeps
another device busy."""

BUSY = 2**24
"""The budget above which blocks of samples are not made: such a device wants the whole batch."""

BLOCK_BATCH, BLOCK_COLUMNS = 3, 4
"""Samples and columns from which on blocks of samples may be made: the forward pass in parts has to be won back."""

BLOCK_SAMPLES, BLOCK_WIDTH = 4, 32
"""Samples of the first block, from which sizes are known, and of others at least; columns that fit at most."""

OPERANDS = 16
"""Budgets that what is read of a block may take where nothing larger is made of it: a limit of memory."""

PRODUCTS = 4
"""Budgets that products of positions with positions, or of samples with samples, may take: a limit of memory."""

SHARES = 4
"""How many times the per-sample gradients of a block fit the budget: they are written, squared and added up in it."""

# Gram matrices of patches (jacobian/rules/autocorrelation.py)

DISPLACED_DTYPES, DISPLACED_ON = (torch.float32, torch.float64), ("cpu",)
"""Where they may come from displacements: elsewhere a convolution may round to fewer bits than a matrix product."""

UNFOLD, ASSEMBLE, CALL, SLICES = 60, 60, 4_000_000, 10_000_000
"""What an entry of the patches, one of the result, a product, and reading slices cost, in multiplications; the cheaper
way is taken."""

EXACT = 4096
"""Positions that are summed at once: a weight gradient adds them one by one, which in float32 rounds 1e-5 off at 50000.
A limit of rounding."""

# Shortcuts by the structure of a function (jacobian/structure)

FEW = 16
"""Columns below which no structure is looked for."""

PAYS = 0.8
"""The estimated part of the work of all columns below which a shortcut is taken: estimates are rough."""

LOOK, LOOK_ENTRY, LOOKS = 2.0**24.5, 2.0**9, 16
"""What it costs to follow a site, and an entry there, in multiplications; what must be at stake, in such costs, so that
to find nothing costs little."""

CLASS, COLUMN, SHARED = 2.0**22, 2.0**18, 1.3
"""What the work around the products costs, in multiplications: to cut out a class at a site, to pull a column back; and
how many times as much as by itself a column costs that shares its pass."""

FACTORED_COST = 8.0
"""Multiplications for each number of a triangle and column of it."""

NARROWER, NARROWEST = 0.7, 3
"""A narrow layer has to have so much less entries than what comes before; so many of the narrowest are tried, and all
their combinations."""

TOGETHER = 2**19
"""Numbers that the columns of one shared pass have at the largest site, if one column has not more; the budget, if that
is less."""

KEPT_READ = 2**22
"""Numbers that are kept of what an operation reads while it is read again: a limit of memory."""

FACTORED = 2**28
"""Numbers that are factored at a narrow layer at most, else it is left out: a limit of memory."""

NUMBERED = 2**20
"""Entries from which on groups of columns are not followed through moves: they are numbered, and float32 must tell the
numbers apart. A limit of rounding."""

# Losses without known structure (jacobian/loss/hessian.py, products/curvature.py)

HESSIAN = 2**28
"""Numbers of a joint Hessian above which it is refused, instead of filling the memory."""

CHECKED = 2**24
"""Numbers of a Hessian up to which a product looks whether it is convex, which takes all of it."""

# What is looked through (jacobian/evidence.py, jacobian/held.py, skeleton.py)

COMPARED = 2**22
"""Entries up to which a tensor from elsewhere is kept to compare its numbers; of a larger one, that it is the same
unwritten object. A limit of memory."""

HELD = 512
"""Objects of a function that are looked through for tensors before it runs."""

SEARCHED = 2_000
"""Objects that are looked through for a reference to a module; whether more of them lead there is seen in calls."""

# Checks of inverses (invertible/probe.py, invertible/recording.py)

PROBED, PROBED_SAVED = 64, 8
"""Entries up to which all of x, and of what autograd saves, are compared; of a larger tensor, so many."""

AT_ONCE = ("cpu",)
"""Devices where reading a number makes nobody wait: elsewhere it is looked at after the backward pass."""
