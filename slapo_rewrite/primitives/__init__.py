"""The schedule language's primitives, one a file."""
