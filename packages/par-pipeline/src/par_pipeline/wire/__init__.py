"""Messages between the ranks of a pipeline.

`Wire` is a rank's whole connection: to each neighbour it has an `Outbox` and an `Inbox`, which send and receive over
`lanes`, private communicators. What goes over them is a `message`: a header, and the tensors of one stage's outputs or
gradients, which come `apart` on GPUs. Data flow runtime -> Wire -> Outbox -> message -> lane, and back through the
peer's Inbox.
"""
