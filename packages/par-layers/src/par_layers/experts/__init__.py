"""A mixture of experts over ranks: each token goes to the few experts that its router chooses, wherever they live.

A router scores (`router`), pure arithmetic selects (`selection`), a recompute is given the same selection (`replay`),
and losses and a bias keep the experts equally busy (`balance`; `step` ends a step of all routers).

`rows` says in which order rows lie (pure), `dispatch` sends them there and back, `capacity` gives every expert a fixed
number of slots, `experts` computes on `products`, beside `shared` ones, `cost` says what all that costs (pure).

`moe` is the layer of all this, whose `entrance` knows how a tensor group's tokens get there and their sums back.
"""
