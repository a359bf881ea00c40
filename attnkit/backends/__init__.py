"""One module per backend, all with the same functions: supports, forward, backward, decode."""
