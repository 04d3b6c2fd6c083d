"""The holders of tensors, the files, and the writer or reader of each block: arithmetic, identical on every rank.

The entries of a rank become claims; the claims of all ranks become global tensors; those are laid out in files, whose
blocks are dealt out. It sees neither data nor processes.
"""
