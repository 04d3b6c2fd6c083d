"""Who holds what, which files hold it, and who writes or reads which block: arithmetic, the same on every rank.

The entries of a rank become claims; the claims of all ranks become global tensors; those are laid out in files, whose
blocks are dealt out. It sees neither data nor processes.
"""
