"""A device of torch that runs on the CPU and enforces the rules of a GPU: `torch.device("strict")`.

`build` compiles `native`, `device` registers it with torch. `kernels` and `copies` run each operator as the CPU would
and ask `native` whether it breaks a rule of `errors`. `costs` and `times` are virtual time, `ranks` is for collectives.
"""
