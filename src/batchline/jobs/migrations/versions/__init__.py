"""One file for each change of the tables, named after its number."""
