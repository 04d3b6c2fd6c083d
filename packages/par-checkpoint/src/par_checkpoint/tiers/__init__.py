"""A first tier that is local to each host: every host stores its own part, and copies of its neighbours' parts.

`part` has the format of a part, `saving` writes parts, and `travel` moves blocks from host to host. `copies` creates
the copies on neighbours and in the next tier. `kept` finds parts and reads them.
"""
