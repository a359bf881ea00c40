"""One module per backend, all with the same functions: forward, backward, decode, append."""
