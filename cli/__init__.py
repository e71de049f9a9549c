"""The terminal: one thin file a verb; each parses, calls one function and prints.

    main        the `cairn` group, its exit codes and its one-line errors
    options     options made from the fields of settings
    runs        what the trainings share
    settings    flag > CAIRN_* > cairn.toml > what the collection was built with > default
    terminal    progress bars and tables

Results go to stdout, everything else to stderr.
"""
