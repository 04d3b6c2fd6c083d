"""The bytes of the files: safetensors headers, index, manifest, tagged JSON, pickles, checksums.

These modules are pure: they have no folders, ranks or plans. They convert bytes to values and values to bytes. They
check all bytes that another program may have written, and raise errors that name the fault.
"""
