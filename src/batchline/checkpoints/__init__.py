"""Reads and checks model folders, before and after loading.

`files` reads small files of a folder or hub repository. `formats` refuses checkpoints in unsupported formats before
anything heavy is imported. `weights` compares the weights in the files with those that the model loaded.
"""
