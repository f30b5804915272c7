"""What a model folder holds, and whether it was loaded whole.

`files` reads small files of a folder or hub repository, `formats` refuses checkpoints in formats that cannot be run,
before anything heavy is imported, and `weights` compares what the files hold with what the model took from them.
"""
