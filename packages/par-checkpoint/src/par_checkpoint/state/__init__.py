"""State in memory: a model's tensors and an optimizer's slots, named as in the files and cut as their records say.

`collect` turns it into entries for a save; `targets` matches it with what files hold and `restore` sets the rest for a
load. It speaks to no other rank.
"""
