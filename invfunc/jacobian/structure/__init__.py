"""Exact columns of a GGN at the cost of the structure of a function.

`groups` are columns that the loss keeps apart; `paths` finds narrow layers in the graph, `pattern` runs one sample
under `labels`, `boxes` says which groups can share a pass. `plan` has `search` cost the `ways`; `stages` goes one,
through `narrow` layers, and with `cells` at each parameter. `report` tells of it.
"""
