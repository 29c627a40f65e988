"""How much memory a call will take, before it takes any, and the fewest chunks with which that is within a budget."""
