"""From an `nn.Module` to a pure function: the copy that is called, and what may not lead out of it."""
