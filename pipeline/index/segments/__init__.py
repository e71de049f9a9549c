"""A generation's rows in segments: files that never change, and the rows of each that are deleted.

    generation 7   documents.faiss, documents.arrow, …    the segment that was made whole
                   deleted.bits                           its rows that count no more
                   00000006-documents.faiss, …            what generation 6 added
                   00000007-documents.faiss, …            what generation 7 added

Segments stand in the order of the tables' rows. A position of a generation counts the rows that are left, so
a position is a row of a scan of Lance, and no one beyond this package sees segments. A publication adds one
segment, and links the files of the others into its folder. Scores do not depend on how rows are cut into
segments: statistics are summed, and ties go by position and id.

``segment`` opens one and reads several as one. ``writer`` makes one of rows, and ``words`` its files of
words. ``assembly`` puts those of a new generation together.
"""
