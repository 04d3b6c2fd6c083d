"""Communication with other ranks.

`environment` reads a launcher's variables, `launch` starts torch.distributed from them, and `process_groups` makes the
communicators of a topology. `agreement` uses the communicators to let ranks succeed or fail together.
"""
