"""Which entries of some roots each entry of a tensor can depend on: boxes of coordinates, from the operations alone."""
