"""What a source file may be written in: how its columns are told, and how its rows are read.

format      the interface, and what could not be decoded
formats     every format by its name
parquet, arrow_file, arrow_table    columns as the file or the table says
json_lines, csv                     columns learned by a first pass (inferred, values)
table_part                          a data file of a table (cairn.pipeline.corpus.tables)
text, html                          a document a file: id, title, text, keys of front_matter
"""
