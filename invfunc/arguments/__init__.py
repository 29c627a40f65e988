"""The arguments of a call, sorted: what is of samples, what is differentiated, and what f is called with."""
