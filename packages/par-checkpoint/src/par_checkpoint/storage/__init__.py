"""Folders on disks and object stores: their content, and how a save replaces it.

`folder` says what a file system must do; `local` and `remote` do it, each with a commit protocol at its head (`commit`
is the local one, under a `lease`). `sharing` knows file systems that machines share, `objects` the stores behind
`remote`. Read upwards: `directory` finds tensors, `outline` a whole checkpoint, `verify` and `steps` use it.
"""
