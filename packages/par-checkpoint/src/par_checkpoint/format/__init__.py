"""What is in the files, down to the byte: safetensors headers, index, manifest, tagged JSON, pickles, checksums.

Pure: nothing here knows folders, ranks or plans. Bytes that are given become values, values become bytes; whatever
others may have written is checked, and refused in words.
"""
