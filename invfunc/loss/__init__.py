"""The border between a model and its loss, and the columns that the loss sends back."""
