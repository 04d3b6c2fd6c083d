"""The bytes of the files: safetensors headers, index, manifest, tagged JSON, pickles, checksums.

Pure: nothing here knows folders, ranks or plans. Bytes that are given become values, values become bytes; whatever
others may have written is checked, and refused in words.
"""
