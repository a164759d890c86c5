"""A user's own data: folders of images, arrays, tables, Hugging Face folders. Each is `read(path, options) -> Draft`.

    folders       client/class/image, or class/image
    arrays        .npz with `x`, `y`, and perhaps `client` and `newcomer`
    tables        CSV and Parquet: a label column, a client column, features, images, tokens or texts (extra `tables`)
    huggingface   a folder written by `Dataset.save_to_disk`

What is refused is named with its file and row, and with what to do about it. Nothing is written here: `data/kept.py`
does that.
"""
