"""The core of the statistics: f runs once under a function mode, and per-sample gradients are contractions."""
