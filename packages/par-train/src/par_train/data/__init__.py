"""Batches of all data ranks together: each rank loads its share of them and brings it to its device.

loader (`GlobalDataLoader`: order, position, shares) draws with random numbers of its own (randomness), takes contiguous
shares (shares), or lanes of a stream that is sharded (lanes), sends what one rank of a replica has read to the others
(message), and places what a DataLoader gives (place). What it may load: a file of text becomes tokens (tokenize) in
files that all ranks map (corpus), and these become rows (packing, rows).
"""
