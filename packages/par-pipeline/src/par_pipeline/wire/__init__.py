"""Messages between the ranks of a pipeline.

`Wire` connects a rank with its peers: for each neighbour it has an `Outbox` and an `Inbox`, which send and receive over
`lanes`, private communicators. A `message` is a header with the tensors of one stage's outputs or gradients; on GPUs,
`apart` receives the tensors separately. Data flow runtime -> Wire -> Outbox -> message -> lane, and back through the
peer's Inbox.
"""
