"""Which optimizers par-zero knows, and what each of them looks at when it updates an element.

`classes` is a table of names. `scope` looks a class up in it.
"""
