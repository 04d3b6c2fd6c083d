"""Text: files become tokens, tokens become packed sequences.

`records` reads lines and rows, `tokenize` turns them into documents, `corpus` keeps the tokens in memory-mapped files.
`packing` lays documents out in sequences (pure arithmetic), `packed` is the dataset, `mixture` mixes several of them.
"""
