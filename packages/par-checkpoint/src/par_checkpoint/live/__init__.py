"""State that moves in memory, from the ranks that hold it to the ranks that need it.

Ranks exchange claims of what they hold. Each rank computes what it takes from whom (`wanted`) and requests it
(`requests`), and the pieces travel within a budget of memory (`source`). `reshard` is the public call.
`Publisher` and `Receiver` move complete `version`s from a trainer to generators, which meet at a `rendezvous`.
"""
