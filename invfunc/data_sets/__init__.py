"""More than one batch in one process: loaders, and processes."""
