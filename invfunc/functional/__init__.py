"""From an `nn.Module` to a pure function of its parameters."""
