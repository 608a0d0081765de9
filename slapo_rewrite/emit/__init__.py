"""The output folder: files, record, diff, all or nothing."""
