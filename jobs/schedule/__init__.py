"""Schedules: command lines of Cairn that run by the clock.

    schedules.toml ─▶ scheduler ─▶ child process ─▶ history
    schedules         starts what   does the work    one record
                      is due        of an ingest     a run

Import from the modules: ``schedules`` (the file and its calendar), ``scheduler`` (the process, its history).
"""
