"""What talks to other ranks.

`environment` reads what a launcher left in the variables, `launch` starts torch.distributed from it, and
`process_groups` makes the communicators of a topology. On these, `agreement` lets ranks succeed or fail together.
"""
