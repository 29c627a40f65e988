"""Where a model ends and its loss begins, and the columns that the loss sends back."""
