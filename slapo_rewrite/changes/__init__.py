"""What can change in a class, a file for each kind of change: where it goes and what it writes."""
