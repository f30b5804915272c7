"""One batch file in, one result file out, with nothing lost.

The modules that a batch line passes, in the order in which `run` calls them:

    source    the input as plain bytes on disk
    check     parses, counts and indexes every line
    plan      orders the requests and finds duplicates
    runner    sends requests to a backend, a bounded number at a time
    journal   makes results durable
    sink      writes the results to their targets

Knows backends only through `backends.base`. Prints nothing, except for the progress bar of the Python API
(`progress_bar`).
"""
