"""The kinds of changes of a class, one file for each: where they go and what they write."""
