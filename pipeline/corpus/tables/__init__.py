"""Tables of Lance, Delta Lake and Iceberg as sources: one version, as the data files that it names.

tables                what is a table, and how it is opened
part                  a data file without its deleted rows, which never changes
delta, iceberg, lance each through its own library
"""
