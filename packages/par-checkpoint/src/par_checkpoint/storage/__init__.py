"""Folders on disks and object stores: what is in them, and how a save takes the place of what was there.

`folder` says what a file system must do; `local` and `remote` do it, each with a commit protocol at its head (`commit`
is the local one, under a `lease`). `sharing` knows file systems that machines share, `objects` the stores behind
`remote`. Read upwards: `directory` finds tensors, `outline` a whole checkpoint, `verify` and `steps` use it.
"""
