"""What comes from elsewhere - a run folder, a bundle, an array, a node's message - is taken in here, and nowhere else.

folder    files of a folder: regular ones, below it, no link followed; written whole or not at all
archive   a folder's files in one .zip
tensors   named tensors in a file (safetensors), with a digest
parse     JSON and NumPy headers, with limits on size and nesting; any failure is a ValueError
limits    how much may be read or unpacked, and the environment variables that raise it
text      text that others wrote, for the terminal, for CSV and for Markdown
"""
