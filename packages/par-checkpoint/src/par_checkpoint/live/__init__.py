"""Transfer of state in memory, from the ranks that hold it to the ranks that need it.

Ranks exchange claims of the elements that they hold. Each rank computes which elements it takes from which rank
(`wanted`) and requests them (`requests`), and the pieces travel within a budget of memory (`source`). `reshard` is the
public call. `Publisher` and `Receiver` move complete `version`s from a trainer to generators, which meet at a
`rendezvous`.
"""
