"""A call of an invertible function, and how to have it again: its input from its output, and what autograd saves.

Read in this order: `slots` and `block` (where the tensors between blocks are), `call` (one call on flat lists of
tensors), what looks on the first time (`watch`, a `sight`; `surroundings` and `outside` are what it finds) and the next
time (`recall`), what is around it (`replay`, `attributes`, `left`), `hooks` (plain autograd, with a `recording`),
`function` and `maps` (inside of torch.func); which calls need not be watched, and what is done of them, of a chain in
one run (`purity`, `straight` and its like); then how it is told whether all of that was the same (`probe`, `origins`,
`report`).
"""
