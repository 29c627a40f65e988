"""What a function's structure saves: from which entries each entry of its tensors can depend."""
