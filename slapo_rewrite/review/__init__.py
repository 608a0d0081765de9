"""Shows an output to reviewers: the request, the changes, and their reasons."""
