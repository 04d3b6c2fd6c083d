"""A first tier that is local to each host: every host keeps its part, and perhaps that of its neighbours.

`part` is the format of a part, `saving` writes one, `travel` brings blocks from host to host, `copies` makes those on
the neighbours and in the next tier, `kept` finds the parts again and reads them.
"""
