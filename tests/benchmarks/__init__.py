"""`python -m tests.benchmarks`: what invfunc costs beside BackPACK and plain `vmap`."""
