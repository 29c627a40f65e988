"""Exact columns of a GGN or a Hessian at the cost of the structure of a function: each file builds on those before it.

`bottleneck`: tensors that all paths cross. `groups`: columns that the loss keeps apart, and `moved` where a function of
the outputs keeps them so. `cells`: how cotangents lie at a parameter, and are reduced cell by cell. `pattern`: a run of
one sample with its receptive fields followed. `colouring`: which groups can share a pass. `closed`: a last operation
without columns. `narrowed`: the columns that are left at a bottleneck. `planner`: what each way costs. `execute`: a way
as pullbacks. `report`: what is told of it.
"""
