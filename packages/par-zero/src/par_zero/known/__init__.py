"""Known optimizers, and the tensors that each of them reads when it updates an element.

`classes` is a table of class names. `scope` looks up a class in it.
"""
