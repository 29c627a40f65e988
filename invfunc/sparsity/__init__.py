"""Exact columns of a GGN at the cost of the structure of a function.

`groups` are columns that the loss keeps apart; `paths` finds bottlenecks in the graph, `pattern` runs one sample with
its receptive fields followed, `colouring` says which groups can share a pass. `planner` has `search` cost the `ways`;
`stages` goes one, through each `bottleneck`, and with `cells` at each parameter. `report` tells of it.
"""
