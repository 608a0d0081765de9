"""Python source as such: where things stand in it, and the one transform that changes it."""
