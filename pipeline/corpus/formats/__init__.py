"""What a source file may be written in: how its columns are told, and how its rows are read.

format      the interface, and what could not be decoded
formats     every format by its name
parquet, arrow_table                    columns as the file or the table says
"""
