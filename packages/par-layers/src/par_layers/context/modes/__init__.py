"""How attention reaches the keys of other ranks: by one exchange, around a ring, or by tokens in exchange for heads."""
